"""From measured rows to what they come to: medians, ranges and ratios; the goals; the model of 140 nodes. Pure.

A row is as results.json has it; a ratio is MLlib's median over an arm's, so above 1 the arm is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pipeline.benchmark import arithmetic, published
from pipeline.benchmark.cells import SETTINGS, Arm, Model
from pipeline.benchmark.problems import PROBLEMS
from pipeline.benchmark.scaling import Sample, ServerCosts, SparkCosts, fit_server, fit_spark

LARGEST_GAP_GOAL, AVERAGE_GAP_GOAL = published.LARGEST_GAP, published.AVERAGE_GAP
SMALL_BATCH = 500
ROWS_TO_FIT = 100_000  # on fewer a job's own cost hides what passing over a row costs
Row = Mapping[str, Any]
Sizes = Mapping[
    str, Sequence[tuple[int, int, float]]
]  # by model: (rows, mini-batch, seconds), as mllib.over_sizes has them


@dataclass(frozen=True)
class Spread:
    """Of one figure over the repeats."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True)
class Line:
    """One arm of one cell over all repeats. ratio: MLlib's seconds over this arm's; None where either has none."""

    model: Model
    rows: int
    batch: int
    length: int | None
    arm: Arm
    figures: Mapping[str, Spread]
    converged: bool
    errors: tuple[str, ...]
    ratio: float | None = None
    ratio_each: float | None = None

    @property
    def size(self) -> str:
        return "all" if self.batch >= self.rows else str(self.batch)


FIGURES = ("mini_batches", "updates", "examples", "seconds", "compute_s", "read_s", "cpu", "start_s", "server_s")


def lines(rows: Sequence[Row]) -> list[Line]:
    """One a cell and arm, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["rows"], row["batch"], row["length"], row["arm"]), []).append(row)
    found = [_line(key, group) for key, group in groups.items()]
    base = {_cell(line): line for line in found if line.arm == "mllib"}
    return [_with_ratios(line, base.get(_cell(line))) for line in found]


def _cell(line: Line) -> tuple[Any, ...]:
    return line.model, line.rows, line.batch, line.length


def _line(key: tuple[Any, ...], group: Sequence[Row]) -> Line:
    done = [row["outcome"] for row in group if row["outcome"]]
    figures = {name: _spread([outcome[name] for outcome in done]) for name in FIGURES} if done else {}
    for name in ("loss", "gap"):
        values = [row[name] for row in group if row[name] is not None]
        if values:
            figures[name] = _spread(values)
    errors = tuple(dict.fromkeys(row["error"] for row in group if row["error"]))
    model, count, batch, length, arm = key
    converged = bool(done) and all(outcome["converged"] for outcome in done)
    return Line(model, count, batch, length, arm, figures, converged, errors)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _with_ratios(line: Line, base: Line | None) -> Line:
    if not base or not base.figures or not line.figures:
        return line
    whole = base.figures["seconds"].median / line.figures["seconds"].median
    each = base.figures["compute_s"].median / line.figures["compute_s"].median
    return Line(**{**vars(line), "ratio": whole, "ratio_each": each})


@dataclass(frozen=True)
class Goal:
    """What was hoped for, and what came out; None where it was not measured."""

    text: str
    wanted: float
    found: float | None

    @property
    def is_met(self) -> bool | None:
        return None if self.found is None else self.found >= self.wanted


def goals(found: Sequence[Line]) -> list[Goal]:
    """Those of the thesis: to converge, MLlib's seconds over the faster parameter server's."""
    best: dict[tuple[Any, ...], float] = {}
    for line in found:
        if line.arm.startswith("ps-") and line.length is None and line.converged and line.ratio and line.size != "all":
            best[_cell(line)] = max(best.get(_cell(line), 0.0), line.ratio)
    small = [ratio for cell, ratio in best.items() if cell[2] == SMALL_BATCH]
    average = fmean(best.values()) if best else None
    return [
        Goal(f"largest at a mini-batch of {SMALL_BATCH}", LARGEST_GAP_GOAL, max(small, default=None)),
        Goal("average over the cells with mini-batches", AVERAGE_GAP_GOAL, average),
    ]


@dataclass(frozen=True)
class Prediction:
    """A mini-batch of the thesis's synthetic set on its nodes, by the model: seconds, and MLlib's over each server's."""

    model: Model
    batch: int
    rows: int
    mllib_s: float
    sync_s: float
    async_s: float


@dataclass(frozen=True)
class Scaled:
    """The model of a learner: its costs, how far it is from what it was fitted to (largest relative error), predictions."""

    model: Model
    spark: SparkCosts
    server: ServerCosts
    error: float
    predictions: tuple[Prediction, ...]


def scaled(found: Sequence[Line], cores: int, task_s: float, sizes: Sizes) -> list[Scaled]:
    """For every learner with MLlib's costs on several numbers of rows and the synchronous server's on several batches, if
    there are rows enough."""
    return [result for model in SETTINGS if (result := _scaled(model, found, cores, task_s, sizes.get(model, [])))]


def _scaled(
    model: Model, found: Sequence[Line], cores: int, task_s: float, sizes: Sequence[tuple[int, int, float]]
) -> Scaled | None:
    server_samples = _samples(found, model, "ps-sync")
    spark_samples = _samples(found, model, "mllib") + [Sample(*size) for size in sizes]
    if len({sample.rows for sample in spark_samples}) < 2 or len({s.batch for s in server_samples}) < 2:
        return None
    if max(sample.rows for sample in spark_samples) < ROWS_TO_FIT:
        return None
    push = [
        line.figures["server_s"].median
        for line in found
        if line.model == model and line.arm == "ps-sync" and line.figures
    ]
    spark = fit_spark(spark_samples, cores, task_s)
    costs = fit_server(server_samples, cores, min(push))
    weights = arithmetic.num_weights(model, PROBLEMS[SETTINGS[model].problem].features)
    here = [
        (spark.mini_batch_s(s.rows, s.batch, weights, cores, over_network=False), s.seconds) for s in spark_samples
    ] + [
        (costs.mini_batch_s(s.batch, weights, cores, synchronous=True, over_network=False), s.seconds)
        for s in server_samples
    ]
    error = max(abs(guess / truth - 1) for guess, truth in here)
    return Scaled(model, spark, costs, error, tuple(_predict(model, spark, costs, weights)))


def _samples(found: Sequence[Line], model: Model, arm: Arm) -> list[Sample]:
    return [
        Sample(line.rows, line.batch, line.figures["compute_s"].median)
        for line in found
        if line.model == model and line.arm == arm and line.figures
    ]


def _predict(model: Model, spark: SparkCosts, costs: ServerCosts, weights: int) -> list[Prediction]:
    rows, nodes = published.SYNTHETIC_ROWS[model], published.NODES
    cores = nodes * published.CORES_A_NODE
    return [
        Prediction(
            model,
            rows // part,
            rows,
            spark.mini_batch_s(rows, rows // part, weights, cores),
            costs.mini_batch_s(rows // part, weights, cores, synchronous=True),
            costs.mini_batch_s(rows // part, weights, cores, synchronous=False),
        )
        for part in (1, 100, 1000)
    ]


def read_throughput(found: Sequence[Line], model: Model) -> dict[Arm, float]:
    """Examples a second from storage into memory, all cores together."""
    result: dict[Arm, float] = {}
    for line in found:
        if line.model == model and line.figures and line.arm in ("mllib", "averaging") and line.arm not in result:
            result[line.arm] = line.rows / line.figures["start_s"].median
    return result
