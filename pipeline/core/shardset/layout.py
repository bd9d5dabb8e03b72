"""The layout of images: their shape, type and labels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

CIFAR_SHAPE = (3, 32, 32)
MAX_IMAGE_BYTES = 1 << 28
MAX_CLASSES = 65_536  # histograms are dense
Dtype = Literal["uint8", "float32"]


@dataclass(frozen=True)
class KeptColumn:
    """A column of the input that travels into the shards. name: its name; type: its Arrow type, as text."""

    name: str
    type: str


@dataclass(frozen=True)
class Layout:
    """The layout of the rows of a data set.

    Attributes:
        shape: (channels, height, width); d real-valued features are (d, 1, 1) in float32.
        num_classes: labels are in [0, num_classes); None: any label >= 0.
        coarse: number of coarse classes if rows have a coarse label beside the fine one, else None.
        dtype: type of the numbers of an image.
        targets: whether rows have a real number to be predicted.
        labelled: whether rows have a label; without labels all rows count as class 0.
        column: column of vectors that are read instead of images (input/vectors.py), or None.
        attributes: further columns of the input that are read with every row: the only place that lists them.
        class_names: name of each class, by its number; empty if they are unknown.
        named_labels: whether the files hold names of classes instead of numbers; class_names then numbers them.
    """

    shape: tuple[int, int, int]
    num_classes: int | None = None
    coarse: int | None = None
    dtype: Dtype = "uint8"
    targets: bool = False
    labelled: bool = True
    column: str | None = None
    attributes: tuple[KeptColumn, ...] = ()
    class_names: tuple[str, ...] = ()
    named_labels: bool = False

    @property
    def record_bytes(self) -> int:
        """The size of an image in bytes."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 1)

    def describe(self) -> str:
        """Return the layout in words, such as ``3x32x32 images of 10 classes``, for messages."""
        size = "x".join(map(str, self.shape))
        kind = "images" if self.dtype == "uint8" else f"images of {self.dtype}"
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        beside = " with coarse labels" * bool(self.coarse) + " with targets" * self.targets
        beside += " with names as labels" * self.named_labels
        names = "".join(f" with {column.name} of {column.type}" for column in self.attributes)
        return f"{size} {kind}{classes if self.labelled else ' without labels'}{beside}{names}"

    def drop_labels(self) -> Layout:
        return replace(self, num_classes=1, coarse=None, labelled=False, class_names=(), named_labels=False)
