"""The wide ResNets WRN-d-k (Zagoruyko and Komodakis 2016): d layers, k times as wide as a CIFAR ResNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.models.base import ModelSpec, Norm, norm_option

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class WideResNetSpec(ModelSpec):
    """A wide ResNet.

    depth: d = 6m + 4 layers, for m blocks per group; the shortcuts' convolutions are not counted. width: k."""

    learning_rate: ClassVar[float] = 0.1
    stale_learning_rate: ClassVar[float] = 0.025
    depth: ClassVar[int]
    width: ClassVar[int]
    norm: Norm = norm_option()

    def make(self, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
        from trainer.models.networks.wide_resnet import WideResNet

        return WideResNet(shape, num_outputs, blocks=(self.depth - 4) // 6, width=self.width, norm=self.norm)


class WideResNet16x4(WideResNetSpec):
    name: ClassVar[str] = "wrn16_4"
    depth: ClassVar[int] = 16
    width: ClassVar[int] = 4


class WideResNet28x10(WideResNetSpec):
    name: ClassVar[str] = "wrn28_10"
    depth: ClassVar[int] = 28
    width: ClassVar[int] = 10
