"""ResNet-50 (He et al. 2016, table 1) for small images, such as those of CIFAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.models.base import ModelSpec, Norm, norm_option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ResNet50(ModelSpec):
    """ResNet-50 with a stem of one 3x3 convolution, for which 32x32 images need not be enlarged."""

    name: ClassVar[str] = "resnet50"
    learning_rate: ClassVar[float] = 0.1
    stale_learning_rate: ClassVar[float] = 0.025
    norm: Norm = norm_option()

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.bottleneck import BottleneckResNet

        return BottleneckResNet(shape, num_outputs, norm=self.norm)
