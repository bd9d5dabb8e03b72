"""From measured rows to what they come to: medians, ranges and ratios; the goals; what they say in words. Pure.

A row is as results.json has it; a ratio is MLlib's median over an arm's, so above 1 the arm is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from pipeline.benchmark import published
from pipeline.benchmark.cells import ARMS, SETTINGS, Arm, Model

LARGEST_GAP_GOAL, AVERAGE_GAP_GOAL = published.LARGEST_GAP, published.AVERAGE_GAP
SMALL_BATCH = 500
CELL = ("model", "rows", "batch", "length", "tasks")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Of one figure over the repeats."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True)
class Line:
    """One arm of one cell over all repeats. MLlib's figure over this arm's, None where either has none: ratio, of the
    seconds; ratio_each, of a mini-batch's; ratio_whole, of the seconds with the start."""

    model: Model
    rows: int
    batch: int
    length: int | None
    tasks: int | None
    arm: Arm
    figures: Mapping[str, Spread]
    converged: bool
    errors: tuple[str, ...]
    ratio: float | None = None
    ratio_each: float | None = None
    ratio_whole: float | None = None

    @property
    def size(self) -> str:
        return "all" if self.batch >= self.rows else str(self.batch)

    @property
    def who(self) -> str:
        """The arm, and what is unusual about it."""
        units = "tasks" if self.arm == "mllib" else "workers, by socket"
        return f"{self.arm}, {self.tasks} {units}" if self.tasks else self.arm


FIGURES = (
    "mini_batches",
    "updates",
    "examples",
    "seconds",
    "compute_s",
    "read_s",
    "cpu",
    "load_s",
    "start_s",
    "server_s",
    "driver_s",
    "step_s",
)


def lines(rows: Sequence[Row]) -> list[Line]:
    """One a cell and arm, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((*(row[name] for name in CELL), row["arm"]), []).append(row)
    found = [_line(key, group) for key, group in groups.items()]
    base = {_cell(line): line for line in found if line.arm == "mllib"}
    return [_with_ratios(line, base.get(_cell(line))) for line in found]


def _cell(line: Line) -> tuple[Any, ...]:
    return tuple(getattr(line, name) for name in CELL)


def _line(key: tuple[Any, ...], group: Sequence[Row]) -> Line:
    done = [row["outcome"] for row in group if row["outcome"]]
    measured = {name: [each[name] for each in done if each[name] is not None] for name in FIGURES}
    figures = {name: _spread(values) for name, values in measured.items() if values}
    for name in ("loss", "gap"):
        values = [row[name] for row in group if row[name] is not None]
        if values:
            figures[name] = _spread(values)
    errors = tuple(dict.fromkeys(row["error"] for row in group if row["error"]))
    converged = bool(done) and all(outcome["converged"] for outcome in done)
    model, count, batch, length, tasks, arm = key
    return Line(model, count, batch, length, tasks, arm, figures, converged, errors)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _with_ratios(line: Line, base: Line | None) -> Line:
    if not base or not base.figures or not line.figures:
        return line
    seconds, each = (base.figures[name].median / line.figures[name].median for name in ("seconds", "compute_s"))
    whole, mine = (sum(of.figures[name].median for name in ("seconds", "start_s")) for of in (base, line))
    return replace(line, ratio=seconds, ratio_each=each, ratio_whole=whole / mine)


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
    """Those of the thesis: to converge, MLlib's seconds over the better server's, where both converged."""
    best = _best(found, "ratio")
    small = [ratio for cell, ratio in best.items() if cell[2] == SMALL_BATCH]
    average = fmean(best.values()) if best else None
    return [
        Goal(f"least at a mini-batch of {SMALL_BATCH}, the better server", LARGEST_GAP_GOAL, min(small, default=None)),
        Goal("average over the cells with mini-batches, the better server", AVERAGE_GAP_GOAL, average),
    ]


def _best(found: Sequence[Line], ratio: str) -> dict[tuple[Any, ...], float]:
    """Of the better server in each cell with mini-batches that was run to convergence."""
    ended = {_cell(line) for line in found if line.arm == "mllib" and line.converged}
    best: dict[tuple[Any, ...], float] = {}
    for line in found:
        counts = line.arm.startswith("ps-") and line.length is None and line.converged and line.size != "all"
        if counts and _cell(line) in ended:
            best[_cell(line)] = max(best.get(_cell(line), 0.0), getattr(line, ratio))
    return best


def read_throughput(found: Sequence[Line], model: Model) -> dict[Arm, float]:
    """Examples a second from storage into memory, all cores together, on the most rows that all arms read; medians."""
    mine = [line for line in found if line.model == model and line.figures]
    arms = {line.arm for line in mine}
    sizes = [rows for rows in {line.rows for line in mine} if {each.arm for each in mine if each.rows == rows} == arms]
    if not sizes:
        return {}
    most = [line for line in mine if line.rows == max(sizes)]
    return {
        arm: max(sizes) / max(1e-9, median(line.figures["load_s"].median for line in most if line.arm == arm))
        for arm in ARMS
        if arm in arms
    }


def findings(found: Sequence[Line]) -> list[str]:
    """What the figures say in words: the gap with the start, how fast each reads, where MLlib is the faster one, how much of
    the gap Spark closes without a job a mini-batch, what smaller mini-batches bring. Of as many tasks as cores."""
    found = [line for line in found if not line.tasks]
    told = [_whole(found), *(_reading(found, model) for model in SETTINGS), _winning(found), _closing(found)]
    return [text for text in [*told, *(_shrinking(found, model) for model in SETTINGS)] if text]


def _whole(found: Sequence[Line]) -> str:
    best = _best(found, "ratio_whole")
    if not best:
        return ""
    return (
        f"With the start (reading all rows; for a server also starting its program), the same average is"
        f" {fmean(best.values()):.1f} times, the least {min(best.values()):.1f}."
    )


def _shrinking(found: Sequence[Line], model: Model) -> str:
    """How much faster a mini-batch is than all rows, beside the thesis's figures, and which size converges first."""
    mine = [line for line in found if line.model == model and line.length is None and line.figures]
    told = []
    for arm in ("mllib", "ps-sync"):
        by_size = {line.size: line.figures for line in mine if line.arm == arm}
        if "all" not in by_size or str(SMALL_BATCH) not in by_size:
            return ""
        faster = by_size["all"]["compute_s"].median / by_size[str(SMALL_BATCH)]["compute_s"].median
        first = min(by_size, key=lambda size: by_size[size]["seconds"].median)
        told.append(f"{arm} {faster:.1f} times, and converges first with {first}")
    server, spark = published.COMPUTE_SPEEDUP
    return (
        f"A mini-batch of {SMALL_BATCH} against all rows, {model}: {'; '.join(told)} (the thesis: up to {server:g} times for"
        f" the server, {spark:g} for MLlib, which converges first with 2000)."
    )


