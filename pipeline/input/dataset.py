"""A data set of labelled images of one size with dense ids: discovered by the driver, read by tasks. No Spark.

``id`` is the position in (sorted path, record) order, independent of how the work is split."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import no_labels
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.class_names import check_names, label_advice, number_classes, with_names
from pipeline.input.converted import stored_layout, with_conversion
from pipeline.input.decoded import read_decoded
from pipeline.input.files import fixed_part, input_files
from pipeline.input.formats import FORMATS, Columns, DataFile, Format, recognise
from pipeline.input.image_files import conversion_advice
from pipeline.input.read_options import ReadOptions

NEAR_BYTES = 256 << 10  # gaps up to this size are read, not skipped, because reopening a file takes as long
IDS_AT_ONCE = 1 << 20
REMARKS = 3  # remarks per input that the log shows

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Callable[[T], R], Sequence[T]], list[R]]


@dataclass(frozen=True)
class Block:
    """Consecutive rows.

    ids: int64 [rows]. columns: labels, coarse_labels, neighbourhoods int32 [rows]; targets float32 [rows]; images uint8
    [rows, bytes]."""

    ids: npt.NDArray[np.int64]
    columns: Columns

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        return self.columns.labels

    @property
    def images(self) -> npt.NDArray[np.uint8]:
        assert self.columns.images is not None, "read with images=True"
        return self.columns.images

    @property
    def neighbourhoods(self) -> npt.NDArray[np.int64]:
        assert self.columns.neighbourhoods is not None, "rows of a set that has neighbourhoods"
        return self.columns.neighbourhoods.astype(np.int64)

    def numbers(self, layout: Layout) -> npt.NDArray[np.uint8 | np.float32]:
        """Return the images as numbers of the layout's type, [rows, C, H*W]; without a copy if they are contiguous."""
        values = np.ascontiguousarray(self.images).view(layout.dtype)
        return values.reshape(len(self.ids), layout.shape[0], -1)


class RecordRange(NamedTuple):
    """The records start <= r < stop of a file."""

    file: DataFile
    start: int
    stop: int


