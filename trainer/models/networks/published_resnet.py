"""ResNet-18, -34 and -50 (He et al. 2016, table 1), with a stem for small images or with the published one.

The published stem, a 7x7 convolution of stride 2 and max pooling of stride 2, leaves 8x8 pixels of a 32x32 image before
the first block and a single one after the last. The stem for small images is that of section 4.2, one 3x3 convolution of
stride 1, with which the last block sees 4x4 pixels. A bottleneck block halves height and width in its 3x3 convolution, as
torchvision does, not in its first 1x1 convolution, which would ignore three quarters of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.base import Norm, Stem
from trainer.models.networks.resnet import StagedNetwork, convolution, initialise, normalisation

STEM = 64  # channels
WIDTHS = (64, 128, 256, 512)  # channels of the 3x3 convolutions in each stage


def _shortcut(before: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    """Return the identity, or a 1x1 convolution and normalisation if channels or size change (option B)."""
    if (before, stride) == (channels, 1):
        return nn.Identity()
    return nn.Sequential(convolution(before, channels, 1, stride), normalisation(norm, channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions added to a shortcut, then a ReLU (version 1).

    Args:
        before: channels of the input.
        width: channels of the output.
        stride: of the first convolution; 2 halves height and width.
        norm: kind of the normalisation layers.
    """

    expansion: ClassVar[int] = 1

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = convolution(before, width, 3, stride)
        self.norm1 = normalisation(norm, width)
        self.conv2 = convolution(width, width, 3, 1)
        self.norm2 = normalisation(norm, width)
        self.shortcut = _shortcut(before, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution added to a shortcut, then a ReLU (version 1).

    Args:
        before: channels of the input.
        width: channels of the 3x3 convolution; the output has four times as many.
        stride: of the 3x3 convolution; 2 halves height and width.
        norm: kind of the normalisation layers.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        channels = self.expansion * width
        self.conv1 = convolution(before, width, 1, 1)
        self.norm1 = normalisation(norm, width)
        self.conv2 = convolution(width, width, 3, stride)
        self.norm2 = normalisation(norm, width)
        self.conv3 = convolution(width, channels, 1, 1)
        self.norm3 = normalisation(norm, channels)
        self.shortcut = _shortcut(before, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


class PublishedResNet(StagedNetwork):
    """The network: images_NCHW of any size -> logits [N, num_classes].

    11.2, 21.3 and 23.5 M parameters for ten classes. A forward pass of a 32x32 image takes 0.56, 1.2 and 1.3 G
    multiplications with the small stem, and a sixteenth of them with the published one. Initialisation as in
    networks/resnet.py. Running statistics have a momentum of 0.1, torch's default.

    Args:
        image_shape: (channels, height, width).
        num_classes: number of logits.
        block: kind of the blocks.
        blocks: their number in each stage.
        stem: "3x3" for small images, "7x7" as published.
        norm: kind of the normalisation layers.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        stem: Stem = "3x3",
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        is_published = stem == "7x7"
        self.conv = convolution(image_shape[0], STEM, 7 if is_published else 3, 2 if is_published else 1)
        self.norm = normalisation(norm, STEM)
        self.pools = is_published
        before = STEM
        stages = []
        # The first stage keeps the size.
        for width, count, stride in zip(WIDTHS, blocks, (1, 2, 2, 2), strict=True):
            after = block.expansion * width
            inputs = [(before, stride), *[(after, 1)] * (count - 1)]
            stages.append(nn.Sequential(*(block(channels, width, step, norm) for channels, step in inputs)))
            before = after
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(before, num_classes)
        self.apply(initialise)

    def begin(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, stride=2, padding=1) if self.pools else x
