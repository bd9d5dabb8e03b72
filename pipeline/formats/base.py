"""What a layout must offer, and the plain data that passes between a layout and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.storage import FileInfo, Store

CIFAR_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Layout:
    """shape: (channels, height, width). num_classes: labels lie in [0, num_classes); None means any label >= 0."""

    shape: tuple[int, int, int]
    num_classes: int | None = None
    coarse: int | None = None  # number of coarse classes, where rows carry a coarse label beside the fine one

    def describe(self) -> str:
        size = "x".join(map(str, self.shape))
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        return f"{size} images{classes}" + (" with coarse labels" if self.coarse else "")


@dataclass(frozen=True)
class DataFile:
    path: str
    bytes: int
    modified_ms: int
    rows: int


@dataclass(frozen=True)
class Columns:
    """labels, coarse_labels, neighbourhoods: int32 [rows]; images: uint8 [rows, C*H*W], planar."""

    labels: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8] | None
    coarse_labels: npt.NDArray[np.int32] | None = None
    neighbourhoods: npt.NDArray[np.int32] | None = None


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
