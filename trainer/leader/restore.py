"""The checkpoint with which a leader begins a generation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from pipeline.core.errors import DataError
from trainer.checkpoints.decisions import StopDecision, stop_of
from trainer.checkpoints.prune import roll_back
from trainer.config import Config
from trainer.home.folders import Folders
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import ExampleLedger, begin_ledger

logger = logging.getLogger(__name__)


class RestoredVersion(NamedTuple):
    """The beginning of a generation.

    Attributes:
        version: of the checkpoint.
        generation: number of the generation.
        stop: the decision to end the run early with this checkpoint; None if there is none.
        ledger: of the examples of the generation; None without --example-ledger.
    """

    version: int
    generation: int
    stop: StopDecision | None
    ledger: ExampleLedger | None


def restore(
    config: Config, folders: Folders, at_least: int, *, by_rule: bool = False, fingerprint: int | None = None
) -> RestoredVersion:
    """Roll back to the newest sound checkpoint, and begin a generation with it.

    Args:
        config, folders: the run.
        at_least: lower bound for the number of the generation.
        by_rule: whether a rule decides about the switch.
        fingerprint: of the rows that the run trains on, None if unknown.
    Raises:
        DataError: there is no sound checkpoint.
        OSError: files cannot be read or written now.
    """
    root = folders.checkpoints
    stop = stop_of(root, config)
    restored = roll_back(root, at_least, by_rule=by_rule, stop=stop)
    if not restored:
        raise DataError(
            f"{root} holds no whole checkpoint, not even the first; choose another --output, or --overwrite"
        )
    version, generation = restored
    # If the checkpoint of the decision is damaged, the run continues from another one.
    if stop and stop.version != version:
        stop = None
    ledger = begin_ledger(config, folders.home, generation, version, fingerprint)
    return RestoredVersion(version, generation, stop, ledger)


class Restorer:
    """The roll-backs of a leader: each of its generations begins with the newest sound checkpoint.

    Args:
        config, folders: the run.
        microseconds: returns the time since 1970.
        by_rule: whether a rule decides about the switch.
        fingerprint: of the rows that the run trains on, None if unknown.

    Attributes:
        retry_cause: the cause of a roll-back to repeat after an error of the file system; None if there is none.
    """

    def __init__(
        self,
        config: Config,
        folders: Folders,
        microseconds: Callable[[], int],
        *,
        by_rule: bool = False,
        fingerprint: int | None = None,
    ) -> None:
        self.config = config
        self.folders = folders
        self.microseconds = microseconds
        self.by_rule = by_rule
        self.fingerprint = fingerprint
        self.retry_cause: str | None = None
        self._version_left: int | None = None  # until it is logged

    def leave(self, version: int) -> None:
        """Note the version at which a generation ends, which the next one logs as a roll-back."""
        self._version_left = version

    def begin_generation(self, generation: int, cause: str) -> RestoredVersion | None:
        """Roll back, and log that; None if files cannot be read or written now, and ``retry_cause`` is set.

        generation: number of the generation before; cause: for the log. Raises DataError if there is no sound checkpoint."""
        self.retry_cause = None
        try:
            # The clock is the lower bound, because a server 0 that died may have used a generation that is in no file.
            at_least = max(generation + 1, self.microseconds())
            restored = restore(self.config, self.folders, at_least, by_rule=self.by_rule, fingerprint=self.fingerprint)
        except OSError as error:
            logger.warning(f"{self.folders.checkpoints}: going back to a checkpoint is tried again: {error}")
            self.retry_cause = cause
            return None
        if self._version_left is not None:
            versions = {"from_version": self._version_left, "to_version": restored.version}
            log_event(self.folders.work, "rollback", **versions, cause=cause)
            self._version_left = None
        return restored
