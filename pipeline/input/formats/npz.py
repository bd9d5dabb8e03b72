"""Archives of numpy arrays (.npz), as numpy.savez and savez_compressed write them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.npz import ArrayHeader, read_array, read_header
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES, Layout
from pipeline.core.shardset.schema import no_labels, words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import Columns, DataFile, Format, block_rows

IMAGE_ARRAYS = ("images", "x", "data")
LABEL_ARRAYS = ("labels", "y", "label")
ZIP_SIGNATURE = b"PK\x03\x04"
NAME_PLACE = 30  # of the first member's name, in bytes from the start of the archive
MOST_INFLATION = 1032  # bytes that deflate can make of one


class Npz(Format):
    """The format of one archive per file, which is read whole by tasks, never by the driver.

    Images are uint8, [rows, height, width], or with channels first or last; labels are whole numbers, [rows]."""

    name: ClassVar[str] = "npz"
    summary: ClassVar[str] = "an archive of numpy arrays"
    opens: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        length = int.from_bytes(head[26:28], "little")
        return head[:4] == ZIP_SIGNATURE and head[NAME_PLACE : NAME_PLACE + length].endswith(b".npy")

    def survey(self, store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one archive from the headers of its arrays. Raises DataError."""
        archive = NumpyArchive(store.read(file.path), file.path)
        images = archive.header(archive.images)
        if images.dtype != np.uint8:
            raise DataError(f"{archive.place(archive.images)} is {images.dtype}; images are uint8, 0 to 255")
        if shape is None:
            shape = shape_of(images.shape, archive.place(archive.images))
        elif np.prod(images.shape[1:]) != np.prod(shape):
            size = "x".join(map(str, shape))
            raise DataError(
                f"{archive.place(archive.images)} has images of {images.shape[1:]}, not --image-shape {size}"
            )
        rows = images.shape[0]
        # The archive can only be decompressed whole; decode_rows keeps its rows, so that later passes need not do it.
        data = DataFile(file.path, file.bytes, file.modified_ms, rows, decode_rows=rows, change=file.change)
        return data, Layout(shape, labelled=archive.labels is not None)

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of an archive, which is read whole. Raises DataError."""
        archive = NumpyArchive(store.read(file.path), file.path)
        rows = archive.header(archive.images).shape[0]
        if rows != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {rows}: it changed while it was read")
        labels = archive.read_labels(rows) if layout.labelled else no_labels(rows)
        pixels = archive.read_images(layout) if images else None
        step = block_rows(layout.record_bytes)
        for low in range(start, stop, step):
            span = slice(low, min(low + step, stop))
            yield Columns(labels[span], None if pixels is None else pixels[span])


class NumpyArchive:
    """The arrays of an archive. Nothing in it can run code, and no array is larger than its bytes can hold.

    Args:
        data: the file.
        path: its path, for error lines.
    Raises:
        DataError: it is damaged, or has no images.

    Attributes:
        images, labels: the names of the arrays; labels is None without labels.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        self.size = len(data)
        try:
            self.zip = zipfile.ZipFile(io.BytesIO(data))
            names = {name.removesuffix(".npy") for name in self.zip.namelist()}
        except Exception as error:  # a damaged archive raises almost anything
            raise self._broken(error, path) from None
        images = next((name for name in IMAGE_ARRAYS if name in names), None)
        if images is None:
            raise DataError(
                f"{path} has no array named {' or '.join(IMAGE_ARRAYS)}, but {', '.join(sorted(names)[:8]) or 'none'}"
            )
        self.images = images
        self.labels = next((name for name in LABEL_ARRAYS if name in names), None)

    def place(self, name: str) -> str:
        """Return the place of an array, for error lines."""
        return f"{self.path}, array {name}"

    def header(self, name: str) -> ArrayHeader:
        """Return the header of an array. Raises DataError if it is damaged, or is not as long as it says."""
        try:
            info = self.zip.getinfo(f"{name}.npy")
            # The archive can claim any size for a compressed array.
            if info.file_size > self.size * MOST_INFLATION:
                raise ValueError(f"{self.size} bytes cannot hold {info.file_size}")
            with self.zip.open(info) as member:
                return read_header(member, info.file_size)
        except Exception as error:  # zipfile and numpy raise many kinds
            raise self._broken(error, self.place(name)) from None

    def read_images(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """Return the images as bytes, uint8 [rows, C*H*W], channels first. Raises DataError."""
        array = self._read(self.images)
        channels, height, width = layout.shape
        if array.shape[1:] == (height, width, channels):
            array = array.transpose(0, 3, 1, 2)
        # A copy only if the channels are last.
        pixels: npt.NDArray[np.uint8] = np.ascontiguousarray(array).reshape(len(array), -1)
        if pixels.dtype != np.uint8 or pixels.shape[1] != layout.record_bytes:
            raise DataError(f"{self.place(self.images)} is no longer uint8 images of {layout.shape}: it changed")
        return pixels

    def read_labels(self, rows: int) -> npt.NDArray[np.int32]:
        """Return the labels, int32 [rows]. Raises DataError if they are not whole numbers from 0, one per image."""
        assert self.labels, "the layout has labels"
        header = self.header(self.labels)
        if header.dtype.kind not in "iu" or header.shape not in ((rows,), (rows, 1)):
            raise DataError(
                f"{self.place(self.labels)} is {header.dtype} {header.shape}; labels are {rows} whole numbers, one per"
                " image"
            )
        labels = self._read(self.labels).reshape(rows)
        if rows and not 0 <= labels.min() <= labels.max() < 1 << 31:
            raise DataError(f"{self.place(self.labels)} holds a label outside 0..{(1 << 31) - 1}")
        return labels.astype(np.int32)

    def _read(self, name: str) -> npt.NDArray[Any]:
        """Return an array. Raises DataError if it is damaged."""
        self.header(name)
        try:
            return read_array(self.zip.read(f"{name}.npy"))
        except Exception as error:  # such as a wrong checksum
            raise self._broken(error, self.place(name)) from None

    def _broken(self, error: Exception, place: str) -> DataError:
        return DataError(f"{place} is damaged: {words_of(error) or type(error).__name__}")


def shape_of(shape: tuple[int, ...], place: str) -> tuple[int, int, int]:
    """Return the shape of an image, (channels, height, width), from the shape of an array of images.

    An array of three dimensions is grey; of four, the last is the channels if it is 1 or 3, else the first of an image.
    Raises DataError for other arrays. place: of the array, for the message."""
    image: tuple[int, ...] = ()
    if len(shape) == 3:
        image = (1, *shape[1:])
    elif len(shape) == 4:
        image = (shape[3], *shape[1:3]) if shape[3] in (1, 3) else shape[1:]
    if len(image) != 3 or not 0 < int(np.prod(image, dtype=object)) <= MAX_IMAGE_BYTES:
        raise DataError(
            f"{place} has shape {shape}; images are [rows, height, width], or with channels first or last; flat ones"
            " need --image-shape"
        )
    channels, height, width = image
    return channels, height, width
