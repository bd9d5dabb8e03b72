"""ResNet-(6m+2) for small images (He et al. 2016, section 4.2), with the details of TensorFlow's official model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.base import Norm, Shortcut

WIDTHS = (16, 32, 64)  # channels of the three stages
GROUPS = 8  # of GroupNorm; divides every width


def normalisation(kind: Norm, channels: int, momentum: float = 0.1) -> nn.Module:
    """Return a normalisation layer. momentum: weight of a new batch in running statistics, which only BatchNorm has."""
    if kind == "group":
        return nn.GroupNorm(GROUPS, channels)
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=momentum)


def _norm_layer(channels: int, norm: Norm) -> nn.Module:
    return normalisation(norm, channels, momentum=0.003)


def convolution(before: int, channels: int, size: int, stride: int) -> nn.Conv2d:
    """Return a convolution without bias, whose padding keeps height and width for stride 1."""
    return nn.Conv2d(before, channels, size, stride, padding=size // 2, bias=False)


class _Pad(nn.Module):
    """The shortcut of option A: every stride-th pixel, with half of the additional channels as zeros on either side.

    before, channels: channels of the input and of the output."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = (channels - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))


def _shortcut(kind: Shortcut, before: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    """Return the shortcut of a first block; with "pad" the identity if neither channels nor size change."""
    if kind == "conv":
        return nn.Sequential(convolution(before, channels, 1, stride), _norm_layer(channels, norm))
    return nn.Identity() if (before, stride) == (channels, 1) else _Pad(before, channels, stride)


class _Block(nn.Module):
    """Two 3x3 convolutions added to a shortcut, then a ReLU (version 1).

    Args:
        before: channels of the input.
        channels: channels of the output.
        stride: of the first convolution; 2 halves height and width.
        norm: kind of the normalisation layers.
        shortcut: maps the input to the shape of the output.
    """

    def __init__(self, before: int, channels: int, stride: int, norm: Norm, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = convolution(before, channels, 3, stride)
        self.norm1 = _norm_layer(channels, norm)
        self.conv2 = convolution(channels, channels, 3, 1)
        self.norm2 = _norm_layer(channels, norm)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


def _stage(before: int, channels: int, stride: int, blocks: int, norm: Norm, shortcut: Shortcut) -> nn.Sequential:
    first = _Block(before, channels, stride, norm, _shortcut(shortcut, before, channels, stride, norm))
    return nn.Sequential(first, *(_Block(channels, channels, 1, norm, nn.Identity()) for _ in range(blocks - 1)))


class StagedNetwork(nn.Module):
    """The forward pass of a network of a stem, stages of blocks, and a fully connected layer; subclasses set the layers.

    Attributes:
        conv, norm: the stem.
        stages: of the blocks, which add to their input.
        fc: computes the logits from the means over height and width.
    """

    conv: nn.Conv2d
    norm: nn.Module
    stages: nn.Sequential
    fc: nn.Linear

    def forward(self, images_NCHW: Tensor) -> Tensor:
        # channels_last takes a quarter less time on a CPU. torch converts the weights at next to no cost.
        x = images_NCHW.contiguous(memory_format=torch.channels_last)
        x = self.begin(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: Tensor = self.fc(self.stages(x).mean(dim=(2, 3)))
        return logits

    def begin(self, x: Tensor) -> Tensor:
        """Return the input of the first block. x: output of the stem's convolution."""
        return x


class ResNet(StagedNetwork):
    """The network: images_NCHW of any size -> logits [N, num_classes].

    Three stages of ``blocks`` blocks have 16, 32 and 64 channels; stages 2 and 3 halve height and width. With shortcut
    "conv", the first block of each of the three stages has a 1x1 convolution and normalisation as its shortcut. With
    "pad", the first block of stages 2 and 3 has the padding of option A. All other shortcuts are the identity.
    Initialisation: He-normal convolutions, fully connected layer N(0, 0.01) with zero bias."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        blocks: int,
        norm: Norm = "batch",
        shortcut: Shortcut = "pad",
    ) -> None:
        super().__init__()
        self.conv = convolution(image_shape[0], WIDTHS[0], 3, 1)
        self.norm = _norm_layer(WIDTHS[0], norm)
        before_and_stride = zip((WIDTHS[0], *WIDTHS), WIDTHS, (1, 2, 2), strict=False)
        self.stages = nn.Sequential(
            *(_stage(b, w, stride, blocks, norm, shortcut) for b, w, stride in before_and_stride)
        )
        self.fc = nn.Linear(WIDTHS[-1], num_classes)
        self.apply(initialise)


def initialise(module: nn.Module) -> None:
    """Initialise one layer: He-normal for convolutions, N(0, 0.01) with zero bias for a fully connected layer."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
