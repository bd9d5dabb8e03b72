"""k-batch-ASP: an update takes any k gradients, computed at any version (Dutta et al. 2018, K-batch-async SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.protocols.base import Protocol, k_of


@dataclass(frozen=True)
class KBatchASP(Protocol):
    """A worker pulls what there is and goes on at once, so several gradients of a fast one may be in an update."""

    name: ClassVar[str] = "k-batch-asp"
    summary: ClassVar[str] = "an update takes any K gradients, fresh or stale; nobody waits"
    synchronous: ClassVar[bool] = False

    k: int | None = option(None, "gradients an update", metavar="K", least=1, shown="half of the workers")

    def update_size(self, num_workers: int) -> int:
        return k_of(self.k, num_workers)
