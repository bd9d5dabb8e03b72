"""The auto-encoder of RCD-SGD (He and Dube 2023, Table 1), whose vectors of images are close for similar images.

Two entries of the printed table are impossible and are corrected here: a residual block of 9 channels among blocks of 8
(8 here), and residual blocks of stride 2 in the decoder (stride 1 here), which would enlarge each side of an image by
2^7, or by 2^5 if each row of the table is one block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALVINGS = 3
CODE = 4  # channels of the vector


def side_after_convolutions(size: int, times: int) -> int:
    """Return the side of an image after ``times`` convolutions of stride 2."""
    for _ in range(times):
        size = (size + 1) // 2
    return size


def code_length(shape: tuple[int, int, int]) -> int:
    """Return the length of the vector of an image of a shape (channels, height, width): 64 for 32x32."""
    _, height, width = shape
    return CODE * side_after_convolutions(height, HALVINGS) * side_after_convolutions(width, HALVINGS)


class _NormalisedConv(nn.Module):
    """A convolution, BatchNorm and ReLU."""

    def __init__(self, conv: nn.Module, channels: int) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class _Residual(nn.Module):
    """Two 3x3 convolutions added to the identity, then a ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _NormalisedConv(_conv(channels, channels, 1), channels)
        self.conv = _conv(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(self.first(x))) + x, inplace=True)


def _conv(before: int, channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)


def _enlarging(before: int, channels: int, size: tuple[int, int], *, bias: bool = False) -> nn.ConvTranspose2d:
    """Return a transposed 3x3 convolution to ``size``: twice the height and width, or one less."""
    odd = (1 - size[0] % 2, 1 - size[1] % 2)
    return nn.ConvTranspose2d(before, channels, 3, 2, padding=1, output_padding=odd, bias=bias)


def _stage(conv: nn.Module, channels: int, residuals: int) -> nn.Sequential:
    return nn.Sequential(_NormalisedConv(conv, channels), *(_Residual(channels) for _ in range(residuals)))


class AutoEncoder(nn.Module):
    """The network: images_NCHW of any size -> images of the same shape. ``encode``: -> float32 [N, code_length].

    0.35 M parameters for colour images. torch's default initialisation, except that the last convolution is zero, so
    that training starts at the mean image. Vectors are not negative, because they come from a ReLU. A forward pass of a
    32x32 image takes 83 M multiplications."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = image_shape
        half, quarter = ((side_after_convolutions(height, n), side_after_convolutions(width, n)) for n in (1, 2))
        self.encoder = nn.Sequential(
            # Three stages halve the image.
            _stage(_conv(channels, 64, 2), 64, 2),
            _stage(_conv(64, 16, 2), 16, 2),
            _stage(_conv(16, 8, 2), 8, 2),
            _stage(_conv(8, CODE, 1), CODE, 1),
        )
        # Zero weights, so that the first reconstruction is the mean image.
        last = _enlarging(64, channels, (height, width), bias=True)
        nn.init.zeros_(last.weight)
        assert last.bias is not None
        nn.init.zeros_(last.bias)
        self.decoder = nn.Sequential(
            _Residual(CODE),
            _stage(_conv(CODE, 8, 1), 8, 2),
            _stage(_enlarging(8, 16, quarter), 16, 2),
            _stage(_enlarging(16, 64, half), 64, 2),
            last,
        )

    def encode(self, images_NCHW: Tensor) -> Tensor:
        code: Tensor = self.encoder(images_NCHW.contiguous(memory_format=torch.channels_last))
        return code.flatten(1)  # in the order (channel, row, column)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        images: Tensor = self.decoder(self.encoder(images_NCHW.contiguous(memory_format=torch.channels_last)))
        return images
