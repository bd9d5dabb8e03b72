"""Images in memory-mapped files: read from the disk, or from the system's cache of it, when they are selected."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints

Pixels: TypeAlias = npt.NDArray[np.uint8 | np.float32]

AHEAD_BYTES = 16 << 20  # of images that are asked for at once, so that none is dropped before it is read


@dataclass(frozen=True)
class MappedFile:
    """The images of a memory-mapped file.

    The system is told that rows are read in any order. It would otherwise read neighbours of every row as well, and drop
    other rows for them.

    Attributes:
        images: [rows, C, H, W], in the mapping.
        data: the mapping; None for an array that is not mapped.
        offset: byte of the mapping at which the images begin.
    """

    images: Pixels
    data: mmap.mmap | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.data is not None:
            self.data.madvise(mmap.MADV_RANDOM, self.offset // mmap.PAGESIZE * mmap.PAGESIZE)

    def ask_for(self, rows: Ints) -> None:
        """Have the system read some rows, without waiting for them. rows: int64, each a row of the file."""
        if self.data is not None:
            for first, end in self._pages(rows):
                self.data.madvise(mmap.MADV_WILLNEED, first, end - first)

    def _pages(self, rows: Ints) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of each stretch of pages that hold some rows."""
        row_bytes = self.images.itemsize * math.prod(self.images.shape[1:])
        starts = self.offset + np.unique(rows) * row_bytes
        firsts = starts // mmap.PAGESIZE * mmap.PAGESIZE
        ends = -(-(starts + row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        cuts = np.flatnonzero(firsts[1:] > ends[:-1])
        yield from zip(firsts[[0, *(cuts + 1)]].tolist(), ends[[*cuts, -1]].tolist(), strict=True)


class MappedImages:
    """Images of some files as one array, of which no row is in this process's memory until it is selected.

    The system is asked for all rows of a selection before the first is read, so that the disk has them all to read at once.

    Attributes:
        shape: [N, C, H, W].
        dtype: uint8 or float32.
        nbytes: size of all N images, in bytes.

    Args:
        parts: the files, at least one.
        places: positions of the N images among the rows of all files, int64; None for all rows in order.
    """

    def __init__(self, parts: Sequence[MappedFile], places: Ints | None = None) -> None:
        self.parts = tuple(parts)
        self.places = places
        self._ends = np.cumsum([len(part.images) for part in self.parts])
        count = int(self._ends[-1]) if places is None else len(places)
        self._count = count
        first = self.parts[0].images
        self.shape = (count, *first.shape[1:])
        self.dtype = first.dtype
        self.nbytes = count * first.itemsize * math.prod(self.shape[1:])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: Ints | slice) -> Pixels:
        """Return a copy of the images at some places, in memory. O(places)."""
        numbers = self._numbers(places)
        images: Pixels = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        step = max(1, AHEAD_BYTES // (self.dtype.itemsize * math.prod(self.shape[1:])))
        for begin in range(0, len(numbers), step):
            self._read(numbers[begin : begin + step], images[begin : begin + step])
        return images

    def _read(self, numbers: Ints, images: Pixels) -> None:
        """Copy images into an array. numbers: positions among the rows of all files, int64."""
        files = np.searchsorted(self._ends, numbers, side="right")
        selections = []
        for file in np.unique(files).tolist():
            part = self.parts[file]
            places = np.flatnonzero(files == file)
            rows = numbers[places] - (self._ends[file] - len(part.images))
            part.ask_for(rows)
            selections.append((part, places, rows))
        for part, places, rows in selections:
            images[places] = part.images[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return a copy of all images, in memory, for functions of numpy."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def view(self, places: Ints | slice) -> MappedImages:
        """Return the images at some places, which stay in the files."""
        return MappedImages(self.parts, self._numbers(places))

    def followed_by(self, others: MappedImages) -> MappedImages:
        """Return these images, followed by others, which all stay in the files."""
        parts = (*self.parts, *others.parts)
        if self.places is None and others.places is None:
            return MappedImages(parts)
        second = others._numbers(slice(None)) + int(self._ends[-1])
        return MappedImages(parts, np.concatenate([self._numbers(slice(None)), second]))

    def _numbers(self, places: Ints | slice) -> Ints:
        """Return the positions of the images at some places among the rows of all files, int64."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        # A negative position would be another file's row.
        elif len(places) and (int(places.min()) < 0 or int(places.max()) >= len(self)):
            raise IndexError(f"places {places.min()} to {places.max()} of {len(self)} images")
        return places if self.places is None else self.places[places]


Images: TypeAlias = Pixels | MappedImages


def join_images(parts: Sequence[Images]) -> Images:
    """Return the images of some parts, one after the other: in memory, unless the first part is mapped, as all are."""
    first = parts[0]
    if not isinstance(first, MappedImages):
        return np.concatenate(parts)
    for part in parts[1:]:
        assert isinstance(part, MappedImages), "rows of one run are stored alike"
        first = first.followed_by(part)
    return first
