"""Files of one array each, of images or of labels: IDX (MNIST, Fashion-MNIST) and NPY, also compressed by gzip.

The labels of a file of images are in a file beside it, whose name follows from the name of the images."""

from __future__ import annotations

import gzip
import io
import re
import struct
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.npz import read_header
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import no_labels, words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.arrays import check_labels, image_shape, labels_of, planar
from pipeline.input.formats.base import Columns, DataFile, Format, block_rows
from pipeline.input.formats.gzipped import GZIP, inflate_start
from pipeline.input.formats.inflation import InflationLimit
from pipeline.input.read_options import ReadOptions

HEAD_BYTES = 1 << 16
LABEL_FILE = re.compile(r"(?<![a-z])(labels?|y|targets?)(?![a-z])", re.IGNORECASE)
# The words for images in a file's name, and the words for labels in the name of the file beside it.
PAIRS = (("images", "labels"), ("image", "label"), ("data", "labels"), ("idx3", "idx1"), ("idx4", "idx1"), ("x", "y"))


class ArrayPlace(NamedTuple):
    """The array of a file.

    Attributes:
        dtype: the type of a number.
        shape: one length per axis; the first is the number of rows.
        offset: the byte at which the numbers begin, after decompression.
        by_columns: whether the first axis varies fastest.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    by_columns: bool = False

    @property
    def record_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize


class ArrayFiles(Format):
    """A format of two files with an array each. Files that are not compressed are read from any row on."""

    opens: ClassVar[bool] = True
    needs_others: ClassVar[bool] = True
    label_names: ClassVar[tuple[str, ...]] = ()  # names of a file of labels that several files of images share

    @abstractmethod
    def parse(self, head: bytes, size: int | None) -> ArrayPlace:
        """Return the array of a file. Raises ValueError if it has none, or is not as long as it says.

        head: its first bytes, decompressed; size: its size, or None if that is not known."""

    def data_files(self, entries: list[FileInfo], uri: str) -> list[FileInfo]:
        images = [entry for entry in entries if not LABEL_FILE.search(entry.name)]
        return images or entries

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of a file of images, from its header and the header of its labels. Raises
        DataError."""
        array, packed = self._open(store, file)
        shape = image_shape(array.shape, array.dtype, options.shape, file.path)
        rows = array.shape[0]
        labels = None if options.unlabelled else self._label_file(store, file)
        if labels:
            header, _ = self._open(store, labels)
            check_labels(header.shape, header.dtype, rows, labels.path)
        # A file whose rows cannot be read one by one is decompressed or transposed once, and kept for later passes.
        marks = f" {labels.bytes} {labels.modified_ms} {labels.change}" if labels else ""
        return DataFile(
            file.path,
            file.bytes,
            max(file.modified_ms, labels.modified_ms if labels else 0),
            rows,
            decode_rows=rows if packed or array.by_columns else 0,
            change=f"{file.change}{marks}",
            label_column=labels.path if labels else "",
        ), Layout(shape, labelled=labels is not None)

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop. Raises DataError if a file is damaged, or has changed since its survey."""
        step = block_rows(layout.record_bytes)
        pixels = self._read(store, file.path, start, stop, file.rows, step) if images else None
        labels = None
        if layout.labelled:
            labels = self._read(store, file.label_column, start, stop, file.rows, step)
        for low in range(start, stop, step):
            count = min(step, stop - low)
            part = planar(next(pixels), layout, file.path) if pixels else None
            numbers = labels_of(next(labels), count, file.label_column) if labels else no_labels(count)
            yield Columns(numbers, part)

    def _open(self, store: Store, file: FileInfo) -> tuple[ArrayPlace, bool]:
        """Return the array of a file, and whether it is compressed. Raises DataError if it is damaged."""
        head = store.read_range(file.path, 0, HEAD_BYTES)
        packed = head[:2] == GZIP
        try:
            array = self.parse(inflate_start(head, HEAD_BYTES), None if packed else file.bytes)
            # A header can claim any size, so it is checked before memory is allocated.
            size = array.offset + array.shape[0] * array.record_bytes
            if packed:
                InflationLimit(file.bytes).add(size)
            elif size > file.bytes:
                raise ValueError(f"{file.bytes} bytes cannot hold an array of shape {array.shape}")
        except (ValueError, struct.error) as error:
            raise DataError(f"{file.path} is damaged: {words_of(error)}") from None
        return array, packed

    def _read(self, store: Store, path: str, start: int, stop: int, rows: int, step: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows start <= r < stop of a file. Raises DataError if it is damaged or has changed.

        Args:
            store: reaches the file.
            path: the file.
            start, stop: range of the rows.
            rows: number of all rows at the file's survey.
            step: rows that are yielded at a time.
        """
        array, packed = self._open(store, store.info(path))
        if array.shape[0] != rows:
            raise DataError(f"{path} had {rows} rows and now has {array.shape[0]}: it changed")
        size = array.record_bytes
        whole = None
        if packed or array.by_columns:
            data = _inflate(store.read(path), path, array.offset + rows * size) if packed else store.read(path)
            order = "F" if array.by_columns else "C"
            flat = np.frombuffer(data, array.dtype, rows * prod(array.shape[1:]), array.offset)
            whole = flat.reshape(array.shape, order=order)  # type: ignore[call-overload]
        for low in range(start, stop, step):
            high = min(low + step, stop)
            if whole is not None:
                yield whole[low:high]
                continue
            data = store.read_range(path, array.offset + low * size, (high - low) * size)
            if len(data) != (high - low) * size:
                raise DataError(
                    f"{path} ends within row {low + len(data) // max(1, size)}: it was cut while it was read"
                )
            yield np.frombuffer(data, array.dtype).reshape(high - low, *array.shape[1:])

    def _label_file(self, store: Store, file: FileInfo) -> FileInfo | None:
        """Return the file of labels beside a file of images, or None. Costs a request per possible name."""
        folder = file.path[: -len(file.name)]
        for name in (*label_file_names(file.name), *self.label_names):
            if name != file.name and store.exists(folder + name):
                return store.info(folder + name)
        return None


