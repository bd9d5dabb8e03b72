"""Wide residual networks (Zagoruyko and Komodakis 2016) with blocks B(3,3), without dropout.

The first block of each group applies its 1x1 shortcut to the normalised and activated input, as the authors' code does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.base import Norm
from trainer.models.networks.resnet import convolution, initialise, normalisation

STEM = 16  # channels
WIDTHS = (16, 32, 64)  # channels of the three groups, before they are widened


class _WideBlock(nn.Module):
    """Twice normalisation, ReLU and a 3x3 convolution, added to a shortcut (pre-activation).

    The shortcut is the input, or a 1x1 convolution of the activated input if channels or size change.

    Args:
        before: channels of the input.
        channels: channels of the output.
        stride: of the first convolution; 2 halves height and width.
        norm: kind of the normalisation layers.
    """

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = normalisation(norm, before)
        self.conv1 = convolution(before, channels, 3, stride)
        self.norm2 = normalisation(norm, channels)
        self.conv2 = convolution(channels, channels, 3, 1)
        is_same = (before, stride) == (channels, 1)
        self.shortcut = None if is_same else convolution(before, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x), inplace=True)
        y: Tensor = self.conv2(F.relu(self.norm2(self.conv1(activated)), inplace=True))
        return y.add_(x if self.shortcut is None else self.shortcut(activated))


def _group(before: int, channels: int, stride: int, blocks: int, norm: Norm) -> nn.Sequential:
    rest = (_WideBlock(channels, channels, 1, norm) for _ in range(blocks - 1))
    return nn.Sequential(_WideBlock(before, channels, stride, norm), *rest)


class WideResNet(nn.Module):
    """The network: images_NCHW of any size -> logits [N, num_classes].

    Three groups of ``blocks`` blocks have 16, 32 and 64 times ``width`` channels; groups 2 and 3 halve height and width.
    For ten classes, WRN-16-4 has 2.7 M parameters and WRN-28-10 36.5 M; a forward pass of a 32x32 image takes 0.4 and
    5.2 G multiplications. Initialisation as in networks/resnet.py. Running statistics have a momentum of 0.1, torch's
    default, as in the authors' code."""

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, *, blocks: int, width: int, norm: Norm = "batch"
    ) -> None:
        super().__init__()
        widths = [width * channels for channels in WIDTHS]
        self.conv = convolution(image_shape[0], STEM, 3, 1)
        groups = zip((STEM, *widths), widths, (1, 2, 2), strict=False)
        self.groups = nn.Sequential(*(_group(*group, blocks, norm) for group in groups))
        # The blocks end without an activation, so the last one is here.
        self.norm = normalisation(norm, widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        self.apply(initialise)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x = images_NCHW.contiguous(memory_format=torch.channels_last)
        x = F.relu(self.norm(self.groups(self.conv(x))), inplace=True)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
