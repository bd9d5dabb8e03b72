"""Models for flat features: logistic and linear regression, and a small perceptron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.specs import option
from trainer.models.base import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.tasks import Task


@dataclass(frozen=True)
class LinearSpec(ModelSpec):
    """The base class of the regressions."""

    learning_rate: ClassVar[float] = 0.01
    stale_learning_rate: ClassVar[float] = 0.005
    intercept: bool = option(True, "add an intercept to the weights")


class Logistic(LinearSpec):
    name: ClassVar[str] = "logistic"

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.linear import logistic

        return logistic(shape, num_outputs, intercept=self.intercept)


class Linear(LinearSpec):
    """A linear model, which fits real targets if rows have them, and otherwise one-hot classes."""

    name: ClassVar[str] = "linear"
    regresses: ClassVar[bool] = True

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.linear import linear

        return linear(shape, num_outputs, intercept=self.intercept)

    def task(self) -> Task:
        from trainer.models.tasks import LEAST_SQUARES

        return LEAST_SQUARES


@dataclass(frozen=True)
class Perceptron(ModelSpec):
    name: ClassVar[str] = "perceptron"
    learning_rate: ClassVar[float] = 0.3
    stale_learning_rate: ClassVar[float] = 0.2
    stale_momentum: ClassVar[float] = 0.9

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.linear import perceptron

        return perceptron(shape, num_outputs)
