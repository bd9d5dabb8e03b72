"""k-ASP: an update takes gradients of k distinct workers, computed with any version (Dutta et al. 2018, K-async SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import NOW, Release, View, check_distinct
from trainer.protocols.k_batch_asp import KBatchASP


@dataclass(frozen=True)
class KASP(KBatchASP):
    """K-async SGD. k = 1 is ASP; with k = n every update has a gradient of each worker.

    A worker waits until the update that contains its gradient is made. Gradients of the other workers are used in later
    updates, with staleness."""

    name: ClassVar[str] = "k-asp"
    summary: ClassVar[str] = "applies gradients of K different workers, fresh or stale, in every update"
    reads_own_writes: ClassVar[bool] = True

    def check(self, num_workers: int) -> None:
        check_distinct(self.k, num_workers)

    def release(self, worker: int, view: View) -> Release:
        return Release(version=view.version + 1) if view.contributes(worker) else NOW
