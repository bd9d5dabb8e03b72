"""The workers of a run: their sessions, phases and heartbeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from trainer.coordination.clocks import Clocks
from trainer.coordination.orders import Reply, StepMeasurements


class WorkerPhase(IntEnum):
    """The phase of a worker; from COMPUTING on it is a member."""

    ABSENT = 0  # not joined yet, or lost
    JOINING = 1  # some servers hold its join request
    FINISHED = 2  # has done all its steps
    COMPUTING = 3  # has parameters and computes a gradient
    PUSHED = 4  # its gradient waits to be summed
    READY = 5  # waits for permission to start its next step


@dataclass(slots=True)
class Member:
    """The coordinator's state of one worker.

    Attributes:
        index: number of the worker.
        clock: number of its steps whose gradients were used or refused.
        phase: see WorkerPhase.
        session: number of its session, which grows with every join of the worker.
        pulled: version of the parameters that it computes with.
        unapplied: its steps whose gradients are in the sum of the next update.
        held_by: servers that hold its join request or gradient.
        measured: measurements of its gradient.
        ticket: grows with every change of phase, which makes older entries of queues void.
        waits_for_version: whether its next step needs another update.
        is_through: whether it has done its own steps.
    """

    index: int
    clock: int = 0
    phase: WorkerPhase = WorkerPhase.ABSENT
    session: int = 0
    pulled: int = 0
    unapplied: int = 0
    held_by: set[int] = field(default_factory=set)
    measured: StepMeasurements | None = None
    ticket: int = 0
    waits_for_version: bool = False
    is_through: bool = False

    def computes(self, session: int, clock: int) -> bool:
        """Return whether the worker of a session computes a step now."""
        return session == self.session and self.phase is WorkerPhase.COMPUTING and clock == self.clock

    def reply(self) -> Reply:
        return Reply(self.index, self.session, self.clock)


class Membership:
    """All workers of a run, the number in each phase, and the clocks of members."""

    def __init__(self, clocks: dict[int, int], num_workers: int) -> None:
        self.members = [Member(worker, clocks.get(worker, 0)) for worker in range(num_workers)]
        self.clocks = Clocks()
        self.in_phase = [num_workers, 0, 0, 0, 0, 0]  # number of workers by phase
        self.waiting_for_version = 0  # number of workers whose next step needs another update
        self._heard: dict[int, float] = {}  # time of the last heartbeat by worker, oldest first

    def move(self, member: Member, phase: WorkerPhase) -> None:
        """Change the phase of a worker, which makes its entries in queues void."""
        before = member.phase
        self.in_phase[before] -= 1
        self.in_phase[phase] += 1
        member.phase = phase
        member.ticket += 1
        if member.waits_for_version:
            self.wait_for_version(member, False)
        # A worker that is no member has no clock, or all others would wait for it under a staleness bound.
        if phase < WorkerPhase.COMPUTING:
            self.clocks.remove(member.index)
            # A finished worker is silent without being lost; a joining worker that falls silent is lost.
            if phase is not WorkerPhase.JOINING:
                self._heard.pop(member.index, None)
        elif before < WorkerPhase.COMPUTING:
            self.clocks.put(member.index, member.clock)

    def wait_for_version(self, member: Member, waits: bool) -> None:
        """Note whether a worker's next step needs another update."""
        self.waiting_for_version += waits - member.waits_for_version
        member.waits_for_version = waits

    def tick(self, member: Member, steps: int) -> None:
        """Count the steps of a worker whose gradient was used or refused."""
        member.clock += steps
        self.clocks.put(member.index, member.clock)

    def hear(self, worker: int, now: float) -> None:
        """Note a heartbeat, or another message, of a worker."""
        self._heard.pop(worker, None)
        self._heard[worker] = now

    def silent(self, now: float, timeout_s: float) -> list[int]:
        """Return the workers that were not heard of for more than ``timeout_s`` seconds. O(their number)."""
        workers = []
        for worker, heard in self._heard.items():
            if now - heard <= timeout_s:
                break
            workers.append(worker)
        return workers

    def all_are_here(self) -> bool:
        return not (self.in_phase[WorkerPhase.ABSENT] or self.in_phase[WorkerPhase.JOINING])

    def all_wait_for_an_update(self) -> bool:
        """Return whether no worker will push before the next update.

        That is the case if none is computing or absent, and all with steps left wait for another version, at a barrier
        or for the turn of their gradient in the order of workers."""
        busy = (
            self.in_phase[WorkerPhase.COMPUTING]
            + self.in_phase[WorkerPhase.ABSENT]
            + self.in_phase[WorkerPhase.JOINING]
        )
        return not busy and self.in_phase[WorkerPhase.READY] == self.waiting_for_version
