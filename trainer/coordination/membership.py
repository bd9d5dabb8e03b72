"""Who takes part in a run: sessions, phases, signs of life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from trainer.coordination.clocks import Clocks
from trainer.coordination.orders import Measured, Reply


class Phase(IntEnum):
    """Where a worker stands. ABSENT: never seen, or lost. JOINING: some servers have its wish. COMPUTING: it has
    parameters. PUSHED: its gradient waits for its turn in the sum. READY: it waits to be allowed its next step. FINISHED:
    it has done all its steps."""

    ABSENT = 0
    JOINING = 1
    FINISHED = 2
    COMPUTING = 3  # from here on a worker takes part
    PUSHED = 4
    READY = 5


@dataclass(slots=True)
class Member:
    """A worker as the coordinator knows it.

    clock: its gradients that were used or refused; unapplied: those of them in the sum of an update that is not made yet;
    pulled: the version that it computes at; held_by: the servers that have its wish to join, or its gradient; ticket:
    grows with every turn, so that a queue can tell an old entry; waits_for_version: whether an update must come before
    its next step; is_through: it has done its own steps."""

    index: int
    clock: int = 0
    phase: Phase = Phase.ABSENT
    session: int = 0
    pulled: int = 0
    unapplied: int = 0
    held_by: set[int] = field(default_factory=set)
    measured: Measured | None = None
    ticket: int = 0
    waits_for_version: bool = False
    is_through: bool = False

    def reply(self) -> Reply:
        return Reply(self.index, self.session, self.clock)


class Membership:
    """All workers, how many are in which phase, and the clocks of those that take part."""

    def __init__(self, clocks: dict[int, int], num_workers: int) -> None:
        self.members = [Member(worker, clocks.get(worker, 0)) for worker in range(num_workers)]
        self.clocks = Clocks()
        self.in_phase = [num_workers, 0, 0, 0, 0, 0]  # workers by phase
        self.waiting_for_version = 0
        self._heard: dict[int, float] = {}  # by worker, those heard of least lately first

    def move(self, member: Member, phase: Phase) -> None:
        """A worker changes its phase; a queue's entries about it are void from now on."""
        before = member.phase
        self.in_phase[before] -= 1
        self.in_phase[phase] += 1
        member.phase = phase
        member.ticket += 1
        if member.waits_for_version:
            self.wait_for_version(member, False)
        if phase < Phase.COMPUTING:
            self.clocks.remove(member.index)
            if phase is not Phase.JOINING:
                self._heard.pop(member.index, None)
        elif before < Phase.COMPUTING:
            self.clocks.put(member.index, member.clock)

    def wait_for_version(self, member: Member, waits: bool) -> None:
        self.waiting_for_version += waits - member.waits_for_version
        member.waits_for_version = waits

    def tick(self, member: Member) -> None:
        """One more gradient of a worker was used or refused."""
        member.clock += 1
        self.clocks.put(member.index, member.clock)

    def hear(self, worker: int, now: float) -> None:
        """A sign of life of a worker that takes part or wants to."""
        self._heard.pop(worker, None)
        self._heard[worker] = now

    def silent(self, now: float, timeout_s: float) -> list[int]:
        """The workers that gave no sign of life for so long. O(their number)."""
        found = []
        for worker, heard in self._heard.items():
            if now - heard <= timeout_s:
                break
            found.append(worker)
        return found

    def all_are_here(self) -> bool:
        return not (self.in_phase[Phase.ABSENT] or self.in_phase[Phase.JOINING])

    def all_wait_for_an_update(self) -> bool:
        """Whether nobody will push before the next update: no step is being done, nobody is away, and all who have steps
        left wait for another version, or for the turn of their gradient."""
        busy = self.in_phase[Phase.COMPUTING] + self.in_phase[Phase.ABSENT] + self.in_phase[Phase.JOINING]
        return not busy and self.in_phase[Phase.READY] == self.waiting_for_version
