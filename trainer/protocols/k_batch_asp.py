"""k-batch-ASP: an update takes any k gradients, computed with any version (Dutta et al. 2018, K-batch-async SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.protocols.base import Protocol, k_of


@dataclass(frozen=True)
class KBatchASP(Protocol):
    """K-batch-async SGD. Workers continue at once with the current parameters, so an update may contain several gradients
    of a fast worker."""

    name: ClassVar[str] = "k-batch-asp"
    summary: ClassVar[str] = "applies any K gradients, fresh or stale, in every update; workers never wait"
    synchronous: ClassVar[bool] = False
    reads_own_writes: ClassVar[bool] = False

    k: int | None = option(None, "gradients per update", least=1, shown="half of the number of workers")

    def update_size(self, num_workers: int) -> int:
        return k_of(self.k, num_workers)
