"""The model of many nodes (scaling.py), fitted to what was measured, held against what it was not fitted to, and applied to
the thesis's cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    if any(len({sample.rows for sample in samples}) < 2 for samples in (spark, server)):
        return None
    largest, most = max(sample.rows for sample in spark), max(sample.tasks for sample in spark)
    push, push_by_socket = _push_s(found, model)
    if largest < ROWS_TO_FIT or most == cores or push_by_socket is None:
        return None
    to_spark = partial(fit_spark, cores=cores, task=_driver_s_a_task(found, model, cores, most))
    to_server = partial(fit_server, cores=cores, push=push)
    usual_spark = [sample for sample in spark if sample.tasks in (cores, most)]
    usual_server = _samples([line for line in found if not line.tasks], model, "ps-sync", cores)  # over shared memory
    spark_costs, server_costs = to_spark(usual_spark), to_server(usual_server)
    by_socket = replace(server_costs, push=push_by_socket)

    weights = arithmetic.num_weights(model, PROBLEMS[SETTINGS[model].problem].features)
    held = partial(_held, weights=weights, cores=cores)
    errors = [
        abs(each.error)
        for each in held("mllib", spark_costs, usual_spark) + held("ps-sync", server_costs, usual_server)
    ]
    checks = []
    # The most rows by a model that is fitted without them, other numbers of tasks by the model itself.
    fewer_spark, fewer_server = ([s for s in samples if s.rows < largest] for samples in (usual_spark, usual_server))
    if len({sample.rows for sample in fewer_spark}) > 1:
        checks += held("mllib", to_spark(fewer_spark), [s for s in usual_spark if s.rows == largest])
        checks += held("ps-sync", to_server(fewer_server), [s for s in usual_server if s.rows == largest])
    checks += held("mllib", spark_costs, [s for s in spark if s not in usual_spark])
    checks += held("ps-sync", by_socket, [s for s in server if s not in usual_server])
    predictions = tuple(_predict(model, spark_costs, by_socket, weights))
    return Scaled(model, spark_costs, by_socket, median(errors), max(errors), tuple(checks), predictions)


def _held(
    arm: Arm, costs: SparkCosts | ServerCosts, samples: Sequence[Sample], weights: int, cores: int
) -> list[Check]:
    """A model against measurements on this machine, where all share the cores."""

    def check(sample: Sample) -> Check:
        units = f"{sample.tasks} {'tasks' if arm == 'mllib' else 'workers'}"
        on = Cluster(cores, sample.tasks, cores, has_network=False)
        seconds = costs.mini_batch_s(sample.rows, sample.batch, weights, on)
        return Check(f"{arm}, {sample.batch:,} of {sample.rows:,} rows, {units}", seconds, sample.seconds)

    return [check(sample) for sample in samples]


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
