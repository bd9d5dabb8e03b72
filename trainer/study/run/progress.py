"""How far a study is, and when it will end: by what its runs took, and by how far those under way are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.run_files import METRICS
from trainer.runlog.thinned import thinned_log
from trainer.study.plan.study_plan import Run


class UnderWay(NamedTuple):
    """A run that trains. seconds: since it began; done: the part of its updates that it has made."""

    seconds: float
    done: float


def cost_class(run: Run) -> str:
    """Runs that take about as long as each other."""
    return f"{run.cell.dataset}/{run.cell.model}"


def done_of(folder: Path) -> float:
    """The part of its updates that the run in a folder has made; 0 where it has not begun."""
    asked, made = 0, 0
    for event in thinned_log(folder / METRICS):
        if event["event"] == "start":
            asked, made = event["plan"]["updates"], 0
        elif event["event"] == "train":
            made = event["version"]
    return min(1.0, made / asked) if asked else 0.0


def remaining_s(
    waiting: Sequence[Run], took: Mapping[str, Sequence[float]], jobs: int, under_way: Mapping[Run, UnderWay]
) -> float:
    """Seconds until the end: each run takes the mean of its like, and those that nobody knows the mean of all.

    took: seconds of runs that ended, by cost class; where none has, those under way tell."""
    means = {name: sum(some) / len(some) for name, some in took.items() if some}
    for run, now in under_way.items():
        if now.done:
            means.setdefault(cost_class(run), now.seconds / now.done)
    usual = sum(means.values()) / len(means) if means else 0.0
    left = {run: 1 - now.done for run, now in under_way.items()}
    return sum(means.get(cost_class(run), usual) * left.get(run, 1.0) for run in waiting) / jobs


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"about {hours} h {minutes:02} min"
    return f"about {minutes} min" if minutes else "less than a minute"


def under_way_line(under_way: Sequence[UnderWay], left_s: float) -> str:
    """What is said while no run ends. left_s: 0 where it is not known."""
    least, most = (f"{end(now.done for now in under_way):.0%}" for end in (min, max))
    done = least if least == most else f"{least} to {most}"
    runs = f"{len(under_way)} run{'s' if len(under_way) != 1 else ''} under way, {done} done"
    return f"{runs}; {duration(left_s)} left" if left_s else runs
