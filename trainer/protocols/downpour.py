"""Downpour: workers train own copies, and push the sum of their gradients after several steps (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.protocols.base import Protocol


@dataclass(frozen=True)
class Downpour(Protocol):
    """Downpour SGD, as DataGossip's worker has it (Wenig and Papenbrock, EDBT 2022).

    A worker moves its copy of the parameters by each of its gradients. In step 0 and in every ``push_every``-th step after
    it, it pushes the sum of the gradients since its last push, and replaces its copy by the parameters with which the
    server answers. The server adds what it gets, without a mean over workers: both use the rate a/n. The answer already
    contains the push, so that a worker loses no progress, and waits only for this answer."""

    name: ClassVar[str] = "downpour"
    summary: ClassVar[str] = "applies the sum of a worker's gradients over several steps of its own copy of the model"
    synchronous: ClassVar[bool] = False
    has_momentum: ClassVar[bool] = False

    push_every: int = option(5, "steps of a worker between two pushes", least=1)

    def check_steps(self, steps: int) -> None:
        # A worker is not stopped between two pushes, so that a long period would train far past the end of the run. The
        # default is short enough for any run.
        most = max(steps, type(self).push_every)
        if self.push_every > most:
            raise UsageError(
                f"--push-every {self.push_every} exceeds the steps of each worker in the run, {steps}: give at most {most}"
            )

    def local_steps(self, clock: int) -> int:
        return -clock % self.push_every + 1

    def most_local_steps(self) -> int:
        return self.push_every
