"""The checkpoints of an exchange among neighbours that are written in the background."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial

from trainer.checkpoints.prune import try_to_prune
from trainer.home.folders import Folders
from trainer.home.segments import SupersededError
from trainer.leader.background import CallQueue
from trainer.leader.durable_log import secure_log
from trainer.leader.evaluator_news import EvaluatorNews
from trainer.leader.peer_checkpoints import PeerCheckpoints, ReplicasAtVersion
from trainer.leader.status import describe_not_finite
from trainer.runlog.example_ledger import ExampleLedger

MOST_WRITES = 2  # checkpoints that are written at a time
RETRY_FINAL_S = 5.0


class ReplicaWriter:
    """Writes checkpoints one after the other, and the final one until it is written.

    Args:
        folders: of the run.
        work: writes checkpoints in the background.
        by_rule: see ``prune``.

    Attributes:
        generation: of the checkpoints that still count.
        ledger: of the examples that the generation has trained, which is written with each checkpoint.
        trouble: why the last checkpoint failed, as text; None if it did not.
        not_finite: why the run has diverged, if a model is not finite.
        is_final_whole: whether the final checkpoint is written.
    """

    def __init__(self, folders: Folders, work: CallQueue, *, by_rule: bool = False) -> None:
        self.folders = folders
        self.by_rule = by_rule
        self.work = work
        self.root = folders.checkpoints
        self.generation = 0
        self.ledger: ExampleLedger | None = None
        self.trouble: str | None = None
        self.not_finite: str | None = None
        self.is_final_whole = False
        self._writing: set[int] = set()  # versions of the checkpoints that are being written
        self._final: tuple[PeerCheckpoints, ReplicasAtVersion] | None = None  # the final checkpoint, if it failed
        self._retry_at = math.inf
        self._now = 0.0
        self._news = EvaluatorNews(folders)

    @property
    def is_full(self) -> bool:
        """Whether no other checkpoint may be written now."""
        return len(self._writing) >= MOST_WRITES

    def begin(self, *, is_final_whole: bool, ledger: ExampleLedger | None) -> None:
        """Forget all unwritten checkpoints, because a generation begins. ledger: of this generation."""
        self.ledger = ledger
        self.is_final_whole = is_final_whole
        self._writing = set()
        self._final = None
        self._retry_at = math.inf

    def submit(self, checkpoints: PeerCheckpoints, replicas: ReplicasAtVersion) -> None:
        """Write a checkpoint, of which ``checkpoints`` knows the generation, in the background."""
        self._writing.add(replicas.state.version)
        self.work.submit(
            partial(self._write, checkpoints, replicas, self.ledger), partial(self._note, checkpoints, replicas)
        )

    def tick(self, now: float) -> None:
        """Try the final checkpoint again, if it has failed and it is time."""
        self._now = now
        if self._final and now >= self._retry_at:
            final, self._final = self._final, None  # before, because the call may fail at once
            self.submit(*final)

    def _write(
        self, checkpoints: PeerCheckpoints, replicas: ReplicasAtVersion, ledger: ExampleLedger | None
    ) -> str | list[int] | None:
        """Write a checkpoint, and delete old ones. Runs in the background.

        Returns the versions that were deleted before their evaluation, text if it failed, and None if a model is not
        finite.

        Args:
            checkpoints, replicas: the checkpoint.
            ledger: of its generation.
        """
        # A roll-back has made this checkpoint void while it waited in the queue.
        if checkpoints.generation != self.generation:
            return []
        try:
            was_written = checkpoints.write(replicas, partial(secure_log, self.folders, ledger, replicas.state.version))
            if was_written is None:
                return None
            if was_written:
                self._news.wake()
        except (OSError, SupersededError) as error:
            return f"the checkpoint of version {replicas.state.version} was not written: {error}"
        return try_to_prune(self.root, by_rule=self.by_rule) if was_written else []

    def _note(self, checkpoints: PeerCheckpoints, replicas: ReplicasAtVersion, outcome: str | list[int] | None) -> None:
        """Note the result of ``_write``, in the owner's thread."""
        if checkpoints.generation != self.generation:
            return
        version = replicas.state.version
        self._writing.discard(version)
        # The run cannot end without its final checkpoint; without another one it only rolls back further.
        if outcome is None:
            self.not_finite = describe_not_finite(version)
        elif isinstance(outcome, str):
            self.trouble = outcome
            if replicas.state.final:
                self._final = (checkpoints, replicas)
                self._retry_at = self._now + RETRY_FINAL_S
            else:
                with suppress(OSError):  # the disk may be read-only now; a later prune deletes the models
                    checkpoints.discard(replicas)
        else:
            self.trouble = None
            self.is_final_whole |= replicas.state.final
            self._news.log_given_up(outcome)
