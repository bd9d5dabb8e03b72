"""Bulk synchronous parallel: one update takes one gradient of every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import Gradient, Protocol, View


@dataclass(frozen=True)
class BSP(Protocol):
    """Gradients are summed in worker order, so the result does not depend on who came first. A lost worker is waited
    for: it draws the same mini-batch again, so the run's numbers do not show that it was away. Staleness is 0."""

    name: ClassVar[str] = "bsp"
    summary: ClassVar[str] = "one update takes a gradient of every worker"
    synchronous: ClassVar[bool] = True
    reproducible: ClassVar[bool] = True

    def clock_bound(self) -> int:
        return 0

    def take(self, view: View) -> Sequence[Gradient]:
        if len(view.waiting) < len(view.clocks):
            return ()
        return sorted(view.waiting, key=lambda gradient: gradient.worker)
