"""The clocks of the workers that take part, with the least and the greatest at hand."""

from __future__ import annotations

import heapq


class Clocks:
    """A clock by worker. Adding, removing and moving one cost O(log N) on average over a run, the extremes O(1)."""

    def __init__(self) -> None:
        self._clock: dict[int, int] = {}
        self._workers: dict[int, dict[int, None]] = {}  # by clock, in the order in which they came to it
        self._low: list[int] = []  # every clock that has workers, and some that have had
        self._high: list[int] = []  # the same, negated

    def put(self, worker: int, clock: int) -> None:
        """Let a worker take part at a clock, or move it there."""
        if worker in self._clock:
            self.remove(worker)
        self._clock[worker] = clock
        workers = self._workers.get(clock)
        if workers is None:
            workers = self._workers[clock] = {}
            heapq.heappush(self._low, clock)
            heapq.heappush(self._high, -clock)
            if len(self._high) > 2 * len(self._workers) + 64:
                self._high = [-clock for clock in self._workers]
                heapq.heapify(self._high)
            if len(self._low) > 2 * len(self._workers) + 64:
                self._low = sorted(self._workers)
        workers[worker] = None

    def remove(self, worker: int) -> None:
        """A worker takes part no more; one that does not is left alone."""
        clock = self._clock.pop(worker, None)
        if clock is not None:
            workers = self._workers[clock]
            del workers[worker]
            if not workers:
                del self._workers[clock]

    def least(self) -> int:
        """0 where nobody takes part."""
        while self._low and self._low[0] not in self._workers:
            heapq.heappop(self._low)
        return self._low[0] if self._low else 0

    def greatest(self) -> int:
        """0 where nobody takes part."""
        while self._high and -self._high[0] not in self._workers:
            heapq.heappop(self._high)
        return -self._high[0] if self._high else 0

    def slowest_worker(self) -> int | None:
        """Of the workers of the least clock, the one that has had it for longest."""
        return next(iter(self._workers[self.least()]), None) if self._clock else None
