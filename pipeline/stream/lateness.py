"""The test for late rows of a stream (--late-after), by the times of their files or messages. Pure."""

from __future__ import annotations

import time

CLOCK_TOLERANCE_S = 60  # allowed difference between clocks of machines


def latest_believable_ms() -> int:
    """Return the latest time (ms since 1970) that a file or message can have if its clock and this machine's are right.

    A later time never counts as the newest of a stream, because all rows after it would be late."""
    return int(1000 * (time.time() + CLOCK_TOLERANCE_S))


def is_late(time_ms: int, newest_ms: int, late_after_s: float | None) -> bool:
    """True if a file or message is more than ``late_after_s`` seconds older than the newest one of earlier batches.

    time_ms, newest_ms: their times, in ms since 1970. False if late_after_s is None."""
    return late_after_s is not None and time_ms < newest_ms - 1000 * late_after_s


def ahead_of_clock(subject: str) -> str:
    """Return the warning about files or messages from the future. subject: the start of the sentence, which names them."""
    return (
        f"{subject} more than {CLOCK_TOLERANCE_S} s ahead of this machine's clock, so --late-after ignores these times;"
        " correct the clocks of the machines that wrote them, or this one's"
    )
