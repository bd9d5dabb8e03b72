"""What a layout must offer, and the plain data that passes between a layout and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store

BLOCK_ROWS = 2048  # the most rows of a block
BLOCK_BYTES = 64 << 20  # the most bytes of its images, but for a block of one row: Arrow's offsets end at 2 GiB


def block_rows(record_bytes: int) -> int:
    """The most rows of a block of images of so many bytes each."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, record_bytes)))


@dataclass(frozen=True)
class DataFile:
    """A file of an input as its survey found it.

    decode_rows: how many rows are decoded together and kept for later passes (input/decoded.py); 0 where reading any
    range costs what its bytes cost. label: of all rows, where not they but a folder of a partition tells it. encoded: the
    images are files such as PNG. channels: of the images as the format reads them, where --channels is given; image files
    are converted to as many, other images after they are read (input/converted.py)."""

    path: str
    bytes: int
    modified_ms: int
    rows: int
    decode_rows: int = 0
    label: int | None = None
    change: str = ""  # see FileInfo
    encoded: bool = False
    channels: int | None = None


@dataclass(frozen=True)
class Columns:
    """labels, coarse_labels, neighbourhoods: int32 [rows]; targets: float32 [rows]; images: uint8 [rows, bytes], planar,
    the bytes of C*H*W numbers."""

    labels: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8] | None
    coarse_labels: npt.NDArray[np.int32] | None = None
    neighbourhoods: npt.NDArray[np.int32] | None = None
    targets: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Format(ABC):
    """A layout. Members hold no state, so that tasks may have them; ``shape`` is what --image-shape declares, or None."""

    name: ClassVar[str]
    summary: ClassVar[str]  # what a file of it is, for the line that refuses one of no known layout
    opens: ClassVar[bool]  # whether a survey must open the file, so belongs into a task
    seeks: ClassVar[bool] = False  # whether any record can be read without those before it
    may_be_empty: ClassVar[bool] = False  # whether a file without rows among others is ordinary, as Spark writes them
    locates_damage: ClassVar[bool] = (
        False  # whether the survey of a file that is not recognised says where it breaks off
    )

    @abstractmethod
    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """Whether a file that begins with ``head`` (up to 256 KiB) has this layout."""

    def resembles(self, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """Whether a file that no layout recognises begins like one of this: then the survey says where it breaks off."""
        return False

    @abstractmethod
    def survey(self, store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> tuple[DataFile, Layout]:
        """Rows and layout of one file, reading as little as the layout allows. Raises DataError."""

    @abstractmethod
    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Records start <= r < stop of one file in blocks of at most ``block_rows`` rows. Raises DataError."""

    def where(self, file: DataFile, record: int, layout: Layout) -> str:
        """The place of one record, for an error line."""
        return f"{file.path}, row {record}"
