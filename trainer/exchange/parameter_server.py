"""The parameter server: workers push gradients to servers, which update the parameters, and pull them (Li et al. 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.exchange.base import Exchange


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """The exchange with servers, each of which holds a slice of the parameters."""

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[str] = "workers push gradients to servers and pull the parameters"
    client: ClassVar[str] = "trainer.worker.clients.servers"
    in_virtual_time: ClassVar[bool] = True
    carries_examples: ClassVar[bool] = True
