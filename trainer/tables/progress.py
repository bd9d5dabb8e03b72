"""The progress of a long command on stderr."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeline.core import console

LOGGER = "sharding.tables"
LINE_EVERY_S = 10.0


@dataclass
class TableProgress:
    """The progress of a command on stderr, one line every LINE_EVERY_S.

    Attributes:
        quiet: print only warnings.
        phase: name of the present phase.
        total: steps or rows of the phase.
        first: steps or rows that were done before this start.
        start: when the phase began (monotonic seconds).
        last_line: when the last line was printed (monotonic seconds).
        command_start: when the progress of the command began (monotonic seconds).
    """

    quiet: bool
    phase: str
    total: int = 0
    first: int = 0
    start: float = 0.0
    last_line: float = 0.0
    command_start: float = field(default_factory=time.monotonic)

    def begin(self, phase: str, total: int, first: int = 0) -> None:
        self.phase = phase
        self.total = total
        self.first = first
        self.start = self.last_line = time.monotonic()

    def advance(self, position: int, text: str) -> None:
        """Print a line with the time that is left, if it is time for one or the phase has ended.

        position: steps or rows so far; text: the beginning of the line."""
        now = time.monotonic()
        if now - self.last_line < LINE_EVERY_S and position < self.total:
            return
        self.last_line = now
        pace = (position - self.first) / max(1e-9, now - self.start)
        ending = (
            f", {(self.total - position) / pace:,.0f} s left"
            if position < self.total
            else f" in {now - self.start:,.1f} s"
        )
        self.say(f"{text}{ending}")

    def say(self, text: str) -> None:
        """Print a line with the time and the phase."""
        if not self.quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning, also with --quiet."""
        self._print(f"warning: {text}", "warning")

    def _print(self, text: str, level: str = "info") -> None:
        elapsed = time.monotonic() - self.command_start
        line = f"{console.wall_clock()} [{elapsed:6.1f} s] {self.phase:<9} {text}"
        fields = {"elapsed_s": round(elapsed, 1), "phase": self.phase}
        console.say(LOGGER, f"{self.phase}: {text}", text=line, level=level, fields=fields)
