"""A run's figures for TensorBoard, where that optional package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.extras import require
from trainer.run_files import TENSORBOARD

Event = Mapping[str, Any]

# What an event shows, as {key of the event: name of the curve}; curves of one prefix share a card group.
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
    """The points of an event by the name of their curve; none for events that are not of figures."""
    curves = CURVES.get(event["event"], {})
    return {name: float(event[key]) for key, name in curves.items() if event.get(key) is not None}


def first_void_version(event: Event) -> int | None:
    """The version from which on earlier points no longer count, of an event that takes updates back."""
    if event["event"] == "rollback":
        return int(event["to_version"]) + 1
    if event["event"] == "start":
        return int(event.get("resumed_from") or 0) + 1
    return None


class TensorBoardWriter:
    """Writes the events of metrics.jsonl below OUTPUT/tensorboard, over the global version.

    Look at them with ``tensorboard --logdir OUTPUT/tensorboard``. Raises UsageError where the package is missing."""

    def __init__(self, output: Path) -> None:
        require("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = SummaryWriter
        self._folder = output / TENSORBOARD
        self._writer = self._open(self._folder)

    def add(self, event: Event) -> None:
        """Write an event's points; call it with every event in the order of the file."""
        void = first_void_version(event)
        if void is not None:
            # The only way to take points back is to tell TensorBoard of a restart at a step.
            self._writer.close()
            self._writer = self._open(self._folder, purge_step=void)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["version"], walltime=event.get("time"))

    def close(self) -> None:
        self._writer.close()
