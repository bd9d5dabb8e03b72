"""Failures of a virtual run, as the command line scripts them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.core.errors import UsageError

FORM = "worker:I@SECONDS+AWAY, server@SECONDS+AWAY"
_FAILURE = re.compile(r"(?:(server)|worker:(\d+))@([\d.]+)\+([\d.]+)")


@dataclass(frozen=True)
class Failure:
    """At a moment a worker dies, or a server (worker None), and is back after some seconds. What a worker computes is
    lost; the death of a server takes everybody back to the last checkpoint."""

    worker: int | None
    at_s: float
    away_s: float

    def __str__(self) -> str:
        who = "server" if self.worker is None else f"worker:{self.worker}"
        return f"{who}@{self.at_s:g}+{self.away_s:g}"


def parse_failures(text: str) -> tuple[Failure, ...]:
    """``worker:3@12.5+4,server@60+5`` as failures. Raises UsageError."""
    return tuple(_failure(part.strip()) for part in text.split(","))


def _failure(part: str) -> Failure:
    match = _FAILURE.fullmatch(part)
    try:
        if match:
            return Failure(int(match[2]) if match[2] else None, float(match[3]), float(match[4]))
    except ValueError:
        pass
    raise UsageError(f"--failures: {part!r} is none of {FORM}, such as worker:3@12.5+4")
