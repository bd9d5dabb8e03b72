"""Barriers: steps before which every worker waits for all others, whatever the protocol. Pure.

A worker starts the step of a barrier once all workers have reached it, lost ones included, and the gradients of all
earlier steps are applied. Between two barriers the protocol alone decides who waits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Barriers:
    """The barriers of a run. clocks: numbers of their steps, ascending; empty for a run without barriers."""

    clocks: tuple[int, ...] = ()

    def first_after(self, clock: int) -> int | None:
        """Return the first barrier after a step, None after the last one."""
        place = bisect_right(self.clocks, clock)
        return self.clocks[place] if place < len(self.clocks) else None

    def steps_before(self, clock: int, steps: int) -> int:
        """Return how many of a worker's next ``steps`` steps, from a step on, precede the next barrier."""
        barrier = self.first_after(clock)
        return steps if barrier is None else min(steps, barrier - clock)


class BarrierWatch:
    """Decides when the next barrier opens. O(1) per gradient.

    Args:
        barriers: of the run.
        clocks: steps of each worker whose gradients are applied. All barriers up to the least of them are open.

    Attributes:
        clock: the next barrier, which no worker has passed; None after the last one.
    """

    def __init__(self, barriers: Barriers, clocks: Sequence[int]) -> None:
        self.barriers = barriers
        self.num_workers = len(clocks)
        barrier = self.clock = barriers.first_after(min(clocks))
        self._missing = 0 if barrier is None else sum(clock < barrier for clock in clocks)

    def note(self, before: int, after: int) -> bool:
        """Note that gradients of a worker were applied, and return whether the barrier opens by that.

        before, after: number of its steps whose gradients are applied, without and with these."""
        if self.clock is None or not before < self.clock <= after:
            return False
        self._missing -= 1
        if self._missing:
            return False
        # No push crosses a barrier. All workers are therefore at this one, and have yet to reach the next.
        self.clock = self.barriers.first_after(self.clock)
        self._missing = self.num_workers
        return True
