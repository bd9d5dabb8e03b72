"""Scripted failures of a run in virtual time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.core.errors import UsageError

FORM = "worker:I@SECONDS+AWAY, server@SECONDS+AWAY"
_FAILURE = re.compile(r"(?:(server)|worker:(\d+))@([\d.]+)\+([\d.]+)")


@dataclass(frozen=True)
class Failure:
    """The death of a worker, or of a server if ``worker`` is None, at ``at_s``, and its restart ``away_s`` later.

    The step that a dying worker computes is lost. The death of a server rolls the run back to the newest checkpoint."""

    worker: int | None
    at_s: float
    away_s: float

    def __str__(self) -> str:
        who = "server" if self.worker is None else f"worker:{self.worker}"
        return f"{who}@{self.at_s:g}+{self.away_s:g}"


def parse_failures(text: str) -> tuple[Failure, ...]:
    """Parse a list such as ``worker:3@12.5+4,server@60+5``. Raises UsageError."""
    return tuple(_failure(part.strip()) for part in text.split(","))


def _failure(part: str) -> Failure:
    """Parse one failure of the list. Raises UsageError."""
    match = _FAILURE.fullmatch(part)
    try:
        if match:
            return Failure(int(match[2]) if match[2] else None, float(match[3]), float(match[4]))
    except ValueError:
        pass
    raise UsageError(f"--failures: {part!r} is not one of {FORM}, such as worker:3@12.5+4")
