"""The interface of an input format, and the data that it exchanges with other modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import MAX_CLASSES, KeptColumn, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.read_options import ReadOptions
from pipeline.input.resize import Size

MOST_LABEL = (1 << 31) - 1  # labels are int32
BLOCK_ROWS = 2048  # the most rows of a block
DECODED_BYTES = 16 << 20  # image files that are decoded together, in bytes of pixels
BLOCK_BYTES = 64 << 20  # the most image bytes of a block of several rows: Arrow's offsets end at 2 GiB


def check_label_range(labels: npt.NDArray[np.integer[Any]], place: str) -> None:
    """Raise DataError for a label that int32 does not hold. place: of the labels, for the message.

    Negative ones pass: the scan refuses them row by row, and --max-bad-records leaves out these rows alone."""
    wide = labels[(labels < -MOST_LABEL) | (labels > MOST_LABEL)]
    if wide.size:
        raise DataError(f"{place} holds {wide[0]}: number the classes from 0 to at most {MAX_CLASSES - 1:,}")


def block_rows(record_bytes: int) -> int:
    """Return the largest number of rows per block for images of a given size."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, record_bytes)))


def block_spans(start: int, stop: int, record_bytes: int) -> Iterator[slice]:
    """Yield the records start <= r < stop in slices of at most ``block_rows`` rows."""
    step = block_rows(record_bytes)
    for low in range(start, stop, step):
        yield slice(low, min(low + step, stop))


@dataclass(frozen=True)
class DataFile:
    """A surveyed file of an input.

    Attributes:
        path: the full path.
        bytes: the size.
        modified_ms: the time of the last change, in ms since 1970.
        rows: the number of rows.
        decode_rows: the number of rows that are decoded together and kept for later passes (input/decoded.py); 0 if
            reading any range costs no more than its bytes.
        label: the label of all rows, if it comes from a partition folder and not from a column.
        encoded: whether the images are image files such as PNG.
        channels: the channels of the images that the format returns, if --channels is given. The decoder converts image
            files to this number; other images are converted after they are read (input/converted.py).
        size: the height and width of the images that the format returns, if --resize is given; as ``channels``.
        image_column: the name of the column or array of images; "" in formats without names.
        label_column: the name of the column or array of labels; "" without labels or names.
        class_name: the name of the class of all rows, if it comes from a folder; ``label`` is then its number.
        marks: the byte at which every ``mark_rows``-th row begins, if rows are found by reading those before them.
        mark_rows: the number of rows between two marks.
        split: the split of the file's rows that is read, if a file holds several.
        remark: what a user should know about how the file is read, for the log; "" if nothing.
    """

    path: str
    bytes: int
    modified_ms: int
    rows: int
    decode_rows: int = 0
    label: int | None = None
    change: str = ""  # see FileInfo
    encoded: bool = False
    channels: int | None = None
    size: Size | None = None
    image_column: str = ""
    label_column: str = ""
    class_name: str | None = None
    marks: tuple[int, ...] = ()
    mark_rows: int = 0
    split: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Columns:
    """The columns of consecutive rows.

    labels, coarse_labels, neighbourhoods: int32 [rows]. targets: float32 [rows]. images: uint8 [rows, bytes], the bytes
    of C*H*W numbers, planar. attributes: the columns of ``Layout.attributes`` by name, Arrow arrays that may hold nulls."""

    labels: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8] | None
    coarse_labels: npt.NDArray[np.int32] | None = None
    neighbourhoods: npt.NDArray[np.int32] | None = None
    targets: npt.NDArray[np.float32] | None = None
    attributes: Mapping[str, pa.Array] = field(default_factory=dict)

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Columns:
        """Return the rows at the given positions."""
        arrays: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        del arrays["attributes"]
        arrays = {name: None if values is None else values[rows] for name, values in arrays.items()}
        attributes = {name: values.take(pa.array(rows)) for name, values in self.attributes.items()}
        return Columns(**arrays, attributes=attributes)


@dataclass(frozen=True)
class Format(ABC):
    """An input format.

    Members are stateless, so that tasks can use them. ``shape`` is the value of --image-shape, or None. A survey must not
    convert images: --channels and --resize of its options are applied by input/converted.py."""

    name: ClassVar[str]
    summary: ClassVar[str]  # a description of a file, for ``sharding formats``
    opens: ClassVar[bool]  # whether a survey must open the file and therefore runs in a task
    seeks: ClassVar[bool] = False  # whether any record can be read without the records before it
    may_be_empty: ClassVar[bool] = False  # whether files without rows are normal, as Spark writes them
    reads_folders: ClassVar[bool] = False  # whether a data file may be a folder, whose files are the records
    needs_others: ClassVar[bool] = False  # whether a file's labels are in another file or in its folder's name
    names_columns: ClassVar[bool] = False  # whether --image-column and --label-column apply
    labels_in: ClassVar[str]  # where labels are looked for, for the error line about files without labels
    locates_damage: ClassVar[bool] = False  # whether the survey of an unrecognised file reports where it is truncated

    @abstractmethod
    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """True if a file that begins with ``head`` (up to 256 KiB) has this format."""

    def resembles(self, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """True if an unrecognised file begins like this format, so that its survey can report where it is truncated."""
        return False

    def data_files(self, entries: list[FileInfo], uri: str) -> list[FileInfo]:
        """Return the entries of an input that hold rows; others, such as files of labels, are read beside them.

        uri: the path of the input."""
        return entries

    def names_beside(self, store: Store, folder: str, options: ReadOptions) -> tuple[str, ...]:
        """Return the names of the classes from a file beside the data files, or ()."""
        return ()

    @abstractmethod
    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one file, reading as little of it as possible. Raises DataError."""

    @abstractmethod
    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of one file in blocks of at most ``block_rows`` rows. Raises DataError.

        Args:
            store: the file system.
            file: the surveyed file.
            start: the first record.
            stop: the record after the last.
            layout: the layout of the rows as stored.
            images: whether to read images.
        """

    def kept_columns(self, store: Store, file: FileInfo, names: Sequence[str]) -> tuple[KeptColumn, ...]:
        """Return some columns of a file, with the types in which they are kept; ``read`` then yields them.

        Raises UsageError if the file does not have them."""
        raise UsageError(
            f"{file.path} has no column {names[0]}: only the formats parquet and arrow have further columns, not"
            f" {self.name}; write the rows as Parquet with this column, or leave the column out"
        )

    def where(self, file: DataFile, record: int, layout: Layout) -> str:
        """Return the place of one record, for an error line."""
        return f"{file.path}, row {record}"
