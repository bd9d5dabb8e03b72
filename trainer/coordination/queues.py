"""Queues of workers that wait for permission to start their next step."""

from __future__ import annotations

import heapq

from trainer.coordination.clocks import Clocks
from trainer.coordination.membership import Member
from trainer.protocols.base import Release


class Queues:
    """Waiting workers as (worker, ticket): by the version or the smallest clock that they need, or for the next barrier,
    and those that are ready.

    An entry is void once the worker's ticket has changed."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, int]] = []
        self._by_version: dict[int, list[tuple[int, int, Release]]] = {}
        self._by_clock: list[tuple[int, int, int]] = []  # a heap of (clock, worker, ticket)
        self._at_barrier: list[tuple[int, int]] = []

    def add_for_version(self, member: Member, release: Release) -> None:
        self._by_version.setdefault(release.version, []).append((member.index, member.ticket, release))

    def add_for_clock(self, member: Member, clock: int) -> None:
        heapq.heappush(self._by_clock, (clock, member.index, member.ticket))

    def add_at_barrier(self, member: Member) -> None:
        self._at_barrier.append((member.index, member.ticket))

    def take_at_barrier(self) -> list[tuple[int, int]]:
        """Remove and return the workers that wait for the next barrier."""
        waiting = self._at_barrier
        self._at_barrier = []
        return waiting

    def take_for_version(self, version: int) -> list[tuple[int, int, Release]]:
        """Remove and return the workers that wait for a version, as (worker, ticket, release)."""
        return self._by_version.pop(version, [])

    def release_up_to(self, clocks: Clocks) -> None:
        """Make ready the workers whose clock bound the smallest clock has reached."""
        while self._by_clock and self._by_clock[0][0] <= clocks.least():
            _, worker, ticket = heapq.heappop(self._by_clock)
            self.ready.append((worker, ticket))

    def clear(self) -> None:
        self.ready = []
        self._by_version = {}
        self._by_clock = []
        self._at_barrier = []
