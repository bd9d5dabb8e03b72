"""Sums over the accepted gradients of the current epoch, for its mean loss and accuracy."""

from __future__ import annotations

from typing import Any

from trainer.coordination.orders import StepMeasurements


class EpochSums:
    """Sums over the examples of accepted gradients since the last end of an epoch. O(1) per gradient.

    sums: the sums in plain JSON, empty at an epoch's beginning. Every checkpoint has them, so that after a roll-back or
    a resume the means of an epoch still count every gradient once."""

    def __init__(self, sums: dict[str, Any]) -> None:
        self.sums = sums

    def add(self, measured: StepMeasurements) -> None:
        """Count a gradient that goes into an update."""
        sums = self.sums
        sums["examples"] = sums.get("examples", 0) + measured.examples
        sums["loss"] = sums.get("loss", 0.0) + measured.loss * measured.examples
        sums["correct"] = sums.get("correct", 0) + measured.correct

    def end(self) -> dict[str, float | None]:
        """Return the epoch's mean loss and accuracy, None where it had no examples, and begin the next epoch."""
        examples = self.sums.get("examples", 0)
        means = {
            "loss": self.sums["loss"] / examples if examples else None,
            "accuracy": self.sums["correct"] / examples if examples else None,
        }
        self.sums.clear()
        return means
