"""Evaluations over a run: curves of the accuracy, the time to a target, and the accuracy at a time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Floats
from trainer.study.analysis.statistics import FEWEST_SEEDS, MeasureSummary, summarise
from trainer.study.run.ledger import Record


@dataclass(frozen=True)
class Curves:
    """Evaluation accuracy over epochs, of several runs.

    epochs: at which runs were evaluated. accuracy: [seeds, epochs]."""

    epochs: tuple[float, ...]
    accuracy: Floats

    @property
    def last_gain(self) -> float:
        """Return the gain of the mean accuracy from the last but one evaluation to the last; NaN for one evaluation."""
        return float((self.accuracy[:, -1] - self.accuracy[:, -2]).mean()) if len(self.epochs) > 1 else math.nan

    @property
    def spread(self) -> Floats:
        """Return the standard deviation over seeds at each epoch, [epochs]; 0 for a single seed."""
        return np.asarray(self.accuracy.std(axis=0, ddof=1)) if len(self.accuracy) > 1 else np.zeros(len(self.epochs))


@dataclass(frozen=True)
class TimedAccuracy:
    """The accuracy of a member's runs at a time of training.

    Attributes:
        seconds: of training.
        summary: over the runs that were evaluated by then; None without such a run.
        difference: of the runs minus the baseline's of equal seeds; None for fewer than three pairs.
    """

    seconds: float
    summary: MeasureSummary | None
    difference: MeasureSummary | None


def curves_of(records: Sequence[Record]) -> Curves | None:
    """Return the curves of runs that were evaluated at the same epochs.

    None if their epochs differ, if no run was evaluated, and for real targets, which have no accuracy."""
    curves = [record["curve"] for record in records if record["curve"] and record["curve"]["epoch"]]
    if not curves or any(curve["epoch"] != curves[0]["epoch"] or None in curve["accuracy"] for curve in curves):
        return None
    return Curves(tuple(curves[0]["epoch"]), np.array([curve["accuracy"] for curve in curves], float))


def times_to(key: str, target: float, records: Sequence[Record]) -> list[float]:
    """Return the training time, in seconds, of the first evaluation of each run that reaches the target.

    Runs that never reach it are left out, and so are runs of ledgers that have no times.

    Args:
        key: accuracy, which reaches the target from below, or train_loss, which reaches it from above.
        target: of the key.
        records: the runs.
    """
    sign = 1 if key == "accuracy" else -1
    result = []
    for record in records:
        reached = [seconds for value, seconds in _points(key, record) if sign * value >= sign * target]
        result += reached[:1]
    return result


def timed_accuracy(
    seconds: float, runs: Mapping[int, Record], baseline: Mapping[int, Record], *, independent: bool = True
) -> TimedAccuracy:
    """Return the accuracy of a member's last evaluations at or before a time, and its difference from the baseline's.

    Args:
        seconds: of training.
        runs: the member's, by seed.
        baseline: runs that these are compared with, by seed; empty for no comparison.
        independent: whether the runs are, as in ``summarise``.
    """
    own = accuracies_at(seconds, runs)
    others = accuracies_at(seconds, baseline)
    differences = [accuracy - others[seed] for seed, accuracy in own.items() if seed in others]
    return TimedAccuracy(
        seconds,
        summarise(list(own.values()), independent=independent) if own else None,
        summarise(differences) if len(differences) >= FEWEST_SEEDS else None,
    )


def accuracies_at(seconds: float, runs: Mapping[int, Record]) -> dict[int, float]:
    """Return the accuracy of the last evaluation of each run at or before a time of training, by seed.

    A run that ended before keeps its final accuracy. Runs without an evaluation by then are left out, and so are runs of
    ledgers that have no times."""
    earlier = {seed: [value for value, at in _points("accuracy", run) if at <= seconds] for seed, run in runs.items()}
    return {seed: values[-1] for seed, values in earlier.items() if values}


def _points(key: str, record: Record) -> Iterator[tuple[float, float]]:
    """Yield a run's values at its evaluations with their times; values that are unknown are left out."""
    curve = record["curve"] or {}
    points = zip(curve.get(key, ()), curve.get("seconds", ()), strict=False)
    return ((value, seconds) for value, seconds in points if value is not None)
