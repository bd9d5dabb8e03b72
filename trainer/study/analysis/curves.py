"""Evaluations over a run: curves of the accuracy, and the time to a target. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Floats
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


def curves_of(records: Sequence[Record]) -> Curves | None:
    """Return the curves of runs that were evaluated at the same epochs.

    None if their epochs differ, if no run was evaluated, and for real targets, which have no accuracy."""
    curves = [record["curve"] for record in records if record["curve"] and record["curve"]["epoch"]]
    if not curves or any(curve["epoch"] != curves[0]["epoch"] or None in curve["accuracy"] for curve in curves):
        return None
    return Curves(tuple(curves[0]["epoch"]), np.array([curve["accuracy"] for curve in curves], float))


def times_to(target: float, records: Sequence[Record]) -> list[float]:
    """Return the training time, in seconds, of the first evaluation of each run with at least the target's accuracy.

    Runs that never reach it are left out, and so are runs of ledgers that have no times."""
    result = []
    for record in records:
        curve = record["curve"] or {}
        points = zip(curve.get("accuracy", ()), curve.get("seconds", ()), strict=False)
        reached = [seconds for accuracy, seconds in points if accuracy is not None and accuracy >= target]
        result += reached[:1]
    return result
