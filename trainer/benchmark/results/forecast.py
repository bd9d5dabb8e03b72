"""The cost model: fitted to measurements, validated on others, and applied to the thesis's cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from trainer.benchmark.arithmetic import count_weights
from trainer.benchmark.configurations import HYPERPARAMETERS, Model, System
from trainer.benchmark.problems import PROBLEMS
from trainer.benchmark.results import published
from trainer.benchmark.results.cost_model import (
    Cluster,
    ServerCosts,
    SparkCosts,
    TimedMiniBatch,
    fit_server,
    fit_spark,
)
from trainer.benchmark.results.summary import SystemSummary

ROWS_TO_FIT = 100_000  # with fewer, the fixed cost of a job hides the cost per row
MASTER_CORES = published.CORES_PER_NODE  # the thesis's master is a node like the others
Samples = Sequence[TimedMiniBatch]


@dataclass(frozen=True)
class Validation:
    """A predicted and measured mini-batch."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return the relative error; negative if the prediction is too fast."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Prediction:
    """A predicted mini-batch of the thesis's synthetic set on the thesis's nodes.

    Attributes:
        model: the trained model.
        batch: rows of the mini-batch.
        rows: of the set.
        mllib: seconds by cause.
        sync: seconds by cause of the synchronous server with one worker per node.
        sync_per_core_s: seconds of the synchronous server with one worker per core.
        async_s: seconds of the asynchronous server with one worker per node.
    """

    model: Model
    batch: int
    rows: int
    mllib: Mapping[str, float]
    sync: Mapping[str, float]
    sync_per_core_s: float
    async_s: float

    @property
    def gap(self) -> float:
        """Return MLlib's seconds / the synchronous server's, with one worker per node."""
        return sum(self.mllib.values()) / sum(self.sync.values())

    @property
    def gap_per_core(self) -> float:
        """Return MLlib's seconds / the synchronous server's, with one worker per core."""
        return sum(self.mllib.values()) / self.sync_per_core_s


@dataclass(frozen=True)
class CostModel:
    """The costs of one model's mini-batches, and their accuracy.

    Attributes:
        model: the trained model.
        spark: costs of MLlib.
        server: costs of the server with pushes over sockets.
        error: median relative error on the fitted measurements.
        largest_error: largest relative error on the fitted measurements.
        validations: on measurements that were not fitted.
        predictions: for the thesis's cluster.
    """

    model: Model
    spark: SparkCosts
    server: ServerCosts
    error: float
    largest_error: float
    validations: tuple[Validation, ...]
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Timings:
    """The measurements of one model on this machine. Costs are CPU seconds.

    Attributes:
        model: the trained model.
        cores: of this machine.
        spark: MLlib's mini-batches.
        server: the synchronous server's.
        memory_server: the part of ``server`` with one worker per core, over shared memory.
        task: driver's cost per additional task.
        memory_push: server's cost per push over shared memory.
        socket_push: server's cost per push over sockets; None if not measured.
    """

    model: Model
    cores: int
    spark: Samples
    server: Samples
    memory_server: Samples
    task: float
    memory_push: float
    socket_push: float | None

    @property
    def most_rows(self) -> int:
        return max(sample.rows for sample in self.spark)

    @property
    def usual_spark(self) -> Samples:
        """Return the MLlib samples with one task per core, and the samples with the most tasks."""
        most = max(sample.tasks for sample in self.spark)
        return [sample for sample in self.spark if sample.tasks in (self.cores, most)]

    def suffice(self) -> bool:
        """True if the measurements determine the costs.

        They do with several numbers of rows, enough rows, more tasks than cores, and a push over sockets."""
        several = all(len({sample.rows for sample in samples}) > 1 for samples in (self.spark, self.server))
        return (
            several
            and self.most_rows >= ROWS_TO_FIT
            and max(sample.tasks for sample in self.spark) != self.cores
            and self.socket_push is not None
        )

    def validate(self, system: System, costs: SparkCosts | ServerCosts, samples: Samples) -> list[Validation]:
        """Return the predicted and the measured seconds of mini-batches on this machine.

        Its cores are shared by tasks, driver, workers and server, and no message leaves it.

        Args:
            system: "mllib" or a parameter server.
            costs: the fitted costs of that system.
            samples: the measurements.
        """
        weights = count_model_weights(self.model)
        units = "tasks" if system == "mllib" else "workers"
        return [
            Validation(
                f"{system}, {sample.batch:,} of {sample.rows:,} rows, {sample.tasks} {units}",
                costs.mini_batch_s(
                    sample.rows, sample.batch, weights, Cluster(self.cores, sample.tasks, self.cores, False)
                ),
                sample.seconds,
            )
            for sample in samples
        ]


