"""Stale synchronous parallel (SSP): asynchronous with a bound on the lead over the slowest worker (Ho et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.protocols.base import Protocol, Release, View


@dataclass(frozen=True)
class SSP(Protocol):
    """A worker may start a step if its clock is at most ``staleness_bound`` ahead of the slowest worker's.

    Updates are applied on arrival. A worker that starts step c therefore sees all updates of clocks up to
    c - staleness_bound - 1, and all of its own. A bound of 0 is a barrier. Lost and finished workers do not count."""

    name: ClassVar[str] = "ssp"
    summary: ClassVar[str] = "like asp, with a bound on how far a worker can be ahead"
    synchronous: ClassVar[bool] = False

    staleness_bound: int = option(
        3,
        "steps that a worker may be ahead of the slowest worker, for dssp the lowest value of this bound; 0 is a barrier",
        least=0,
    )

    def clock_bound(self) -> int:
        return self.staleness_bound

    def release(self, worker: int, view: View) -> Release:
        return Release(slowest=view.clock(worker) - self.staleness_bound)

    def clock_on_joining(self, clock: int, view: View) -> int:
        # The others have continued without the lost worker, and its old clock would stop them all at once.
        return max(clock, view.slowest())
