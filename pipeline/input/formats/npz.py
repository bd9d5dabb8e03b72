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
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import no_labels, words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.arrays import check_labels, image_shape, labels_of, planar
from pipeline.input.formats.base import Columns, DataFile, Format, block_spans
from pipeline.input.formats.inflation import InflationLimit
from pipeline.input.read_options import ReadOptions

IMAGE_ARRAYS = ("images", "x", "data")
LABEL_ARRAYS = ("labels", "y", "label")
ZIP_SIGNATURE = b"PK\x03\x04"
NAME_PLACE = 30  # offset of the first member's name in the archive


class Npz(Format):
    """The format of one archive per file, which is read whole by tasks, never by the driver.

    Images are uint8, [rows, height, width], or with channels first or last; labels are whole numbers, [rows]."""

    name: ClassVar[str] = "npz"
    summary: ClassVar[str] = "archives of numpy arrays, of images and of labels"
    labels_in: ClassVar[str] = "an archive has them in an array labels, y or label"
    opens: ClassVar[bool] = True
    names_columns: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        length = int.from_bytes(head[26:28], "little")
        return head[:4] == ZIP_SIGNATURE and head[NAME_PLACE : NAME_PLACE + length].endswith(b".npy")

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one archive from the headers of its arrays. Raises DataError."""
        archive = NumpyArchive(store.read(file.path), file.path, options.image_column, options.label_column)
        images = archive.header(archive.images)
        shape = image_shape(images.shape, images.dtype, options.shape, archive.place(archive.images))
        rows = images.shape[0]
        # The archive can only be decompressed whole; decode_rows keeps its rows, so that later passes need not do it.
        data = DataFile(
            file.path,
            file.bytes,
            file.modified_ms,
            rows,
            decode_rows=rows,
            change=file.change,
            image_column=archive.images,
            label_column=archive.labels or "",
        )
        return data, Layout(shape, labelled=archive.labels is not None)

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of an archive, which is read whole. Raises DataError."""
        archive = NumpyArchive(store.read(file.path), file.path, file.image_column, file.label_column or None)
        rows = archive.header(archive.images).shape[0]
        if rows != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {rows}: it changed while it was read")
        labels = archive.read_labels(rows) if layout.labelled else no_labels(rows)
        pixels = archive.read_images(layout) if images else None
        for span in block_spans(start, stop, layout.record_bytes):
            yield Columns(labels[span], None if pixels is None else pixels[span])


class NumpyArchive:
    """The arrays of an archive. Nothing in it can run code, and no array is larger than its bytes can hold.

    Args:
        data: the file.
        path: its path, for error lines.
        image_array: the name of the array of images; None: a usual one.
        label_array: the name of the array of labels; None: a usual one.

    Raises:
        DataError: it is damaged, or has no images.

    Attributes:
        images, labels: the names of the arrays; labels is None without labels.
    """

    def __init__(self, data: bytes, path: str, image_array: str | None, label_array: str | None) -> None:
        self.path = path
        self.size = len(data)
        try:
            self.zip = zipfile.ZipFile(io.BytesIO(data))
            names = {name.removesuffix(".npy") for name in self.zip.namelist()}
        except Exception as error:  # a damaged archive raises almost anything
            raise self._broken(error, path) from None
        self.images = self._pick(names, image_array, IMAGE_ARRAYS) or ""
        if not self.images:
            raise DataError(
                f"{path} has no array named {' or '.join(IMAGE_ARRAYS)}, but {', '.join(sorted(names)[:8]) or 'none'};"
                " --image-column names another one"
            )
        self.labels = self._pick(names, label_array, LABEL_ARRAYS)

    def _pick(self, names: set[str], name: str | None, usual: tuple[str, ...]) -> str | None:
        """Return the given name, or the first usual one that the archive has. Raises DataError if it lacks the given."""
        if name and name not in names:
            raise DataError(f"{self.path} has no array {name}; it has {', '.join(sorted(names)[:8]) or 'none'}")
        return name or next((each for each in usual if each in names), None)

    def place(self, name: str) -> str:
        """Return the place of an array, for error lines."""
        return f"{self.path}, array {name}"

    def header(self, name: str) -> ArrayHeader:
        """Return the header of an array. Raises DataError if it is damaged, or is not as long as it says."""
        try:
            info = self.zip.getinfo(f"{name}.npy")
            # zipfile inflates by other methods without a bound.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("it is compressed by another method than numpy's, deflate")
            # The archive can claim any size for a compressed array.
            InflationLimit(self.size).add(info.file_size)
            with self.zip.open(info) as member:
                return read_header(member, info.file_size)
        except Exception as error:  # zipfile and numpy raise many kinds
            raise self._broken(error, self.place(name)) from None

    def read_images(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """Return the images as bytes, uint8 [rows, C*H*W], channels first. Raises DataError."""
        return planar(self._read(self.images), layout, self.place(self.images))

    def read_labels(self, rows: int) -> npt.NDArray[np.int32]:
        """Return the labels, int32 [rows]. Raises DataError if they are not whole numbers, one per image."""
        assert self.labels, "the layout has labels"
        header = self.header(self.labels)
        check_labels(header.shape, header.dtype, rows, self.place(self.labels))  # before it is decompressed
        return labels_of(self._read(self.labels), rows, self.place(self.labels))

    def _read(self, name: str) -> npt.NDArray[Any]:
        """Return an array. Raises DataError if it is damaged."""
        self.header(name)
        try:
            with self.zip.open(f"{name}.npy") as member:
                # Without a size, read() inflates up to 2 GiB at once, whatever the archive claims.
                return read_array(member.read(self.zip.getinfo(f"{name}.npy").file_size))
        except Exception as error:  # such as a wrong checksum
            raise self._broken(error, self.place(name)) from None

    def _broken(self, error: Exception, place: str) -> DataError:
        return DataError(f"{place} is damaged: {words_of(error) or type(error).__name__}")
