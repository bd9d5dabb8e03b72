"""The parameters that all exchanges with a switch have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.core.specs import option
from trainer.exchange.base import Exchange
from trainer.exchange.parameter_server import ParameterServer


@dataclass(frozen=True)
class Switching(Exchange):
    """An exchange with two stages, the second of which begins with the model of the first."""

    client: ClassVar[str] = ParameterServer.client
    in_virtual_time: ClassVar[bool] = True
    carries_examples: ClassVar[bool] = True

    switch_momentum: Literal["reset", "keep", "scale"] = option(
        "reset",
        "momentum at the switch: reset sets it to 0, keep leaves it, scale divides it by the number of workers",
        advanced=True,
    )

    def momentum_factor(self, num_workers: int) -> float:
        """Return the factor of the momentum at the switch."""
        return {"reset": 0.0, "keep": 1.0, "scale": 1 / num_workers}[self.switch_momentum]

    @abstractmethod
    def switch_step(self, steps: int, steps_per_epoch: int) -> int:
        """Return the step of each worker at which the second stage begins; 0 if there is no first stage.

        Not called if ``switches_by_rule``. steps: steps per worker in the run; steps_per_epoch: in an epoch."""

    @abstractmethod
    def switch_reason(self) -> str:
        """Return in words why the second stage begins at ``switch_step``."""
