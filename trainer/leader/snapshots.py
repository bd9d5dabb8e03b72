"""The checkpoints that are being written: all servers write slices, then server 0 the state that completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from trainer.checkpoints.prune import try_to_prune
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import WriteOutcome, write_state
from trainer.home.place import Place
from trainer.home.segments import SupersededError
from trainer.leader.background import CallQueue
from trainer.leader.status import describe_not_finite

LEADER = -1  # beside the numbers of servers in ``missing``
MOST = 2  # under way at a time: every server holds a copy of its slice for each
SLOW_S = 60.0


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        state: the state to write last.
        begun: start, in seconds on the caller's clock.
        missing: servers that have not written their slices yet, and LEADER until its state is settled.
        is_needed: whether the run cannot continue without it, as at its end and at the end of a stage.
    """

    state: RunState
    begun: float
    missing: set[int]
    is_needed: bool


class CheckpointCompletion(NamedTuple):
    """The result of completing a checkpoint.

    Attributes:
        trouble: why it was not completed, or None.
        given_up: versions of older checkpoints that were deleted before their evaluation.
    """

    trouble: str | None = None
    given_up: Sequence[int] = ()


class Snapshots:
    """The checkpoints of one generation that are being written, identified by the sequence numbers of their orders.

    A checkpoint is complete, and visible to other processes, once its state is written: after the slices of all
    servers, and after all log entries up to its version, in the two steps ``log`` and ``secure``.

    Args:
        root: folder of checkpoints.
        secure: secure(version) makes the log durable up to a version, by fsync or a copy to the home; called in the
            background.
        num_servers: servers that write a slice of every checkpoint.
        work: runs slow operations in the background.
        log: appends the pushes that are still in memory to the log files; called in the owner's thread.
        is_current: returns whether the run still has this generation; called in the background.
        notify: called in the background once a checkpoint is complete, to tell the evaluator.
        given_up: called in the owner's thread with the versions that were deleted before their evaluation.
        by_rule: see ``prune``.

    Attributes:
        under_way: checkpoints that are not complete yet, by sequence number.
        is_final_whole: whether the final checkpoint of the run is complete.
        newest: version of the newest checkpoint that is complete, -1 before the first.
        divergence: why the run has diverged: a server's parameters are not finite, so nothing is left to checkpoint.
    """

    def __init__(
        self,
        root: Place,
        secure: Callable[[int], object],
        num_servers: int,
        work: CallQueue,
        *,
        log: Callable[[], None],
        is_current: Callable[[], bool],
        notify: Callable[[], object],
        given_up: Callable[[Sequence[int]], None],
        by_rule: bool = False,
    ) -> None:
        self.root = root
        self.secure = secure
        self.num_servers = num_servers
        self.work = work
        self.log = log
        self.is_current = is_current
        self.notify = notify
        self.given_up = given_up
        self.by_rule = by_rule
        self.under_way: dict[int, PendingCheckpoint] = {}  # oldest first
        self.is_final_whole = False
        self.newest = -1
        self.divergence: str | None = None
        self._trouble: str | None = None  # why the last attempt at a checkpoint failed, None once one is complete

    @property
    def is_full(self) -> bool:
        """Whether a checkpoint must be completed before the next one may begin."""
        return len(self.under_way) >= MOST

    def begin(self, sequence: int, state: RunState, now: float, *, is_needed: bool = False) -> None:
        """Begin a checkpoint, before servers are told to write their slices.

        Args:
            sequence: number of the order that tells them.
            state: written last.
            now: seconds on the caller's clock.
            is_needed: see PendingCheckpoint.
        """
        missing = {*range(self.num_servers), LEADER}
        self.under_way[sequence] = PendingCheckpoint(state, now, missing, is_needed)

    def settle(self, sequence: int, converged_steps: int | None) -> None:
        """Let a checkpoint be completed, after its order was executed and the tolerance was tested.

        A run that resumes from it would not test the same update again.

        sequence: number of the order; converged_steps: see RunState."""
        # Servers may have failed to write it already.
        if pending := self.under_way.get(sequence):
            pending.state = replace(pending.state, converged_steps=converged_steps)
            self.wrote(LEADER, sequence, WriteOutcome.WRITTEN)

    def wrote(self, server: int, sequence: int, outcome: WriteOutcome) -> None:
        """Note the result of a server's slice. With nothing missing the checkpoint is completed in the background.

        A failure of any server ends the attempt at this checkpoint. sequence: number of the order to write the
        slice."""
        pending = self.under_way.get(sequence)
        # The checkpoint has already failed on another server.
        if not pending:
            return
        version = pending.state.version
        if outcome is WriteOutcome.WRITTEN:
            pending.missing.discard(server)
            if not pending.missing:
                # Before the state, so that the log of a run that resumes from this checkpoint has all earlier pushes.
                self.log()
                self.work.submit(partial(self._complete, pending.state), partial(self._completed, sequence))
            return
        del self.under_way[sequence]
        if outcome is WriteOutcome.NOT_FINITE:
            self.divergence = describe_not_finite(version, f"the parameters of server {server}")
        else:
            self._trouble = f"the checkpoint of version {version} was not written by server {server}, see its log"
            # The usual cause is a full disk. The run stands still without this checkpoint, which is tried again with more
            # room: without all other checkpoints but the last.
            if pending.is_needed:
                self.work.submit(partial(try_to_prune, self.root, keep=1, by_rule=self.by_rule), self.given_up)

    def trouble(self, now: float) -> str | None:
        """Return in words why the last checkpoint is late or failed, or None.

        now: seconds on the caller's clock."""
        slow = next((pending for pending in self.under_way.values() if now - pending.begun > SLOW_S), None)
        if slow:
            return f"the checkpoint of version {slow.state.version} is not written after {SLOW_S:g} s"
        return self._trouble

    def _complete(self, state: RunState) -> CheckpointCompletion:
        """Complete a checkpoint and delete older ones. Runs in the background, because disks can be slow."""
        # A roll-back has made this checkpoint void while it waited in the queue.
        if not self.is_current():
            return CheckpointCompletion()
        try:
            self.secure(state.version)
            write_state(folder_of(self.root, state.version), state)
            self.notify()
        except (OSError, SupersededError) as error:
            return CheckpointCompletion(f"the checkpoint of version {state.version} was not written: {error}")
        return CheckpointCompletion(given_up=try_to_prune(self.root, by_rule=self.by_rule))

    def _completed(self, sequence: int, completed: CheckpointCompletion) -> None:
        """Note, in the owner's thread, the result of ``_complete`` for the checkpoint of an order."""
        state = self.under_way.pop(sequence).state
        self._trouble = completed.trouble
        if not completed.trouble:
            self.newest = max(self.newest, state.version)
        if state.final and not completed.trouble:
            self.is_final_whole = True
        self.given_up(completed.given_up)