def label_file_names(name: str) -> list[str]:
    """Return the possible names of the file of labels beside a file of images, the likeliest first."""
    renamed = name
    names = []
    for images, labels in PAIRS:
        pattern = re.compile(rf"(?<![A-Za-z]){images}(?![A-Za-z])", re.IGNORECASE)
        # Replace every word, because a name can have two: train-images-idx3-ubyte.gz needs labels and idx1.
        renamed = pattern.sub(lambda match, word=labels: word.upper() if match[0].isupper() else word, renamed)  # type: ignore[misc]
        names.append(renamed)
    choices = [renamed, *names]
    return [choice for choice in dict.fromkeys(choices) if choice != name]


def _inflate(data: bytes, path: str, length: int) -> bytes:
    """Return a decompressed file of a known length. Raises DataError if it is damaged or has another one."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(length)
            rest = file.read(1)  # also compares the checksum
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {words_of(error)}") from None
    if len(content) != length or rest:
        raise DataError(f"{path} is damaged: it does not hold the {length} bytes that its header tells")
    return content


# The types of numbers of an IDX file, by their code; all begin with their most significant byte.
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Idx(ArrayFiles):
    """The format of MNIST: a header of big-endian lengths, and bytes."""

    name: ClassVar[str] = "idx"
    summary: ClassVar[str] = "IDX files of images and of labels (MNIST, Fashion-MNIST), also .gz"
    labels_in: ClassVar[str] = "they are in a file beside the images, such as train-labels-idx1-ubyte"

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        packed = head[:2] == GZIP
        try:
            self.parse(inflate_start(head, HEAD_BYTES), None if packed else file.bytes)
        except (ValueError, struct.error):
            return False
        return True

    def parse(self, head: bytes, size: int | None) -> ArrayPlace:
        if head[:2] != bytes(2) or len(head) < 4 or head[2] not in IDX_TYPES or not 1 <= head[3] <= 4:
            raise ValueError("it does not begin as an IDX file")
        shape = struct.unpack_from(f">{head[3]}I", head, 4)
        dtype = np.dtype(IDX_TYPES[head[2]])
        offset = 4 + 4 * len(shape)
        if size not in (None, offset + prod(shape) * dtype.itemsize):
            raise ValueError(f"{size} bytes are no IDX file of shape {shape}")
        return ArrayPlace(dtype, shape, offset)


class Npy(ArrayFiles):
    """The format of numpy.save, without pickled objects."""

    name: ClassVar[str] = "npy"
    summary: ClassVar[str] = "numpy arrays, images.npy beside labels.npy (CIFAR-10.1, CIFAR-10-C), also .gz"
    labels_in: ClassVar[str] = "they are in a file beside the images: labels.npy, or x_data.npy beside x_labels.npy"
    label_names: ClassVar[tuple[str, ...]] = ("labels.npy", "y.npy", "labels.npy.gz")

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return inflate_start(head, 16)[:6] == b"\x93NUMPY"

    def parse(self, head: bytes, size: int | None) -> ArrayPlace:
        stream = io.BytesIO(head)
        try:
            header = read_header(stream, size)
        except ValueError:
            raise
        except Exception as error:  # numpy raises many kinds for a damaged header
            raise ValueError(words_of(error) or type(error).__name__) from None
        if not header.shape:
            raise ValueError("it holds a number, not an array")
        return ArrayPlace(header.dtype, header.shape, stream.tell(), header.in_fortran_order)
