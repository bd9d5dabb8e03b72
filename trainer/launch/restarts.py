"""How often, and after how long, what has failed is started again. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0


@dataclass
class Row:
    """Failures in a row, and the progress at the last of them."""

    failures: int = 0
    progress: int = -1


class Restarts:
    """Counts failures in a row: those without progress between them.

    Progress is a number that never falls, such as the furthest version that the run has ever had: what a roll-back took
    away and is done again is none. So neither luck nor a long life hides that a run stands still."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def failed(self, who: str, progress: int) -> int:
        """How many failures in a row this one makes."""
        row = self._rows.setdefault(who, Row())
        row.failures = 1 if progress > row.progress else row.failures + 1
        row.progress = max(row.progress, progress)
        return row.failures


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row: not at all after the first, then twice as long each time."""
    return 0.0 if failures < 2 else min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 2, 16))
