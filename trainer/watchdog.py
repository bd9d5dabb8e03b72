"""The watchdog of a process: its main thread reports progress, and its heartbeats carry the time since then.

Heartbeats come from another thread, so they continue while the main thread hangs, for example in a step, in fsync or at
a lock."""

from __future__ import annotations

import time

_progress_at = time.monotonic()
_trouble = ""
_has_started = False


def kick() -> None:
    """Report progress of the main thread: an iteration of its loop, a batch, a file. Waiting for peers counts, too."""
    global _progress_at
    _progress_at = time.monotonic()


def stalled_s() -> float:
    """Return the seconds since the last progress."""
    return time.monotonic() - _progress_at


def mark_started() -> None:
    """Report that this process has started: a worker is about to join. Until then imports and CUDA may stop heartbeats."""
    global _has_started
    _has_started = True


def has_started() -> bool:
    """Return whether this process has started."""
    return _has_started


def report(trouble: str) -> None:
    """Report the problem that blocks this process to the supervisor, as one line; "" once it is resolved."""
    global _trouble
    _trouble = " ".join(trouble.split())


def trouble() -> str:
    """Return the last reported problem."""
    return _trouble
