"""ResNet-50 (He et al. 2016, table 1): bottleneck blocks, with a stem for small images.

The published stem, a 7x7 convolution of stride 2 and max pooling of stride 2, would leave 8x8 pixels of a 32x32 image
before the first block and a single one after the last. The stem here is that of section 4.2, one 3x3 convolution of
stride 1, so that the last block sees 4x4 pixels. A block halves height and width in its 3x3 convolution, as torchvision
does, not in its first 1x1 convolution, which would ignore three quarters of its input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.base import Norm
from trainer.models.networks.resnet import StagedNetwork, convolution, initialise, normalisation

STEM = 64  # channels
WIDTHS = (64, 128, 256, 512)  # channels of the 3x3 convolutions in each stage
BLOCKS = (3, 4, 6, 3)
EXPANSION = 4  # channels of a block's output per channel of its 3x3 convolution


def _norm_layer(channels: int, norm: Norm) -> nn.Module:
    return normalisation(norm, channels, momentum=0.1)


class _Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution added to a shortcut, then a ReLU (version 1).

    The shortcut is the identity, or a 1x1 convolution and normalisation if channels or size change (option B).

    Args:
        before: channels of the input.
        width: channels of the 3x3 convolution; the output has four times as many.
        stride: of the 3x3 convolution; 2 halves height and width.
        norm: kind of the normalisation layers.
    """

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        channels = EXPANSION * width
        self.conv1 = convolution(before, width, 1, 1)
        self.norm1 = _norm_layer(width, norm)
        self.conv2 = convolution(width, width, 3, stride)
        self.norm2 = _norm_layer(width, norm)
        self.conv3 = convolution(width, channels, 1, 1)
        self.norm3 = _norm_layer(channels, norm)
        self.shortcut: nn.Module = nn.Identity()
        if (before, stride) != (channels, 1):
            self.shortcut = nn.Sequential(convolution(before, channels, 1, stride), _norm_layer(channels, norm))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


def _stage(before: int, width: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
    rest = (_Bottleneck(EXPANSION * width, width, 1, norm) for _ in range(blocks - 1))
    return nn.Sequential(_Bottleneck(before, width, stride, norm), *rest)


class BottleneckResNet(StagedNetwork):
    """The network: images_NCHW of any size -> logits [N, num_classes].

    23.5 M parameters for ten classes. A forward pass of a 32x32 image takes 1.3 G multiplications. Initialisation as in
    networks/resnet.py. Running statistics have a momentum of 0.1, torch's default."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, *, norm: Norm = "batch") -> None:
        super().__init__()
        self.conv = convolution(image_shape[0], STEM, 3, 1)
        self.norm = _norm_layer(STEM, norm)
        befores = (STEM, *(EXPANSION * width for width in WIDTHS))
        # The first stage keeps the size, because the stem has not reduced it yet.
        stages = zip(befores, WIDTHS, BLOCKS, (1, 2, 2, 2), strict=False)
        self.stages = nn.Sequential(*(_stage(*stage, norm) for stage in stages))
        self.fc = nn.Linear(EXPANSION * WIDTHS[-1], num_classes)
        self.apply(initialise)
