"""What a layout must offer, and the plain data that passes between a layout and the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.storage import FileInfo, Store

CIFAR_SHAPE = (3, 32, 32)
Dtype = Literal["uint8", "float32"]


@dataclass(frozen=True)
class Layout:
    """shape: (channels, height, width); d real-valued features are (d, 1, 1) in float32. num_classes: labels lie in
    [0, num_classes); None means any label >= 0. targets: rows carry a real number to be predicted."""

    shape: tuple[int, int, int]
    num_classes: int | None = None
    coarse: int | None = None  # number of coarse classes, where rows carry a coarse label beside the fine one
    dtype: Dtype = "uint8"
    targets: bool = False

    @property
    def record_bytes(self) -> int:
        """Of one image."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 1)

    def describe(self) -> str:
        size = "x".join(map(str, self.shape))
        kind = "images" if self.dtype == "uint8" else f"images of {self.dtype}"
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        beside = " with coarse labels" * bool(self.coarse) + " with targets" * self.targets
        return f"{size} {kind}{classes}{beside}"


@dataclass(frozen=True)
class DataFile:
    path: str
    bytes: int
    modified_ms: int
    rows: int


@dataclass(frozen=True)
class Columns:
    """labels, coarse_labels, neighbourhoods: int32 [rows]; targets: float32 [rows]; images: uint8 [rows, bytes], planar,
    the bytes of C*H*W numbers."""

    labels: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8] | None
    coarse_labels: npt.NDArray[np.int32] | None = None
    neighbourhoods: npt.NDArray[np.int32] | None = None
    targets: npt.NDArray[np.float32] | None = None


class Format(Protocol):
    @property
    def opens(self) -> bool:
        """Whether a survey must open the file, so belongs into a task."""

    @property
    def may_be_empty(self) -> bool:
        """Whether a file without rows among others is ordinary, as Spark writes them."""

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """Whether a file that begins with ``head`` (up to 256 KiB) has this layout."""

    def survey(self, store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> tuple[DataFile, Layout]:
        """Rows and layout of one file, reading as little as the layout allows. Raises DataError."""

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Records start <= r < stop of one file in blocks of at most 2,048. Raises DataError."""

    def where(self, file: DataFile, record: int, layout: Layout) -> str:
        """The place of one record, for an error line."""
