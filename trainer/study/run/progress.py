"""The progress of a study, and an estimate of its end from finished runs and from the progress of running ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core import console
from trainer.run_files import METRICS
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.runlog.thinned import thinned_log
from trainer.study.plan.study_plan import Run

LOGGER = "sharding.study"


class StudyLog:
    """The lines of a study on standard error, with the time in UTC and the seconds since this object was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line in the format of --log-format."""
        elapsed = time.monotonic() - self._start
        line = f"{console.wall_clock()} [{elapsed:6.1f} s] {text}"
        console.say(LOGGER, text, text=line, fields={"elapsed_s": round(elapsed, 1)})


class RunProgress(NamedTuple):
    """The progress of a running run. seconds: since its start; fraction: of its updates that are made."""

    seconds: float
    fraction: float


def cost_class(run: Run) -> str:
    """Return the name of a class of runs that take about equally long."""
    return "/".join(filter(None, (run.cell.dataset, run.cell.model, run.cell.variant)))


def fraction_of_run(folder: Path) -> float:
    """Return the fraction of updates that the run in a folder has made; 0 before its start."""
    planned_updates = 0
    version = 0
    for event in thinned_log(folder / METRICS):
        if isinstance(event, StartEvent) and event.plan is not None:
            planned_updates = event.plan["updates"]
            version = 0
        elif isinstance(event, TrainEvent):
            version = event.version
    return min(1.0, version / planned_updates) if planned_updates else 0.0


def remaining_s(
    waiting: Sequence[Run], took: Mapping[str, Sequence[float]], jobs: int, under_way: Mapping[Run, RunProgress]
) -> float:
    """Return the estimated seconds until the end of the study.

    Every run takes the mean of its cost class, and runs of unknown classes take the mean of all classes.

    Args:
        waiting: runs that are not finished.
        took: seconds of finished runs, by cost class.
        jobs: runs at once.
        under_way: progress of running runs; they give the mean of cost classes without finished runs.
    """
    means = {name: sum(some) / len(some) for name, some in took.items() if some}
    for run, now in under_way.items():
        if now.fraction:
            means.setdefault(cost_class(run), now.seconds / now.fraction)
    usual = sum(means.values()) / len(means) if means else 0.0
    remaining_fractions = {run: 1 - now.fraction for run, now in under_way.items()}
    return sum(means.get(cost_class(run), usual) * remaining_fractions.get(run, 1.0) for run in waiting) / jobs


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"about {hours} h {minutes:02} min"
    return f"about {minutes} min" if minutes else "less than a minute"


def progress_line(under_way: Sequence[RunProgress], left_s: float) -> str:
    """Return the line that is printed while no run ends. left_s: 0 if it is unknown."""
    least, most = (f"{end(now.fraction for now in under_way):.0%}" for end in (min, max))
    percentages = least if least == most else f"{least} to {most}"
    runs = f"{len(under_way)} run{'s' if len(under_way) != 1 else ''} under way, {percentages} done"
    return f"{runs}; {duration(left_s)} left" if left_s else runs
