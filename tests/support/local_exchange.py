"""An exchange from outside the packages, for tests; a test names it in the registry.

Each worker trains a model of its own. The servers only add up gradients. At a constant rate, without momentum, and with the
same number of steps of every worker, they hold the mean of all workers' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.exchange import Exchange


@dataclass(frozen=True)
class Local(Exchange):
    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "each worker trains a model of its own"
    client: ClassVar[str] = "tests.support.local_client"
    own_share: float = option(
        1.0, "of a worker's own model at its next step; the rest is the servers'", metavar="S", least=0, most=1
    )
