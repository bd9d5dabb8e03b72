"""ResNet-18, ResNet-34 and ResNet-50 (He et al. 2016, table 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.specs import option
from trainer.models.base import ModelSpec, Norm, Stem, norm_option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _PublishedResNet(ModelSpec):
    """A ResNet of table 1; subclasses set its blocks."""

    learning_rate: ClassVar[float] = 0.1
    stale_learning_rate: ClassVar[float] = 0.025
    blocks: ClassVar[tuple[int, ...]]
    is_bottleneck: ClassVar[bool] = False
    norm: Norm = norm_option()
    stem: Stem = option(
        "3x3",
        "first layers: 3x3 keeps the size of small images; 7x7 with stride 2 and max pooling is the published stem, for"
        " images of ImageNet's size",
    )

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.published_resnet import BasicBlock, Bottleneck, PublishedResNet

        block = Bottleneck if self.is_bottleneck else BasicBlock
        return PublishedResNet(shape, num_outputs, block=block, blocks=self.blocks, stem=self.stem, norm=self.norm)


@dataclass(frozen=True)
class ResNet18(_PublishedResNet):
    """ResNet-18, with a stem of one 3x3 convolution unless --stem says otherwise."""

    name: ClassVar[str] = "resnet18"
    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)


@dataclass(frozen=True)
class ResNet34(_PublishedResNet):
    """ResNet-34, with a stem of one 3x3 convolution unless --stem says otherwise."""

    name: ClassVar[str] = "resnet34"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True)
class ResNet50(_PublishedResNet):
    """ResNet-50, with a stem of one 3x3 convolution unless --stem says otherwise."""

    name: ClassVar[str] = "resnet50"
    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    is_bottleneck: ClassVar[bool] = True
