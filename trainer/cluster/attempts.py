"""The restart policy for parts that a launcher watches itself. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.launch.restarts import pause_s

SHORT_S = 30.0  # a shorter attempt counts as one without progress
MOST_SHORT = 6  # a part with more short attempts in a row is given up


@dataclass
class Attempts:
    """The attempts of each part.

    count: attempts so far; began: start time of the newest one (seconds); short: short attempts in a row."""

    count: dict[int, int] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    short: dict[int, int] = field(default_factory=dict)

    def begin(self, part: int, now: float) -> int:
        """Count a new attempt of a part and return its number, from 0."""
        number = self.count.get(part, 0)
        self.count[part] = number + 1
        self.began[part] = now
        return number

    def lost(self, part: int, now: float) -> float | None:
        """Count a lost attempt and return the time of the next one (seconds), or None to give the part up."""
        lived = now - self.began[part]
        self.short[part] = self.short.get(part, 0) + 1 if lived < SHORT_S else 1
        if self.short[part] > MOST_SHORT:
            return None
        return now + pause_s(self.short[part])
