"""Export of a run's curves to TensorBoard, an optional package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.extras import require
from trainer.run_files import TENSORBOARD
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.run import RollbackEvent, StartEvent

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


def scalars(event: LogEvent) -> dict[str, float]:
    """Return the points of an event by the name of their curve; empty for events without curves."""
    curves = CURVES.get(event.kind, {})
    values = {name: getattr(event, key) for key, name in curves.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def first_void_version(event: LogEvent) -> int | None:
    """Return the version from which on an event makes earlier points void, or None if it makes none void."""
    back_to = event.resumes_from() if isinstance(event, StartEvent | RollbackEvent) else None
    return None if back_to is None else back_to + 1


class TensorBoardWriter:
    """A writer of metrics.jsonl's events to OUTPUT/tensorboard, with the global version as the step.

    View them with ``tensorboard --logdir OUTPUT/tensorboard``. Raises UsageError if the package is missing."""

    def __init__(self, output: Path) -> None:
        require("tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._open: Any = SummaryWriter  # kept, because ``add`` opens a new writer after a roll-back
        self._folder = output / TENSORBOARD
        self._writer = self._open(self._folder)

    def add(self, event: LogEvent) -> None:
        """Write an event's points. Must be called with every event, in the order of the file."""
        void = first_void_version(event)
        if void is not None:
            # TensorBoard discards points only through a writer that is opened with a purge step.
            self._writer.close()
            self._writer = self._open(self._folder, purge_step=void)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.version, walltime=event.time)

    def close(self) -> None:
        self._writer.close()
