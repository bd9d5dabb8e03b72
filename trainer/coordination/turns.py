"""The turns of workers: when each of them starts its next step, or ends."""

from __future__ import annotations

from trainer.coordination.barriers import Barriers, BarrierWatch
from trainer.coordination.budget import Budget
from trainer.coordination.membership import Member, Membership, WorkerPhase
from trainer.coordination.orders import Reply
from trainer.coordination.queues import Queues
from trainer.coordination.run_view import RunView
from trainer.protocols.base import Protocol, Release


class Turns:
    """Workers that wait for their next step, and the conditions under which it begins.

    Args:
        protocol: gives the condition of each step.
        budget, membership, view: the state of the run.
        barriers, start_wait_s: as of Coordinator.

    Attributes:
        next_barrier: decides when the next barrier opens.
        started_at: when the first step began, on the caller's clock; None before.
        are_over: whether no step begins any more, because the run has ended.
    """

    def __init__(
        self,
        protocol: Protocol,
        budget: Budget,
        membership: Membership,
        view: RunView,
        barriers: Barriers,
        start_wait_s: float,
    ) -> None:
        self.protocol = protocol
        self.budget = budget
        self.membership = membership
        self.view = view
        self.start_wait_s = start_wait_s
        self.next_barrier = BarrierWatch(barriers, [member.clock for member in membership.members])
        self.started_at: float | None = None
        self.are_over = False
        self._first_join: float | None = None  # when the first worker joined
        self._queues = Queues()

    @property
    def has_ready(self) -> bool:
        """Return whether the condition of some worker is met."""
        return bool(self._queues.ready)

    def note_join(self, member: Member, now: float) -> None:
        """Have a worker that joins wait for its first step, or for the start of the run."""
        self._first_join = now if self._first_join is None else self._first_join
        if self.started_at is not None or self.are_over:
            self.await_turn(member)
        else:  # no worker starts before all are here
            self.membership.move(member, WorkerPhase.READY)

    def await_turn(self, member: Member) -> None:
        """Make a worker wait for the condition of its next step, or of its end if it has no steps left."""
        self.membership.move(member, WorkerPhase.READY)
        if self._is_done(member):  # it ends after the last of its gradients is applied
            version = self.view.version + 1 if member.unapplied and not self.are_over else 0
            self._queue(member, Release(version=version))
        elif member.clock == self.next_barrier.clock:
            # A barrier opens by an update. So once all workers wait, the next update has the gradients that are there.
            self.membership.wait_for_version(member, True)
            self._queues.add_at_barrier(member)
        else:
            self._queue(member, self.protocol.release(member.index, self.view))

    def _queue(self, member: Member, release: Release) -> None:
        """Put a worker into the queue for the first unmet condition of its release, or among those that are ready."""
        if release.version > self.view.version and not self.are_over:
            self.membership.wait_for_version(member, True)
            self._queues.add_for_version(member, release)
        elif release.slowest > self.membership.clocks.least() and not self._is_done(member):
            self._queues.add_for_clock(member, release.slowest)
        else:
            self._queues.ready.append((member.index, member.ticket))

    def note_update(self, *, opens_barrier: bool) -> None:
        """Queue the workers again that waited for the version of the update that was just made, or at the barrier.

        They are not ready yet, because they may also have to wait for the slowest worker."""
        for worker, ticket, release in self._queues.take_for_version(self.view.version):
            member = self.membership.members[worker]
            if member.ticket == ticket:  # otherwise the worker was lost meanwhile
                self.membership.wait_for_version(member, False)
                self._queue(member, release)
        if not opens_barrier:
            return
        for worker, ticket in self._queues.take_at_barrier():
            if self.membership.members[worker].ticket == ticket:
                self.await_turn(self.membership.members[worker])

    def start(self, now: float) -> bool:
        """Start the run once all workers are here, or ``start_wait_s`` after the first came. Returns whether it has."""
        if self.started_at is not None:
            return True
        waited = now - self._first_join if self._first_join is not None else 0.0
        if not self.membership.in_phase[WorkerPhase.READY] or not (
            self.membership.all_are_here() or waited >= self.start_wait_s
        ):
            return False
        self.started_at = now
        for member in self.membership.members:
            if member.phase is WorkerPhase.READY:
                self.await_turn(member)
        return True

    def take_ready(self) -> tuple[tuple[Reply, ...], tuple[Reply, ...]]:
        """Return the workers that start a step now, and the workers that have done their last step."""
        self._queues.release_up_to(self.membership.clocks)
        # In the order of workers, so that the answers do not depend on the order in which the workers became ready.
        ready = sorted(self._queues.ready)
        self._queues.ready = []
        unblocked = []
        stop = []
        for worker, ticket in ready:
            member = self.membership.members[worker]
            # The worker was lost or has joined again since it was queued.
            if member.ticket != ticket:
                continue
            if self._is_done(member):
                self.membership.move(member, WorkerPhase.FINISHED)
                stop.append(member.reply())
            else:
                self.membership.move(member, WorkerPhase.COMPUTING)
                member.held_by = set()
                member.measured = None
                member.pulled = self.view.version
                unblocked.append(member.reply())
        return tuple(unblocked), tuple(stop)

    def end(self) -> None:
        """End the run: make every waiting worker ready, so that the next order tells it to end."""
        self.are_over = True
        self._queues.clear()
        for member in self.membership.members:
            if member.phase is WorkerPhase.READY:
                self.membership.wait_for_version(member, False)
                self._queues.ready.append((member.index, member.ticket))

    def _is_done(self, member: Member) -> bool:
        return self.are_over or self.budget.is_through(member.clock)
