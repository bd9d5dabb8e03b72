"""Server 0's part in the evaluation of checkpoints: wakes the evaluator, and logs checkpoints that it will not get."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.checkpoints.prune import WAITING
from trainer.home.folders import Folders
from trainer.run_files import NEWS
from trainer.runlog.events import append, log_event

GIVEN_UP = f"more than {WAITING} checkpoints wait for the evaluator: the oldest are deleted and not evaluated"


class EvaluatorNews:
    """Tells of complete and of deleted checkpoints. folders: of the run."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self._has_warned = False

    def wake(self) -> None:
        """Notify the evaluator on this host of a checkpoint, so that it need not poll a remote store."""
        if not self.folders.is_local:
            append(self.folders.work / NEWS, "\n")

    def log_given_up(self, versions: Iterable[int]) -> None:
        """Log that checkpoints were deleted before they were evaluated, and warn once."""
        for version in versions:
            if not self._has_warned:
                self._has_warned = True
                log_event(self.folders.work, "warning", message=GIVEN_UP)
            log_event(self.folders.work, "given_up", version=version)
