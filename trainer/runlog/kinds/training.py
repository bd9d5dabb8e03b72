"""Events of the training: rows, steps, epochs and passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.runlog.kinds.base import LogEvent


@dataclass(frozen=True, kw_only=True)
class LoadedEvent(LogEvent):
    """A worker has read its rows.

    Attributes:
        worker: its number.
        rows, bytes: number of the rows, and the size of their images.
        load_s: seconds.
        mapped: whether the images are in memory-mapped files instead of its memory.
    """

    kind: str = field(default="loaded", init=False)
    worker: int = 0
    rows: int | None = None
    bytes: int = 0
    load_s: float = 0.0
    mapped: bool = False


@dataclass(frozen=True, kw_only=True)
class AppendedEvent(LogEvent):
    """A worker has adopted rows that were appended to a growing set.

    Attributes:
        worker: its number.
        turn, position: number of the first pass that includes them, and the first example of that pass.
        rows: rows of the worker from now on.
        set_generation: generation of the shard set.
        load_s: seconds.
    """

    kind: str = field(default="appended", init=False)
    worker: int = 0
    turn: int = 0
    position: int = 0
    rows: int | None = None
    set_generation: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainEvent(LogEvent):
    """A summary of about one second: means over the gradients that were accepted since the last one.

    Attributes:
        loss, accuracy: per example; None if none was accepted, and without an accuracy.
        seconds: training time so far.
        version: updates so far.
        accepted: accepted gradients so far.
        epoch: global epochs so far.
        learning_rate: the single-process rate.
        images_per_s: examples of accepted gradients per second.
        staleness_mean, staleness_max: in versions; None if none was accepted.
        workers: an object for each worker that has pushed: index, clock, images, and step_s (mean seconds per step).
    """

    kind: str = field(default="train", init=False)
    version: int = field()
    loss: float | None
    accuracy: float | None
    seconds: float
    accepted: int = 0
    epoch: float
    learning_rate: float | None
    images_per_s: float | None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    workers: list[Any]


@dataclass(frozen=True, kw_only=True)
class EpochEvent(LogEvent):
    """The end of a global epoch. seconds: training time; loss, accuracy: means over the accepted examples."""

    kind: str = field(default="epoch", init=False)
    epoch: float | None = None
    seconds: float | None = None
    loss: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassEvent(LogEvent):
    """All workers have ended passes over their rows.

    Attributes:
        first, last: numbers of the passes, from 1.
        seconds: training time.
        fingerprint: of the rows that were trained in these passes, hexadecimal.
        expected: the same by the shard set; None if that is unknown.
    """

    kind: str = field(default="pass", init=False)
    first: int
    last: int
    seconds: float | None = None
    fingerprint: str
    expected: str | None
