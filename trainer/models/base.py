"""What a model is to a run: its parameters as a spec, and the network that it makes for the images of a shard set."""

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


@dataclass(frozen=True)
class ModelInput:
    """What a shard set offers a model. shape: (channels, height, width); has_targets: rows carry a real number to be
    predicted; has_labels: they carry a class."""

    shape: tuple[int, int, int]
    num_classes: int
    has_targets: bool = False
    has_labels: bool = True


@dataclass(frozen=True)
class ModelSpec(Spec):
    """One file a family of models. A spec loads torch only when it makes something, so that --help does not.

    regresses: the model fits rows' targets where rows have them; learning_rate: that of a single process that learns in few
    epochs with momentum 0.9, where the gradients of an update are fresh; stale_learning_rate, stale_momentum: where they
    may be stale."""

    learning_rate: ClassVar[float] = 0.02
    stale_learning_rate: ClassVar[float] = 0.01
    stale_momentum: ClassVar[float] = 0.95
    regresses: ClassVar[bool] = False

    @abstractmethod
    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        """The network for images of a shape, drawn from torch's generator. Raises UsageError where it cannot be."""

    def task(self) -> Task:
        """What the network's outputs mean."""
        from trainer.models.tasks import CLASSIFICATION

        return CLASSIFICATION


def norm_option() -> Norm:
    """The kind of normalisation layers, as an option of a spec."""
    kind: Norm = option(
        "batch", "normalisation layers: group has no running statistics, which helps where shards are skewed"
    )
    return kind
