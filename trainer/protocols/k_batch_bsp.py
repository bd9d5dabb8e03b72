"""k-batch-BSP: an update takes the first k gradients of the newest version (Dutta et al. 2018, K-batch-sync SGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.core.specs import option
from trainer.protocols.base import Gradient, Protocol, View, k_of


@dataclass(frozen=True)
class KBatchBSP(Protocol):
    """K-batch-sync SGD. Staleness is 0.

    A worker that has pushed computes another mini-batch with the same version, so an update may contain several gradients
    of a fast worker. Steps that are unfinished when the update is made are cancelled."""

    name: ClassVar[str] = "k-batch-bsp"
    summary: ClassVar[str] = "applies the first K fresh gradients in every update, whichever worker they come from"
    synchronous: ClassVar[bool] = True
    refuses_gradients: ClassVar[bool] = True
    reads_own_writes: ClassVar[bool] = False

    k: int | None = option(None, "gradients per update", least=1, shown="half of the number of workers")
    cancel: Literal["push", "preempt"] = option(
        "push",
        "handling of a gradient that is too late for its update: push refuses it when it arrives, preempt stops its"
        " computation between micro-batches",
    )
    micro_batches: int = option(
        4, "micro-batches per step with --cancel preempt, which also are the batches of BatchNorm", least=2
    )

    def update_size(self, num_workers: int) -> int:
        return k_of(self.k, num_workers)

    def parts_of_a_step(self) -> int:
        return self.micro_batches if self.cancel == "preempt" else 1

    def admit(self, gradient: Gradient, view: View) -> bool:
        return gradient.version == view.version
