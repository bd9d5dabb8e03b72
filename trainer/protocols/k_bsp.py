"""k-BSP: an update takes the gradients of the k fastest workers (Dutta et al. 2018, K-sync SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import NOW, Release, View, check_distinct
from trainer.protocols.k_batch_bsp import KBatchBSP


@dataclass(frozen=True)
class KBSP(KBatchBSP):
    """K-sync SGD. Staleness is 0. k = n is BSP except for the order in which gradients are summed.

    A worker waits until the update that contains its gradient is made; the steps of the other n - k are cancelled."""

    name: ClassVar[str] = "k-bsp"
    summary: ClassVar[str] = "applies the gradients of the K fastest workers in every update"
    reads_own_writes: ClassVar[bool] = True

    def check(self, num_workers: int) -> None:
        check_distinct(self.k, num_workers)

    def release(self, worker: int, view: View) -> Release:
        return Release(version=view.version + 1) if view.contributes(worker) else NOW
