"""The small convolutional network of the CIFAR experiments' figure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.core.errors import UsageError
from trainer.models.base import Norm
from trainer.models.networks.dropout import Dropout
from trainer.models.networks.resnet import normalisation

WIDTHS = (32, 64, 128)
SMALLEST_IMAGE = 2 ** len(WIDTHS)  # side that three halvings reduce to one pixel


def _layer(before: int, channels: int, norm: Norm) -> nn.Sequential:
    """Return a layer: 3x3 convolution, 2x2 max pooling, ReLU, normalisation, dropout.

    ReLU and max pooling commute, and after pooling only a quarter of the elements is left. Running statistics have a
    momentum of 0.1: with the ResNets' 0.003 they would still contain their initial values after a few hundred steps."""
    return nn.Sequential(
        nn.Conv2d(before, channels, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        normalisation(norm, channels),
        Dropout(0.25),
    )


class ConvNet(nn.Module):
    """The network: images_NCHW of at least 8x8 -> logits [N, num_classes].

    0.36 M parameters for 32x32 colour images and ten classes. Widths and dropout rates are this project's choice,
    because the figure gives none. torch's default initialisation."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, *, norm: Norm = "batch") -> None:
        channels, height, width = image_shape
        if min(height, width) < SMALLEST_IMAGE:
            raise UsageError(f"--model cnn needs images of 8x8 or more, these are {height}x{width}: use perceptron")
        super().__init__()
        widths = (channels, *WIDTHS)
        self.features = nn.Sequential(*(_layer(b, w, norm) for b, w in zip(widths, WIDTHS, strict=False)))
        features = WIDTHS[-1] * (height // SMALLEST_IMAGE) * (width // SMALLEST_IMAGE)
        self.head = nn.Sequential(
            nn.Linear(features, 128), nn.ReLU(inplace=True), Dropout(0.5), nn.Linear(128, num_classes)
        )

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x = self.features(images_NCHW.contiguous(memory_format=torch.channels_last))
        logits: Tensor = self.head(x.flatten(1))
        return logits
