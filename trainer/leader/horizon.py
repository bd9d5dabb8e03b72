"""The horizon of a run among neighbours: the first round that its workers may not begin. Pure."""

from __future__ import annotations

import math

AHEAD_S = 1.0  # time that the fastest worker takes to the horizon
MOST_AHEAD = 10_000  # rounds from the fastest worker to the horizon
LEAST_AHEAD = 2
RATE_S = 1.0  # between two measurements of the fastest worker's speed
BURST_S = 0.02  # the shortest time by which rounds are divided, because one report can have several


class Horizon:
    """Keeps a horizon ahead of the fastest worker. It never moves back.

    Attributes:
        until: the first round that is not granted.
        ahead: rounds from the fastest worker to a horizon that has just been moved.
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.ahead = LEAST_AHEAD
        self._measured = (0.0, 0)  # time and furthest round at the last measurement of the speed

    def begin(self, now: float) -> None:
        """Begin to measure the speed, because all workers begin the round at the horizon. now: in seconds."""
        self._measured = (now, self.until)

    def move(self, furthest: int, limit: int, now: float) -> None:
        """Move the horizon ahead of the fastest worker.

        Args:
            furthest: the round that the fastest worker has begun.
            limit: the first round that may not be granted now.
            now: in seconds.
        """
        measured_at, furthest_before = self._measured
        elapsed = now - measured_at
        ahead = math.ceil((furthest - furthest_before) / max(elapsed, BURST_S) * AHEAD_S)
        if elapsed >= RATE_S:
            self.ahead = min(MOST_AHEAD, max(LEAST_AHEAD, ahead))
            self._measured = (now, furthest)
        else:
            # At the start, and after a wait for a lost worker, the last measurement is too low. Until the next one, fast
            # workers would ask for a horizon every second round.
            self.ahead = min(MOST_AHEAD, max(self.ahead, min(2 * self.ahead, ahead)))
        self.until = max(self.until, min(limit, furthest + self.ahead))
