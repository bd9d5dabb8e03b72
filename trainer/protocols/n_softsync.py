"""n-softsync: an update takes floor(n/m) gradients, each divided by its staleness (Zhang et al. 2016, equations 5 and 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.protocols.base import Protocol


@dataclass(frozen=True)
class NSoftsync(Protocol):
    """w -= (a/c) * sum of g / max(staleness, 1) over c = floor(n/m) gradients of any workers. No worker waits.

    With equally fast workers the mean staleness is about m. Unlike in other protocols the rate a is not divided by n,
    because gradients are divided by their staleness."""

    name: ClassVar[str] = "n-softsync"
    summary: ClassVar[str] = (
        "applies the gradients of N/M of the N workers, each divided by its staleness, in every update"
    )
    synchronous: ClassVar[bool] = False
    reads_own_writes: ClassVar[bool] = False

    softsync: int = option(1, "divisor M of the number of workers, which gives the gradients per update", least=1)
    divide_by_staleness: bool = option(True, "divide each gradient by its staleness")

    def check(self, num_workers: int) -> None:
        if self.softsync > num_workers:
            raise UsageError(
                f"--softsync {self.softsync} exceeds the number of workers, {num_workers}: give at most {num_workers},"
                " for a gradient per update"
            )

    def update_size(self, num_workers: int) -> int:
        return max(1, num_workers // self.softsync)

    def weight(self, staleness: int, num_workers: int) -> float:
        share = num_workers / self.update_size(num_workers)
        return share / max(staleness, 1) if self.divide_by_staleness else share
