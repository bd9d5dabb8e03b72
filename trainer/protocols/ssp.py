"""Stale synchronous parallel: asynchronous, but nobody runs more than a bound ahead of the slowest (Ho et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.protocols.base import Protocol, Release, View


@dataclass(frozen=True)
class SSP(Protocol):
    """A worker may start a step iff its clock is at most ``staleness_bound`` ahead of the slowest worker's.

    Updates are applied on arrival, so a worker that may start reads all updates of clocks up to its own
    less staleness_bound and 1, and its own. A bound of 0 is a barrier; a lost or finished worker holds nobody back."""

    name: ClassVar[str] = "ssp"
    summary: ClassVar[str] = "like asp, but nobody runs far ahead"
    synchronous: ClassVar[bool] = False

    staleness_bound: int = option(
        3,
        "steps that a worker may be ahead of the slowest; 0 is a barrier. Of dssp, the least that the bound may be",
        metavar="S",
        least=0,
    )

    def clock_bound(self) -> int:
        return self.staleness_bound

    def release(self, worker: int, view: View) -> Release:
        return Release(slowest=view.clock(worker) - self.staleness_bound)

    def clock_on_joining(self, clock: int, view: View) -> int:
        # Where it was away, the others have gone on without it: its old clock would hold them all back at once.
        return max(clock, view.slowest())
