"""The convolutional network of DataGossip's experiments, as ``--model trainer.models.networks.datagossip:network``.

Wenig and Papenbrock, "DataGossip: A Data Exchange Extension for Distributed Machine Learning Algorithms", EDBT 2022. The
layers come from the authors' program."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.core.errors import UsageError
from trainer.models.networks.dropout import Dropout

SMALLEST_IMAGE = 20  # side that leaves a pixel after two unpadded 5x5 convolutions and three halvings


class DataGossipNet(nn.Module):
    """The network: images_NCHW of at least 20x20 -> logits [N, num_classes].

    Three convolutions with max pooling, of which the third drops whole channels, and two dense layers. 13,460 parameters
    for grey images of 32x32 and ten classes; 28x28 have as many. torch's default initialisation."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        channels, height, width = image_shape
        if min(height, width) < SMALLEST_IMAGE:
            side = f"{SMALLEST_IMAGE}x{SMALLEST_IMAGE}"
            raise UsageError(
                f"DataGossip's network needs images of {side} or more, these are {height}x{width}: use cnn"
            )
        super().__init__()
        # Pooling comes before ReLU: the two commute, and after pooling only a quarter of the elements is left.
        self.features = nn.Sequential(
            nn.Conv2d(channels, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(10, 20, 5),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(20, 20, 3, padding=1),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.ReLU(inplace=True),
        )
        features = 20 * _side_after(height) * _side_after(width)
        self.head = nn.Sequential(
            nn.Linear(features, 50), nn.ReLU(inplace=True), Dropout(0.5), nn.Linear(50, num_classes)
        )

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x = self.features(images_NCHW)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def _side_after(side: int) -> int:
    """Return the side of the third layer's output for an image of a side."""
    for convolution in (5, 5, 1):  # the third is padded, so that it keeps the side
        side = (side - convolution + 1) // 2
    return side


def network(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the network for the images of a shard set. Raises UsageError for images below 20x20."""
    return DataGossipNet(image_shape, num_classes)
