"""The CIFAR ResNets (He et al. 2016, section 4.2): 6m + 2 layers in three stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.specs import option
from trainer.models.base import ModelSpec, Norm, Shortcut, norm_option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ResNetSpec(ModelSpec):
    """A CIFAR ResNet. blocks: m, the number of blocks per stage."""

    learning_rate: ClassVar[float] = 0.1
    stale_learning_rate: ClassVar[float] = 0.025
    blocks: ClassVar[int]
    norm: Norm = norm_option()
    shortcut: Shortcut = option(
        "pad", "shortcut of blocks that change the image size: zero padding, or a 1x1 convolution"
    )

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.resnet import ResNet

        return ResNet(shape, num_outputs, blocks=self.blocks, norm=self.norm, shortcut=self.shortcut)


class ResNet20(ResNetSpec):
    name: ClassVar[str] = "resnet20"
    blocks: ClassVar[int] = 3


class ResNet32(ResNetSpec):
    name: ClassVar[str] = "resnet32"
    blocks: ClassVar[int] = 5


class ResNet56(ResNetSpec):
    name: ClassVar[str] = "resnet56"
    blocks: ClassVar[int] = 9
