"""The interface of models: parameters as a spec, and a method that makes the network for the images of a set."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipeline.core.specs import Spec, option

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.tasks import Task

Norm = Literal["batch", "group"]
Shortcut = Literal["pad", "conv"]
Stem = Literal["3x3", "7x7"]


@dataclass(frozen=True)
class ModelInput:
    """The properties of a shard set that a model depends on.

    Attributes:
        shape: (channels, height, width) of an image.
        num_classes: number of classes.
        has_targets: whether rows have a real-valued target.
        has_labels: whether rows have a class.
    """

    shape: tuple[int, int, int]
    num_classes: int
    has_targets: bool = False
    has_labels: bool = True


@dataclass(frozen=True)
class ModelSpec(Spec):
    """The base class of models, with one file per family. Specs load torch only to make a network, not for --help.

    Attributes:
        learning_rate: default single-process rate for fresh gradients: for short trainings with momentum 0.9.
        stale_learning_rate: default single-process rate if gradients may be stale.
        stale_momentum: default momentum if gradients may be stale.
        regresses: whether the model fits real targets, if rows have them.
    """

    learning_rate: ClassVar[float] = 0.02
    stale_learning_rate: ClassVar[float] = 0.01
    stale_momentum: ClassVar[float] = 0.95
    regresses: ClassVar[bool] = False

    @abstractmethod
    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        """Return a network for images of a shape, initialised from torch's generator.

        Raises UsageError for shapes that the model does not support."""

    def task(self) -> Task:
        """Return the task, which defines the meaning of the network's outputs."""
        from trainer.models.tasks import CLASSIFICATION

        return CLASSIFICATION


def norm_option() -> Norm:
    """Return the option for the kind of normalisation layers."""
    kind: Norm = option(
        "batch", "normalisation layers; group has no running statistics, which helps if shards are skewed"
    )
    return kind
