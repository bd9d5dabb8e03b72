"""The comparison of the driver's clock with the clocks of executors and of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.doctor.checks import FAILED, OK, WARNING, Check

# Commands without a claim on a set (inspect, clean) recognise live runs by the age of heartbeats, in minutes.
MUCH_S = 60.0
TOO_MUCH_S = 300.0  # above, Kerberos refuses tickets; S3 refuses requests from 15 minutes on


class Reading(NamedTuple):
    """Another machine's clock, read between two readings of the driver's. All times are in seconds since 1970.

    Attributes:
        where: the owner of the clock.
        before_s: the driver's clock before.
        clock_s: the other clock.
        after_s: the driver's clock after.
    """

    where: str
    before_s: float
    clock_s: float
    after_s: float

    @property
    def ahead_s(self) -> float:
        """The time by which the other clock is certainly ahead (below 0: behind); 0 if it may show the same time."""
        if self.clock_s > self.after_s:
            return self.clock_s - self.after_s
        return min(0.0, self.clock_s - self.before_s)


def closest(readings: Sequence[Reading]) -> list[Reading]:
    """Return for each owner the reading that took the least time, which is the most precise."""
    best: dict[str, Reading] = {}
    for reading in sorted(readings, key=lambda each: each.before_s - each.after_s):
        best[reading.where] = reading
    return list(best.values())


def check_clocks(readings: Sequence[Reading]) -> Check:
    """Return the check of clocks: a warning if one differs by more than a minute from the driver's, failed for 5
    minutes.

    readings: one per owner, at least one."""
    far = max(readings, key=lambda each: abs(each.ahead_s))
    if abs(far.ahead_s) <= MUCH_S:
        widest = max(each.after_s - each.before_s for each in readings)
        return Check(
            "clocks", OK, f"{len(readings)} agree with the driver's, within the duration of a request ({widest:.1f} s)"
        )
    side = "ahead of" if far.ahead_s > 0 else "behind"
    text = f"the clock of {far.where} is {abs(far.ahead_s):,.0f} s {side} the driver's"
    return Check(
        "clocks", FAILED if abs(far.ahead_s) > TOO_MUCH_S else WARNING, text, "run a time service on all machines"
    )
