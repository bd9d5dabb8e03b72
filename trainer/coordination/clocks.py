"""The clocks of the members, with their minimum and maximum."""

from __future__ import annotations

import heapq


class Clocks:
    """Clocks by worker. Changes cost O(log N) amortised, the minimum and maximum O(1)."""

    def __init__(self) -> None:
        self._clock: dict[int, int] = {}
        self._workers: dict[int, dict[int, None]] = {}  # workers by clock, in the order in which they reached it
        self._low: list[int] = []  # a heap of all clocks with workers, and of some without
        self._high: list[int] = []  # the same, negated

    def put(self, worker: int, clock: int) -> None:
        """Add a worker at a clock, or move it there."""
        self.remove(worker)
        self._clock[worker] = clock
        workers = self._workers.get(clock)
        if workers is None:
            workers = self._workers[clock] = {}
            heapq.heappush(self._low, clock)
            heapq.heappush(self._high, -clock)
            # Heaps keep clocks that no worker has any more until these reach the top. Those that never do would pile up
            # with every step, so a heap that is mostly outdated is rebuilt.
            if len(self._high) > 2 * len(self._workers) + 64:
                self._high = [-clock for clock in self._workers]
                heapq.heapify(self._high)
            if len(self._low) > 2 * len(self._workers) + 64:
                self._low = sorted(self._workers)  # a sorted list is a heap
        workers[worker] = None

    def remove(self, worker: int) -> None:
        """Remove a worker if it is there."""
        clock = self._clock.pop(worker, None)
        if clock is not None:
            workers = self._workers[clock]
            del workers[worker]
            if not workers:
                del self._workers[clock]

    def least(self) -> int:
        """Return the smallest clock, 0 without members."""
        while self._low and self._low[0] not in self._workers:
            heapq.heappop(self._low)
        return self._low[0] if self._low else 0

    def greatest(self) -> int:
        """Return the largest clock, 0 without members."""
        while self._high and -self._high[0] not in self._workers:
            heapq.heappop(self._high)
        return -self._high[0] if self._high else 0

    def slowest_worker(self) -> int | None:
        """Return the worker that has had the smallest clock for the longest time, or None."""
        return next(iter(self._workers[self.least()]), None) if self._clock else None
