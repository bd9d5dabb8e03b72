"""Files of a run that cannot be written: how a supervisor reports this, and how long a trained run waits for space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from pipeline.core.errors import JobError
from trainer.home.folders import Folders
from trainer.lifecycle.interruption import newest_in_words

SPACE_WAIT_S = 30 * 60.0  # how long a trained run waits for space for its last checkpoint and its model
FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


class DiskWatch:
    """Watches the disk trouble of a run: the reason, as text, why files cannot be written; None if all can.

    Args:
        folders: of the run.
        say: prints a message.
    """

    def __init__(self, folders: Folders, say: Callable[[str], None]) -> None:
        self.folders = folders
        self.say = say
        self._reported: str | None = None  # the trouble at the last look
        self._stuck_since: float | None = None  # since when the trained run cannot be written

    @property
    def is_stuck(self) -> bool:
        """Return whether a trained run waits for space."""
        return self._stuck_since is not None

    def note_training(self, trouble: str | None) -> None:
        """Report trouble of a run in training when it begins or its text changes.

        A full disk may have no room for a log entry."""
        if trouble and trouble != self._reported:
            self.say(f"{trouble}; training continues and tries again")
        self._reported = trouble

    def note_trained(self, trouble: str | None, now: float) -> None:
        """Report once that the last files of a trained run cannot be written. Raises JobError after SPACE_WAIT_S of this.

        trouble: at present; now: the caller's clock in seconds."""
        minutes = SPACE_WAIT_S / 60
        if not trouble:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
            missing = "space on " if any(reason in trouble for reason in FULL) else ""
            text = f"finished, waiting for {missing}{self.folders.home}: {trouble}"
            self.say(f"{text}; the run ends after {minutes:g} minutes of this")
        elif now - self._stuck_since > SPACE_WAIT_S:
            raise JobError(f"{minutes:g} minutes after its end {self.describe(trouble)}")

    def stop_waiting(self) -> None:
        """Note that the run is in training, perhaps again after a roll-back, and so waits no more for space."""
        self._stuck_since = None

    def describe(self, trouble: str) -> str:
        """Return a message for a trained run that could not be written: the cause, the last checkpoint, a remedy."""
        home = self.folders.home
        version = newest_in_words(self.folders.checkpoints)
        return f"{trouble}; kept is the run{version}: make room on {home}, and the same command with --resume continues"
