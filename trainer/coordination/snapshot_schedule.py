"""The decision with which orders a checkpoint is written. Pure."""

from __future__ import annotations


class SnapshotSchedule:
    """Decides after every order whether a checkpoint is due.

    Args:
        version: of the last checkpoint.
        at_epochs: whether one is due at the end of every epoch.

    Attributes:
        is_wanted: whether one was requested since the last decision.
    """

    def __init__(self, version: int, *, at_epochs: bool) -> None:
        self.at_epochs = at_epochs
        self.is_wanted = False
        self._version = version

    def take_due(self, version: int, *, ends_epoch: bool, is_last: bool) -> bool:
        """Return whether the order of a version writes a checkpoint, which answers all requests so far.

        A request is void if there was no update since the last checkpoint. But the last one of the run or of a stage is
        tried again until it is whole.

        ends_epoch: whether the order completes an epoch; is_last: whether the run or the stage ends here."""
        is_requested = self.is_wanted and (is_last or version != self._version)
        self.is_wanted = False
        if not (is_requested or (ends_epoch and self.at_epochs)):
            return False
        self._version = version
        return True
