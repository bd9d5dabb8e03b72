"""The restart policy: how often and after how long a failed process is restarted. Pure: no clock, no processes."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0


@dataclass
class Row:
    """A number of failures in a row, and the greatest progress at any of them."""

    failures: int = 0
    progress: int = -1


class Restarts:
    """A counter of failures in a row, that is without progress between them.

    Progress is measured by a number that never decreases, such as the highest version that the run has ever reached:
    repeated work after a roll-back is no progress. A run that makes none is therefore recognised even if its processes
    live long."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def failed(self, who: str, progress: int) -> int:
        """Count a failure and return the number of failures in a row. who: a text that names what failed.

        progress: a number that never decreases; a greater one than at all earlier failures begins a new row."""
        row = self._rows.setdefault(who, Row())
        row.failures = 1 if progress > row.progress else row.failures + 1
        row.progress = max(row.progress, progress)
        return row.failures


def pause_s(failures: int) -> float:
    """Return the pause before a restart (seconds) after so many failures in a row.

    It is 0 after the first, then FIRST_PAUSE_S, doubling each time up to MOST_PAUSE_S."""
    return 0.0 if failures < 2 else min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 2, 16))