def fit_cost_models(summaries: Sequence[SystemSummary], cores: int) -> list[CostModel]:
    """Return a cost model per model with sufficient measurements, see Timings.suffice."""
    timings = [collect_timings(summaries, model, cores) for model in HYPERPARAMETERS]
    return [_fit_cost_model(each) for each in timings if each.suffice()]


def collect_timings(summaries: Sequence[SystemSummary], model: Model, cores: int) -> Timings:
    """Collect one model's measurements from the summaries."""
    spark = _select_samples(summaries, model, "mllib", cores)
    server = _select_samples(summaries, model, "ps-sync", cores)
    memory_server = _select_samples([each for each in summaries if not each.tasks], model, "ps-sync", cores)
    most = max((sample.tasks for sample in spark), default=cores)
    memory_push, socket_push = _measure_pushes(summaries, model)
    task = _measure_driver_task(summaries, model, cores, most)
    return Timings(model, cores, spark, server, memory_server, task, memory_push or 0.0, socket_push)


def _select_samples(summaries: Sequence[SystemSummary], model: Model, system: System, cores: int) -> Samples:
    """Return a system's mini-batches on one model: a sample per configuration, with the median seconds."""
    return [
        TimedMiniBatch(each.rows, each.batch, each.tasks or cores, each.metrics["compute_s"].median)
        for each in summaries
        if each.model == model and each.system == system and each.metrics
    ]


def _measure_driver_task(summaries: Sequence[SystemSummary], model: Model, cores: int, most: int) -> float:
    """Return the driver's CPU seconds per additional task.

    It is the difference between jobs with the most tasks and jobs with one task per core, divided by the additional
    tasks. 0 if no job has more tasks than there are cores, or if they were not measured.

    Args:
        summaries: of all runs.
        model: the trained model.
        cores: of this machine.
        most: the most tasks of a job.
    """
    if most <= cores:
        return 0.0
    of_mllib = [
        each for each in summaries if (each.model, each.system) == (model, "mllib") and "driver_s" in each.metrics
    ]
    few = [each.metrics["driver_s"].median for each in of_mllib if each.tasks is None]
    many = [each.metrics["driver_s"].median for each in of_mllib if each.tasks == most]
    # Noise must not make a task's cost negative.
    return max(0.0, median(many) - median(few)) / (most - cores) if few and many else 0.0


def _measure_pushes(summaries: Sequence[SystemSummary], model: Model) -> tuple[float | None, float | None]:
    """Return the server's CPU seconds per push over shared memory and over sockets; None if not measured.

    Taken from the run with the most workers, whose coordinator has the most to do. Among equals the longest run counts,
    because the CPU time includes the server's start."""
    of_model = [each for each in summaries if (each.model, each.system) == (model, "ps-sync")]
    by_length = sorted(
        (each for each in of_model if "server_s" in each.metrics),
        key=lambda each: (each.tasks or 0, each.metrics["mini_batches"].median),
    )
    memory = [each.metrics["server_s"].median for each in by_length if not each.tasks]
    sockets = [each.metrics["server_s"].median for each in by_length if each.tasks]
    return (memory[-1] if memory else None), (sockets[-1] if sockets else None)


