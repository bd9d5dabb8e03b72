"""Export of a run's curves to TensorBoard, an optional package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.extras import require
from trainer.run_files import TENSORBOARD

Event = Mapping[str, Any]

# Curves of an event, as {key of the event: name of the curve}. Curves with the same prefix share a card group.
CURVES: Mapping[str, Mapping[str, str]] = {
    "train": {
        "loss": "train/loss",
        "accuracy": "train/accuracy",
        "learning_rate": "train/learning_rate",
        "images_per_s": "speed/images_per_s",
        "staleness_mean": "staleness/mean",
        "staleness_max": "staleness/max",
        "epoch": "speed/epoch",
    },
    "epoch": {"loss": "train/epoch_loss", "accuracy": "train/epoch_accuracy"},
    "eval": {
        "loss": "evaluation/loss",
        "accuracy": "evaluation/accuracy",
        "train_loss": "evaluation/train_loss",
        "train_accuracy": "evaluation/train_accuracy",
    },
}


def scalars(event: Event) -> dict[str, float]:
    """Return the points of an event by the name of their curve; empty for events without curves."""
    curves = CURVES.get(event["event"], {})
    return {name: float(event[key]) for key, name in curves.items() if event.get(key) is not None}


def first_void_version(event: Event) -> int | None:
    """Return the version from which on an event makes earlier points void, or None if it makes none void."""
    if event["event"] == "rollback":
        return int(event["to_version"]) + 1
    if event["event"] == "start":
        return int(event.get("resumed_from") or 0) + 1
    return None


class TensorBoardWriter:
    """A writer of metrics.jsonl's events to OUTPUT/tensorboard, with the global version as the step.

    View them with ``tensorboard --logdir OUTPUT/tensorboard``. Raises UsageError if the package is missing."""

    def __init__(self, output: Path) -> None:
        require("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = SummaryWriter
        self._folder = output / TENSORBOARD
        self._writer = self._open(self._folder)

    def add(self, event: Event) -> None:
        """Write an event's points. Must be called with every event, in the order of the file."""
        void = first_void_version(event)
        if void is not None:
            # TensorBoard discards points only through a writer that is opened with a purge step.
            self._writer.close()
            self._writer = self._open(self._folder, purge_step=void)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["version"], walltime=event.get("time"))

    def close(self) -> None:
        self._writer.close()
