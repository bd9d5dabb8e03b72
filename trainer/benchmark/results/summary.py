"""Medians, ranges and speedups of records, and the goals. Pure.

A record is a mapping as in results.json. A speedup is MLlib's median over a system's: above 1 the system is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

from trainer.benchmark.configurations import SYSTEMS, Model, System
from trainer.benchmark.results import published

SMALL_BATCH = 500
CONFIGURATION = ("model", "rows", "batch", "length", "tasks")  # keys that a configuration's records share
METRICS = (
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
Record = Mapping[str, Any]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Spread:
    """The median and the range of a metric over the repeats."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True)
class SystemSummary:
    """A system's results on a configuration, over all repeats.

    A speedup is None if MLlib or the system has no measurements.

    Attributes:
        model, rows, batch, tasks: of the configuration.
        length: requested mini-batches; None until convergence.
        system: that ran it.
        metrics: by METRICS, loss and gap; empty if every run failed.
        converged: in every measured repeat.
        errors: distinct messages of failed runs.
        speedup: of the seconds.
        mini_batch_speedup: of the seconds per mini-batch.
        speedup_with_start: of the seconds including the start.
    """

    model: Model
    rows: int
    batch: int
    length: int | None
    tasks: int | None
    system: System
    metrics: Mapping[str, Spread]
    converged: bool
    errors: tuple[str, ...]
    speedup: float | None = None
    mini_batch_speedup: float | None = None
    speedup_with_start: float | None = None

    @property
    def configuration(self) -> Key:
        return tuple(getattr(self, name) for name in CONFIGURATION)

    @property
    def size(self) -> str:
        """Return the mini-batch's size as text."""
        return "all" if self.batch >= self.rows else str(self.batch)

    @property
    def label(self) -> str:
        """Return the system, with an unusual number of tasks or workers."""
        units = "tasks" if self.system == "mllib" else "workers, by socket"
        return f"{self.system}, {self.tasks} {units}" if self.tasks else self.system


def summarise(records: Sequence[Record]) -> list[SystemSummary]:
    """Return one summary per configuration and system, in the order of the records."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault((*(record[name] for name in CONFIGURATION), record["system"]), []).append(record)
    summaries = [_summarise_group(key, group) for key, group in groups.items()]
    mllib = {summary.configuration: summary for summary in summaries if summary.system == "mllib"}
    return [_compare(summary, mllib.get(summary.configuration)) for summary in summaries]


def _summarise_group(key: Key, group: Sequence[Record]) -> SystemSummary:
    """Return the summary of one configuration on one system, without speedups.

    Failed runs contribute their errors only. key: the values of CONFIGURATION, then the system. group: its records."""
    measured = [record["measurement"] for record in group if record["measurement"]]
    values = {name: [each[name] for each in measured if each[name] is not None] for name in METRICS}
    values |= {name: [record[name] for record in group if record[name] is not None] for name in ("loss", "gap")}
    metrics = {name: Spread(median(each), min(each), max(each)) for name, each in values.items() if each}
    errors = tuple(dict.fromkeys(record["error"] for record in group if record["error"]))
    converged = bool(measured) and all(each["converged"] for each in measured)
    model, rows, batch, length, tasks, system = key
    return SystemSummary(model, rows, batch, length, tasks, system, metrics, converged, errors)


def _compare(summary: SystemSummary, mllib: SystemSummary | None) -> SystemSummary:
    """Add the speedups over MLlib to a summary; it is unchanged if either has no measurements."""
    if not mllib or not mllib.metrics or not summary.metrics:
        return summary
    before = {name: spread.median for name, spread in mllib.metrics.items()}
    own = {name: spread.median for name, spread in summary.metrics.items()}
    return replace(
        summary,
        speedup=before["seconds"] / own["seconds"],
        mini_batch_speedup=before["compute_s"] / own["compute_s"],
        speedup_with_start=(before["seconds"] + before["start_s"]) / (own["seconds"] + own["start_s"]),
    )


@dataclass(frozen=True)
class Goal:
    """A speedup to reach, and the measured one, None if it was not measured."""

    text: str
    target: float
    speedup: float | None

    @property
    def is_met(self) -> bool | None:
        return None if self.speedup is None else self.speedup >= self.target


def judge_goals(summaries: Sequence[SystemSummary]) -> list[Goal]:
    """Return the thesis's two claims as goals, each with the measured speedup.

    A speedup is MLlib's seconds to converge divided by the faster parameter server's, if both converged."""
    best = best_server_speedups(summaries, "speedup")
    # The thesis reports its largest speedup at this mini-batch. The goal is stricter: every model must reach it.
    small = [speedup for (_, _, batch, *_), speedup in best.items() if batch == SMALL_BATCH]
    average = fmean(best.values()) if best else None
    return [
        Goal(
            f"Smallest speedup of the better server at mini-batches of {SMALL_BATCH}",
            published.LARGEST_GAP,
            min(small, default=None),
        ),
        Goal(
            "Average speedup of the better server over all mini-batch configurations",
            published.AVERAGE_GAP,
            average,
        ),
    ]


def best_server_speedups(
    summaries: Sequence[SystemSummary], speedup: Literal["speedup", "speedup_with_start"]
) -> dict[Key, float]:
    """Return the larger speedup of the two parameter servers, by configuration.

    Only configurations with mini-batches are contained, and only if MLlib and a server converged.

    speedup: the field of SystemSummary to return."""
    comparable = {each.configuration for each in summaries if each.system == "mllib" and each.converged}
    best: dict[Key, float] = {}
    for each in summaries:
        is_server = each.system.startswith("ps-")
        if is_server and each.length is None and each.converged and each.size != "all":
            key = each.configuration
            if key in comparable:
                best[key] = max(best.get(key, 0.0), getattr(each, speedup))
    return best


def read_throughput(summaries: Sequence[SystemSummary], model: Model) -> dict[System, float]:
    """Return the examples per second that each system reads into memory with all cores.

    Measured on the largest set that all systems read; empty if there is none."""
    of_model = [each for each in summaries if each.model == model and each.metrics]
    systems = {each.system for each in of_model}
    sizes = {each.rows for each in of_model}
    common = [rows for rows in sizes if {each.system for each in of_model if each.rows == rows} == systems]
    if not common:
        return {}
    # Throughput depends on the number of rows, so all systems are compared on one set.
    rows = max(common)
    load_s = {
        system: median(
            each.metrics["load_s"].median for each in of_model if each.rows == rows and each.system == system
        )
        for system in SYSTEMS
        if system in systems
    }
    return {system: rows / max(1e-9, seconds) for system, seconds in load_s.items()}