def count_model_weights(model: Model) -> int:
    """Return the number of a model's weights on the problem that it learns."""
    return count_weights(model, PROBLEMS[HYPERPARAMETERS[model].problem].features)


def _fit_cost_model(timings: Timings) -> CostModel:
    """Fit the costs of one model's mini-batches to measurements, validate them, and predict the thesis's cluster.

    The server is fitted to runs over shared memory. Its cost per push is then replaced by the cost over sockets, which
    workers on other nodes would use."""
    assert timings.socket_push is not None
    spark = fit_spark(timings.usual_spark, timings.cores, timings.task)
    server = fit_server(timings.memory_server, timings.cores, timings.memory_push)
    by_socket = replace(server, push=timings.socket_push)
    fitted_timings = timings.validate("mllib", spark, timings.usual_spark)
    fitted_timings += timings.validate("ps-sync", server, timings.memory_server)
    errors = [abs(each.error) for each in fitted_timings]
    validations = tuple(_validate_on_most_rows(timings) + _validate_on_other_tasks(timings, spark, by_socket))
    predictions = tuple(predict_mini_batches(timings.model, spark, by_socket))
    return CostModel(timings.model, spark, by_socket, median(errors), max(errors), validations, predictions)


def _validate_on_most_rows(timings: Timings) -> list[Validation]:
    """Fit the costs without the largest set, and compare its measurements with their predictions.

    Empty if fewer than two sizes are left to fit."""

    def split(samples: Samples) -> tuple[Samples, Samples]:
        most = timings.most_rows
        return [s for s in samples if s.rows < most], [s for s in samples if s.rows == most]

    fewer_spark, most_spark = split(timings.usual_spark)
    fewer_server, most_server = split(timings.memory_server)
    if len({sample.rows for sample in fewer_spark}) < 2:
        return []
    spark = fit_spark(fewer_spark, timings.cores, timings.task)
    server = fit_server(fewer_server, timings.cores, timings.memory_push)
    return timings.validate("mllib", spark, most_spark) + timings.validate("ps-sync", server, most_server)


def _validate_on_other_tasks(timings: Timings, spark: SparkCosts, by_socket: ServerCosts) -> list[Validation]:
    """Compare other numbers of tasks and workers, to which the costs are not fitted."""
    other_spark = [sample for sample in timings.spark if sample not in timings.usual_spark]
    other_server = [sample for sample in timings.server if sample not in timings.memory_server]
    return timings.validate("mllib", spark, other_spark) + timings.validate("ps-sync", by_socket, other_server)


def predict_mini_batches(model: Model, spark: SparkCosts, server: ServerCosts) -> list[Prediction]:
    """Predict the thesis's mini-batches on its cluster: all rows, a hundredth and a thousandth of them."""
    rows = published.SYNTHETIC_ROWS[model]
    nodes = published.NODES
    weights = count_model_weights(model)
    cores = nodes * published.CORES_PER_NODE
    # MLlib runs a task per core, the thesis's server a worker per node. The benchmark's own server has a worker per
    # core, and so twice the pushes, which is predicted as well.
    per_core = Cluster(cores, cores, MASTER_CORES)
    per_node = Cluster(cores, nodes, MASTER_CORES)
    return [
        Prediction(
            model,
            batch,
            rows,
            spark.split(rows, batch, weights, per_core),
            server.split(rows, batch, weights, per_node),
            server.mini_batch_s(rows, batch, weights, per_core),
            server.asynchronous_s(rows, batch, weights, per_node),
        )
        for batch in (rows, rows // 100, rows // 1000)
    ]


def average_gaps(models: Sequence[CostModel]) -> tuple[float, float] | None:
    """Return the means of ``gap`` and ``gap_per_core``, MLlib's predicted slowdown factors.

    The means are over mini-batches smaller than the set, as in the thesis; None if there are none."""
    predictions = [each for model in models for each in model.predictions if each.batch < each.rows]
    if not predictions:
        return None
    return fmean(each.gap for each in predictions), fmean(each.gap_per_core for each in predictions)
