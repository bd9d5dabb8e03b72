"""Whether the main thread of a process gets on. It says so; a thread beside it tells the supervisor how long ago that was.

Heartbeats come from threads of their own and go on while the main thread hangs: in a step, in fsync, in a lock."""

from __future__ import annotations

import time

_progress_at = time.monotonic()
_trouble = ""


def kick() -> None:
    """The main thread got on: by a turn of its loop, a batch, a file. Waiting for others is getting on, too."""
    global _progress_at
    _progress_at = time.monotonic()


def stalled_s() -> float:
    """Seconds since then."""
    return time.monotonic() - _progress_at


def report(trouble: str) -> None:
    """Tell the supervisor what keeps this process from its work, as one line; "" once nothing does."""
    global _trouble
    _trouble = " ".join(trouble.split())


def trouble() -> str:
    """Return what was reported last."""
    return _trouble