@dataclass(frozen=True)
class Dataset:
    """The location and layout of the rows. Picklable and small: O(files), never O(rows)."""

    store: Store
    uri: str
    format: str
    files: tuple[DataFile, ...]
    layout: Layout

    @property
    def first(self) -> int:
        """The id of the first row."""
        return 0

    @cached_property
    def segments(self) -> tuple[RecordRange, ...]:
        """The records that are the rows, in the order of ids."""
        return tuple(RecordRange(file, 0, file.rows) for file in self.files)

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.segments)

    @cached_property
    def firsts(self) -> list[int]:
        """The id of the first row of each segment."""
        return list(accumulate((stop - start for _, start, stop in self.segments), initial=self.first))[:-1]

    def remarks(self) -> list[str]:
        """Return a line for each of the first files with a remark, and one that counts the others."""
        lines = [f"{file.path} {file.remark}" for file in self.files if file.remark]
        more = len(lines) - REMARKS
        return lines[:REMARKS] + ([f"the same holds for {more:,} more of the files"] if more > 0 else [])

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def record_bytes(self) -> int:
        return self.layout.record_bytes

    def read(self, start: int, stop: int, *, images: bool = True) -> Iterator[Block]:
        """Yield rows with start <= id < stop, in id order, in blocks of at most 2,048.

        Raises DataError for broken records."""
        kind = FORMATS[self.format]
        for file, low, high, at in self.spans(start, stop):
            end = at + high - low
            try:
                for columns in read_decoded(kind, self.store, file, low, high, self.layout, images):
                    rows = len(columns.labels)
                    if not self.layout.labelled:
                        columns = replace(columns, labels=no_labels(rows), coarse_labels=None)
                    yield Block(np.arange(at, at + rows, dtype=np.int64), columns)
                    at += rows
            except PermissionError:
                raise DataError(f"{file.path} cannot be read: permission denied") from None
            if at != end:  # the row counts of a file's parts do not add up to its total
                raise DataError(f"{file.path} is damaged: {high - low + at - end} rows came of {high - low}")

    def spans(self, start: int, stop: int) -> Iterator[tuple[DataFile, int, int, int]]:
        """Yield the spans of rows start <= id < stop: a file, its records low <= r < high, and the first id."""
        for number in range(max(0, self.segment(start)), len(self.segments)):
            file, begin, end = self.segments[number]
            first = self.firsts[number]
            if first >= stop:
                break
            low = max(start - first, 0) + begin
            high = min(stop - first + begin, end)
            if low < high:
                yield file, low, high, first + low - begin

    def read_some(
        self, start: int, stop: int, select: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the images of rows start <= id < stop that ``select(ids)`` selects, uint8 [rows, bytes], in id order.

        If the format can seek to records, the parts of a file far from all selected rows are not read."""
        if self.format not in FORMATS or not FORMATS[self.format].seeks:
            for block in self.read(start, stop):
                yield block.images[select(block.ids)]
            return
        far = max(1, NEAR_BYTES // self.record_bytes)
        for low in range(start, stop, IDS_AT_ONCE):
            ids = np.arange(low, min(low + IDS_AT_ONCE, stop))
            ids = ids[select(ids)]
            for near in np.split(ids, np.flatnonzero(np.diff(ids) > far) + 1):
                if len(near):
                    for block in self.read(int(near[0]), int(near[-1]) + 1):
                        yield block.images[select(block.ids)]

    def where(self, row: int) -> str:
        """Return the file of a row and its place in it, for error lines."""
        file, record = self.record(row)
        return FORMATS[self.format].where(file, record, stored_layout(file, self.layout))

    def record(self, row: int) -> tuple[DataFile, int]:
        """Return the file of a row and the row's record number in it."""
        number = self.segment(row)
        return self.segments[number].file, self.segments[number].start + row - self.firsts[number]

    def segment(self, row: int) -> int:
        """Return the index of the segment that contains a row."""
        return bisect_right(self.firsts, row) - 1

    def listing(self) -> str:
        """Return a digest of names, sizes, times and change marks, which is equal only for equal bytes.

        No file is read. HDFS has no change marks, so there bytes that were replaced with the same size and time go
        unnoticed."""
        return listing_digest(self.files)


def listing_digest(files: Iterable[DataFile | FileInfo]) -> str:
    """Return the digest that ``Dataset.listing`` has for files."""
    marks = (f"{file.path} {file.bytes} {file.modified_ms} {file.change}".rstrip() for file in files)
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()


Survey = tuple[DataFile, Layout] | JobError  # of a file: its rows and layout, or an error


def ranges(start: int, stop: int, pieces: int) -> list[tuple[int, int]]:
    """Return [start, stop) cut into ``pieces`` half-open ranges, without empty ones.

    Their lengths differ by at most one."""
    cuts = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def list_input(store: Store, uri: str, read_options: ReadOptions) -> list[FileInfo]:
    """Return the data files of an input, or the folders of images if its format reads folders. See ``input_files``."""
    format = read_options.format
    folders = format is not None and FORMATS[format].reads_folders
    return input_files(store, uri, read_options.evaluation, folders=folders)


def discover(
    store: Store,
    uri: str,
    *,
    run: Run[Any, Any],
    read_options: ReadOptions = ReadOptions(),
    evaluation: bool = False,
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Return the dataset of an input: its files, its layout and its number of rows. O(files) memory.

    Args:
        store: the file system.
        uri: a file, a folder or a pattern, resolved.
        run: run(fn, items) maps over files: Spark tasks in a job, a list comprehension elsewhere. Files that must be
            opened to count their rows are opened there, not on the driver.
        read_options: how its rows are read.
        evaluation: return the evaluation files instead of the training files, if the input has both.
        class_names: names of the training files' classes, for evaluation files; () if there are none.

    Raises:
        DataError: an empty or mixed folder, a truncated file, no labels, an unreadable path.
        UsageError: an unknown format.
    """
    read_options = replace(read_options, evaluation=evaluation, root=fixed_part(uri).rstrip("/"))
    format = read_options.format
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format {format}: choose one of {', '.join(FORMATS)}")
    entries = list_input(store, uri, read_options)
    name = format or recognise(store, entries, read_options.shape)
    kind: Format = FORMATS[name]
    if (read_options.image_column or read_options.label_column) and not kind.names_columns:
        flag = "--image-column" if read_options.image_column else "--label-column"
        raise UsageError(f"{flag}: {name} files have no columns with names; leave it out")
    entries = kind.data_files(entries, uri)
    # Formats whose files must be opened are surveyed by tasks, so that the driver does not read them one by one.
    surveys = _survey_all(kind, store, entries, read_options, run if kind.opens else serial)
    surveyed: list[tuple[DataFile, Layout]] = []
    for entry, survey in zip(entries, surveys, strict=True):
        if isinstance(survey, JobError):
            raise survey
        file, layout = survey
        if file.rows == 0 and kind.may_be_empty and len(entries) > 1:
            continue
        # The folder of the input itself is no class.
        labelled = layout.labelled and not (entry.is_dir and entry.path == uri)
        _check_rows(kind, file, layout, read_options, labelled=labelled)
        file, layout = with_conversion(file, layout, read_options)
        surveyed.append((file, layout.drop_labels() if read_options.unlabelled else layout))
    if not surveyed:
        raise DataError(f"{uri} holds no rows: all {len(entries)} files are empty")
    names = kind.names_beside(store, surveyed[0][0].path.rpartition("/")[0], read_options)
    surveyed = number_classes([with_names(entry, names) for entry in surveyed], class_names)
    first_file, expected = surveyed[0]
    for file, layout in surveyed[1:]:
        if kind.names_columns:
            _check_columns(first_file, file, labelled=not read_options.unlabelled)
        check_names(file, layout, expected.class_names, first_file.path)
        if layout != expected:
            raise DataError(
                f"mixed layouts: {first_file.path} holds {expected.describe()}, {file.path} holds {layout.describe()}"
                f"{conversion_advice(layout.shape, expected)}{label_advice(layout, expected)}"
            )
    if read_options.num_classes is not None:
        expected = replace(expected, num_classes=read_options.num_classes)
    return Dataset(store, uri, name, tuple(file for file, _ in surveyed), expected)


def _check_columns(first: DataFile, file: DataFile, *, labelled: bool) -> None:
    """Raise DataError if two files have their images or their labels in different columns.

    A file with one column more than the others may have its usual name, and other content. labelled: whether the
    labels are read."""
    places = [("images", "--image-column", f"the column {first.image_column}", f"the column {file.image_column}")]
    if labelled:
        places.append(("labels", "--label-column", _place_of_labels(first), _place_of_labels(file)))
    for content, flag, place, other in places:
        if place != other:
            raise DataError(
                f"{first.path} has its {content} in {place}, and {file.path} in {other}: name one column by {flag}, or give"
                " it one name in all files"
            )


def _place_of_labels(file: DataFile) -> str:
    return f"the column {file.label_column}" if file.label_column else "the names of folders"


def _check_rows(kind: Format, file: DataFile, layout: Layout, options: ReadOptions, *, labelled: bool) -> None:
    """Raise DataError if a surveyed file has no rows or no labels, or image files of another size than declared."""
    if file.rows == 0:
        raise DataError(f"{file.path} is empty: 0 rows; remove it or restore it")
    if not labelled and not options.unlabelled:
        raise DataError(f"{file.path} has no labels: {kind.labels_in}; give --unlabelled to shard rows without labels")
    # Image files have a size of their own, so a declared one must not be ignored in silence.
    shape = options.shape
    if shape and file.encoded and layout.shape[1:] != shape[1:] and not options.resize:
        size = "x".join(map(str, shape))
        raise DataError(
            f"{file.path} holds {layout.describe()}, not --image-shape {size}; leave it out, or --resize"
            f" {shape[1]}x{shape[2]}"
        )


def _survey_all(
    kind: Format, store: Store, entries: Sequence[FileInfo], options: ReadOptions, run: Run[Any, Any]
) -> list[Survey]:
    """Return the survey of every file.

    If broken records are counted, a file whose first images are all broken has the shape of another file's."""
    surveys: list[Survey] = list(run(lambda entry: _survey(kind, store, entry, options), entries))
    failed = [at for at, survey in enumerate(surveys) if isinstance(survey, JobError)]
    layouts = (survey[1] for survey in surveys if not isinstance(survey, JobError) and survey[0].rows)
    shape = next((layout.shape for layout in layouts), options.shape)
    if options.counts_broken and failed and shape:
        expecting = replace(options, expected_shape=shape)
        again = run(lambda entry: _survey(kind, store, entry, expecting), [entries[at] for at in failed])
        for at, result in zip(failed, again, strict=True):
            surveys[at] = result
    return surveys


def _survey(kind: Format, store: Store, entry: FileInfo, options: ReadOptions) -> Survey:
    """Return one file's rows and layout, or an error.

    Errors are values, because Spark retries a task that raises and wraps the error in a stack trace."""
    try:
        file, layout = kind.survey(store, entry, options)
        columns = kind.kept_columns(store, entry, options.columns) if options.columns and file.rows else ()
        return file, replace(layout, attributes=columns)
    except (DataError, UsageError) as error:
        return error
    except PermissionError:
        return DataError(f"{entry.path} cannot be read: permission denied")


def results_or_error(results: Iterable[T | str]) -> list[T]:
    """Return the results of tasks. Raises DataError with the first error text among them.

    Tasks return error texts as values, because Spark retries a task that raises."""
    values: list[T] = []
    for result in results:
        if isinstance(result, str):
            raise DataError(result)
        values.append(result)
    return values


def serial(fn: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Map a function without a cluster; see ``Run``."""
    return [fn(item) for item in items]
