"""When a part that a launcher itself watches is started again. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.launch.restarts import pause_s

SHORT_S = 30.0  # a part that lived no longer got nowhere
MOST_SHORT = 6  # of these in a row: it never will


@dataclass
class Attempts:
    """Of each part: the attempts so far, when the newest began, and how many in a row were short."""

    count: dict[int, int] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    short: dict[int, int] = field(default_factory=dict)

    def begin(self, part: int, now: float) -> int:
        """The number of the attempt that begins."""
        number = self.count.get(part, 0)
        self.count[part], self.began[part] = number + 1, now
        return number

    def lost(self, part: int, now: float) -> float | None:
        """When the part is to be started again; None: not any more."""
        lived = now - self.began[part]
        self.short[part] = self.short.get(part, 0) + 1 if lived < SHORT_S else 1
        if self.short[part] > MOST_SHORT:
            return None
        return now + pause_s(self.short[part])