def _reading(found: Sequence[Line], model: Model) -> str:
    speeds = read_throughput(found, model)
    if not {"mllib", "ps-sync"} <= speeds.keys():
        return ""
    names = {"mllib": "MLlib", "ps-sync": "the trainer", "all-reduce": "Spark tasks with numpy"}
    told = ", ".join(f"{name} {speeds[arm]:,.0f}" for arm, name in names.items() if arm in speeds)
    return f"Rows read into memory a second, {model}: {told}."


def _winning(found: Sequence[Line]) -> str:
    """Cells in which no parameter server is as fast as MLlib."""
    best: dict[tuple[Any, ...], float] = {}
    for line in found:
        ratio = line.ratio if line.length is None else line.ratio_each
        if line.arm.startswith("ps-") and ratio is not None:
            best[_cell(line)] = max(ratio, best.get(_cell(line), 0.0))
    lost = [
        f"{model}, {batch:,} of {rows:,} rows ({ratio:.2f})"
        for (model, rows, batch, *_), ratio in best.items()
        if ratio < 1
    ]
    if not best:
        return ""
    return f"Computing: MLlib is faster than both servers in {len(lost)} of {len(best)} cells" + (
        f": {'; '.join(lost)}." if lost else f"; the least gap is {min(best.values()):.1f} times."
    )


def _closing(found: Sequence[Line]) -> str:
    gaps = {
        arm: [line.ratio_each for line in found if line.arm == arm and line.ratio_each]
        for arm in ("all-reduce", "ps-sync")
    }
    if not all(gaps.values()):
        return ""
    tasks, server = (median(each) for each in gaps.values())
    return (
        f"Without a job a mini-batch and a pass over all rows, Spark's own tasks are {tasks:.0f} times as fast as MLlib"
        f" (all-reduce, median of all cells; the synchronous server {server:.0f} times)."
    )
