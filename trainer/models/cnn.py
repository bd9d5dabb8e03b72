"""The small convolutional network of the CIFAR experiments, for quick runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.models.base import ModelSpec, Norm, norm_option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class CNN(ModelSpec):
    """A convolutional network for images of at least 8x8."""

    name: ClassVar[str] = "cnn"
    norm: Norm = norm_option()

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.cnn import ConvNet

        return ConvNet(shape, num_outputs, norm=self.norm)
