"""The model of many nodes (scaling.py), fitted to what was measured, held against what it was not fitted to, and applied to
the thesis's cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from pipeline.benchmark import arithmetic, published
from pipeline.benchmark.cells import SETTINGS, Arm, Model
from pipeline.benchmark.problems import PROBLEMS
from pipeline.benchmark.scaling import Cluster, Sample, ServerCosts, SparkCosts, fit_server, fit_spark
from pipeline.benchmark.summary import Line

ROWS_TO_FIT = 100_000  # on fewer a job's own cost hides what passing over a row costs
MASTER_CORES = published.CORES_A_NODE  # the thesis's master is a node like the others


@dataclass(frozen=True)
class Check:
    """A mini-batch that the model was not fitted to. name: which; seconds, as the model has it and as it was measured."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative, signed: below 0 the model is too fast."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Prediction:
    """A mini-batch of the thesis's synthetic set on its nodes, by the model: seconds of MLlib and of the synchronous server
    by what they go to, of the same server with a worker a core instead of one a node, and of the asynchronous one."""

    model: Model
    batch: int
    rows: int
    mllib: Mapping[str, float]
    sync: Mapping[str, float]
    sync_a_core_s: float
    async_s: float

    @property
    def gap(self) -> float:
        """MLlib's seconds over the synchronous server's."""
        return sum(self.mllib.values()) / sum(self.sync.values())

    @property
    def gap_a_core(self) -> float:
        return sum(self.mllib.values()) / self.sync_a_core_s


@dataclass(frozen=True)
class Scaled:
    """The model of a learner: its costs, how far it is from what it was fitted to (relative error, median and largest), how
    far from what it was not, predictions."""

    model: Model
    spark: SparkCosts
    server: ServerCosts
    error: float
    largest_error: float
    checks: tuple[Check, ...]
    predictions: tuple[Prediction, ...]


def scaled(found: Sequence[Line], cores: int) -> list[Scaled]:
    """For every regression that MLlib and the synchronous server were timed with, on several numbers of rows, enough of
    them, and of tasks."""
    return [result for model in SETTINGS if (result := _scaled(model, found, cores))]


def _scaled(model: Model, found: Sequence[Line], cores: int) -> Scaled | None:
    spark, server = (_samples(found, model, arm, cores) for arm in ("mllib", "ps-sync"))
    if len({sample.rows for sample in spark}) < 2 or len({sample.rows for sample in server}) < 2:
        return None
    if max(sample.rows for sample in spark) < ROWS_TO_FIT:
        return None
    most, few = max(sample.tasks for sample in spark), [sample for sample in server if sample.tasks == cores]
    fitted = [sample for sample in spark if sample.tasks in (cores, most)]
    task = _driver_s_a_task(found, model, cores, most)
    push, push_by_socket = _push_s(found, model)
    if most == cores or push_by_socket is None:
        return None
    weights = arithmetic.num_weights(model, PROBLEMS[SETTINGS[model].problem].features)

    def here(tasks: int) -> Cluster:
        return Cluster(cores, tasks, cores, has_network=False)

    def by_spark(costs: SparkCosts, sample: Sample) -> float:
        return costs.mini_batch_s(sample.rows, sample.batch, weights, here(sample.tasks))

    def by_server(costs: ServerCosts, sample: Sample) -> float:
        return costs.mini_batch_s(sample.rows, sample.batch, weights, here(sample.tasks))

    def few_rows(samples: Sequence[Sample]) -> list[Sample]:
        largest = max(sample.rows for sample in samples)
        return [sample for sample in samples if sample.rows < largest]

    def check(arm: str, seconds: float, sample: Sample) -> Check:
        units = f"{sample.tasks} {'tasks' if arm == 'mllib' else 'workers'}"
        return Check(f"{arm}, {sample.batch:,} of {sample.rows:,} rows, {units}", seconds, sample.seconds)

    spark_costs, server_costs = fit_spark(fitted, cores, task), fit_server(few, cores, push)
    by_socket = replace(server_costs, push=push_by_socket)
    errors = [abs(by_spark(spark_costs, s) / s.seconds - 1) for s in fitted]
    errors += [abs(by_server(server_costs, s) / s.seconds - 1) for s in few]
    # Those of the most rows by the model that is fitted without them; other numbers of tasks by the model itself.
    without, few_without, checks = few_rows(fitted), few_rows(few), []
    if len({s.rows for s in without}) > 1:
        spark_without, server_without = fit_spark(without, cores, task), fit_server(few_without, cores, push)
        checks += [check("mllib", by_spark(spark_without, s), s) for s in fitted if s not in without]
        checks += [check("ps-sync", by_server(server_without, s), s) for s in few if s not in few_without]
    checks += [check("mllib", by_spark(spark_costs, s), s) for s in spark if s not in fitted]
    checks += [check("ps-sync", by_server(by_socket, s), s) for s in server if s not in few]
    predictions = tuple(_predict(model, spark_costs, by_socket, weights))
    return Scaled(model, spark_costs, by_socket, median(errors), max(errors), tuple(checks), predictions)


def _samples(found: Sequence[Line], model: Model, arm: Arm, cores: int) -> list[Sample]:
    return [
        Sample(line.rows, line.batch, line.tasks or cores, line.figures["compute_s"].median)
        for line in found
        if line.model == model and line.arm == arm and line.figures
    ]


def _driver_s_a_task(found: Sequence[Line], model: Model, cores: int, most: int) -> float:
    """CPU that the driver spends on one task more: from jobs of as many tasks as cores to those of the most."""
    mine = [line for line in found if (line.model, line.arm) == (model, "mllib") and "driver_s" in line.figures]
    few, many = ([line.figures["driver_s"].median for line in mine if line.tasks == tasks] for tasks in (None, most))
    return max(0.0, median(many) - median(few)) / (most - cores) if few and many else 0.0


def _push_s(found: Sequence[Line], model: Model) -> tuple[float, float | None]:
    """CPU of the server a push: over shared memory, and over sockets, as with many workers; None where not measured. Of the
    longest run each: it holds what a server does before the first."""
    mine = [line for line in found if (line.model, line.arm) == (model, "ps-sync") and "server_s" in line.figures]
    longest = sorted(mine, key=lambda line: line.figures["mini_batches"].median)
    memory, socket = (
        [line.figures["server_s"].median for line in longest if bool(line.tasks) == many] for many in (0, 1)
    )
    return memory[-1] if memory else 0.0, socket[-1] if socket else None


def _predict(model: Model, spark: SparkCosts, server: ServerCosts, weights: int) -> list[Prediction]:
    rows, nodes = published.SYNTHETIC_ROWS[model], published.NODES
    cores = nodes * published.CORES_A_NODE
    a_core, a_node = (Cluster(cores, tasks, MASTER_CORES) for tasks in (cores, nodes))
    return [
        Prediction(
            model,
            rows // part,
            rows,
            spark.parts(rows, rows // part, weights, a_core),
            server.parts(rows, rows // part, weights, a_node),
            server.mini_batch_s(rows, rows // part, weights, a_core),
            server.asynchronous_s(rows, rows // part, weights, a_node),
        )
        for part in (1, 100, 1000)
    ]


def predicted_gaps(found: Sequence[Scaled]) -> tuple[float, float] | None:
    """Averages over the cells with mini-batches, which the thesis has too: with a worker a node, and a core."""
    cells = [each for model in found for each in model.predictions if each.batch < each.rows]
    return (fmean(each.gap for each in cells), fmean(each.gap_a_core for each in cells)) if cells else None
