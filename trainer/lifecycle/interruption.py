"""The interruption of a run by a signal: how it is noticed, and the error with which the run ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from pipeline.core.errors import DataError, JobError
from trainer.checkpoints.read import newest_state
from trainer.home.place import Place

INTERRUPTED = "interrupted"  # begins the message of a run that has left a checkpoint


class RunInterruptedError(JobError):
    """An interruption of the run by Ctrl-C, by a scheduler's SIGTERM, or for a change of its workers.

    Attributes:
        changes: whether the run is to continue at once, with other workers.
    """

    def __init__(self, text: str = "", *, changes: bool = False) -> None:
        super().__init__(text)
        self.changes = changes


def newest_in_words(root: Place) -> str:
    """Return the position from which a resume continues, as part of a message; "" if there is no checkpoint."""
    # Another process may have deleted it meanwhile. A folder out of reach must not hide the message.
    with suppress(DataError, OSError):
        state = newest_state(root)
        if state:
            return f" at version {state.version} (epoch {state.epoch:.2f})"
    return ""


def describe_interruption(root: Place | None) -> str:
    """Return the message of an interrupted run. root: folder of checkpoints; None to name no version."""
    return f"{INTERRUPTED}{newest_in_words(root) if root else ''}; the same command with --resume continues"


class Interruptible(Protocol):
    """An object that polls its ``interrupted`` flag and then ends by itself."""

    interrupted: bool


@contextmanager
def interruptible(subject: Interruptible) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM: the first one sets the flag, so that a checkpoint is written; the second one raises
    KeyboardInterrupt. A no-op outside the main thread, which alone can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        if subject.interrupted:
            raise KeyboardInterrupt
        subject.interrupted = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # Restored, because the caller may be a notebook or a Spark driver that handles Ctrl-C itself.
        for number, handler in before.items():
            signal.signal(number, handler)
