"""Bulk synchronous parallel (BSP): every update takes one gradient of each worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import NOW, Protocol, Release, View


@dataclass(frozen=True)
class BSP(Protocol):
    """Bulk synchronous parallel. Staleness is 0.

    Gradients are summed in worker order, so the result does not depend on the order of arrival. The others wait for a lost
    worker, which draws the same mini-batch again, so failures do not change the result either."""

    name: ClassVar[str] = "bsp"
    summary: ClassVar[str] = "applies the mean gradient of all workers in every update"
    synchronous: ClassVar[bool] = True
    reproducible: ClassVar[bool] = True
    in_worker_order: ClassVar[bool] = True

    def update_size(self, num_workers: int) -> int:
        return num_workers

    def clock_bound(self) -> int:
        return 0

    def release(self, worker: int, view: View) -> Release:
        return Release(version=view.version + 1) if view.contributes(worker) else NOW
