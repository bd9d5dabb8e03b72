"""The rows of one batch: the files that contain them, and the broken records that are left out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.converted import with_conversion
from pipeline.input.dataset import Block, Dataset, RecordRange, Run
from pipeline.input.formats import FORMATS, DataFile, recognise
from pipeline.input.formats.cifar_binary import FixedRecords
from pipeline.input.read_options import ReadOptions

# The format of a file, its rows, their layout, and its problems. Rows and layout are None if the file is left out; the
# format is then not used and may be empty.
FileSurvey = tuple[str, DataFile | None, Layout | None, list["BadRecord"]]
CONFIRM_BYTES = 1 << 20
MOST_BROKEN = 100  # undecodable records per file that are left out one by one; beyond, the whole file


class BadRecord(NamedTuple):
    """A record or file that goes to the quarantine.

    Attributes:
        source: path of a file, or partition and offsets in a topic.
        record: number of the first record in the file; None for the whole file.
        reason: the problem of the first record.
        records: number of records from ``record`` on; 0 if unknown.
    """

    source: str
    record: int | None
    reason: str
    records: int = 1


class SkippedRows(NamedTuple):
    """Rows first <= id < end of one file that are left out.

    Attributes:
        first: id of the first row.
        end: id after the last row.
        reason: the problem of the first row.
        decoded: True if the rows can be decoded and only their labels are out of range.
    """

    first: int
    end: int
    reason: str
    decoded: bool = False


@dataclass(frozen=True)
class Arrivals(Dataset):
    """The rows of one batch as a data set.

    Ids begin at ``first`` and follow the segments, which are in order of arrival."""

    segments: tuple[RecordRange, ...] = ()
    first: int = 0

    def leave_out(self, bad_ranges: Iterable[tuple[int, int]]) -> Arrivals:
        """Return the data set without some rows, each (first id, end); later ids move down to close the gaps."""
        segments = []
        cuts = sorted(bad_ranges)
        next_cut = 0
        for (file, start, stop), first in zip(self.segments, self.firsts, strict=True):
            at = start
            end = first + stop - start
            while next_cut < len(cuts) and cuts[next_cut][0] < end:
                low, high = (min(max(row - first + start, at), stop) for row in cuts[next_cut])
                segments.append(RecordRange(file, at, low))
                at = high
                if cuts[next_cut][1] > end:
                    break  # this cut continues in the next segment
                next_cut += 1
            segments.append(RecordRange(file, at, stop))
        return replace(self, segments=tuple(segment for segment in segments if segment.start < segment.stop))


def survey(
    store: Store,
    uri: str,
    entries: list[FileInfo],
    *,
    run: Run[Any, Any],
    first: int,
    read_options: ReadOptions,
    expected: Layout | None,
) -> tuple[Arrivals | None, list[BadRecord]]:
    """Survey the files of a batch, in parallel, and return their rows with the list of problems.

    Files that differ from the set's layout or format are left out and reported.

    Args:
        store: reaches the files.
        uri: the source, for messages and for the manifest.
        entries: the files in order of arrival.
        run: maps a function over the files.
        first: id of the first row.
        read_options: how the files are read; the default format is the format of the first readable file.
        expected: layout of the set's rows; None before the first batch, which takes it from its first readable file.

    Returns:
        The rows, or None if no file has usable ones, and the problems.
    """
    format = read_options.format
    segments: list[RecordRange] = []
    bad_records: list[BadRecord] = []
    surveys = run(partial(_survey_file, store, read_options), entries)
    for entry, (name, file, layout, problems) in zip(entries, surveys, strict=True):
        bad_records += problems
        if file is None or layout is None:
            continue
        expected = expected or layout
        format = format or name
        if name != format or not _same_layout(layout, expected):
            ours = f"{expected.describe()} ({format})"
            reason = f"{entry.path} holds {layout.describe()} ({name}), and the stream {ours}"
            bad_records.append(BadRecord(entry.path, None, reason, file.rows))
            continue
        # One broken record must not take along the rows that are decoded with it.
        segments.append(RecordRange(replace(file, decode_rows=0), 0, file.rows))
    if not segments or expected is None or format is None:
        return None, bad_records
    files = tuple(segment.file for segment in segments)
    return Arrivals(store, uri, format, files, expected, tuple(segments), first), bad_records


def _survey_file(store: Store, read_options: ReadOptions, entry: FileInfo) -> FileSurvey:
    """Return the format, rows, layout and problems of one file; a file that cannot be read is a problem."""
    try:
        return _survey_readable_file(store, store.info(entry.path), read_options)
    except DataError as error:
        reason = str(error)
    except FileNotFoundError:
        reason = f"{entry.path} no longer existed when its batch began"
    except PermissionError:
        reason = f"{entry.path} cannot be read: permission denied"
    return "", None, None, [BadRecord(entry.path, None, reason, 0)]


def _survey_readable_file(store: Store, entry: FileInfo, read_options: ReadOptions) -> FileSurvey:
    """Return the format, rows, layout and problems of one file.

    A file without rows is left out without a problem of its own. Raises DataError for a broken file, OSError for one
    that cannot be read."""
    bad_records: list[BadRecord] = []
    shape = read_options.shape
    name = read_options.format or recognise(store, [entry], shape)
    kind = FORMATS[name]
    if kind.needs_others:
        raise DataError(
            f"{entry.path} is {name}, whose labels are not in the same file; a stream takes each file alone"
        )
    # A file that ends within a record keeps its whole records.
    if isinstance(kind, FixedRecords) and (rest := entry.bytes % kind.record_bytes(shape)):
        record = entry.bytes // kind.record_bytes(shape)
        reason = f"{entry.path}: its last record, {record}, has {rest} of {kind.record_bytes(shape)} bytes"
        bad_records.append(BadRecord(entry.path, record, reason))
        entry = replace(entry, bytes=entry.bytes - rest)
    try:
        file, layout = kind.survey(store, entry, read_options)
    except DataError:
        # A file system error looks like broken data. Only a file that can be read to its end is judged.
        check_readable(store, entry.path)
        file, layout = kind.survey(store, entry, read_options)
    file, layout = with_conversion(file, layout, read_options)
    if not file.rows:
        return "", None, None, bad_records
    if read_options.unlabelled:
        layout = layout.drop_labels()
    problem = None
    if not layout.labelled and not read_options.unlabelled:
        problem = f"{entry.path} has no labels, and --unlabelled is not given"
    elif layout.named_labels:
        problem = f"{entry.path} has names of classes as labels; a stream takes their numbers"
    elif layout.dtype != "uint8":
        problem = f"{entry.path} holds {layout.dtype}; a stream takes images of uint8"
    if problem:
        return name, None, None, [*bad_records, BadRecord(entry.path, None, problem, file.rows)]
    return name, file, layout, bad_records


def check_readable(store: Store, path: str) -> None:
    """Read the whole of a file that seems broken.

    Raises OSError if the file system is at fault: the batch then fails and is repeated, and nothing is quarantined."""
    if store.info(path).is_dir:  # a folder of images: each is a file of its own
        return
    with store.open(path) as file:
        while file.read(CONFIRM_BYTES):
            pass


def _same_layout(one: Layout, other: Layout) -> bool:
    """True if two layouts are equal except for the classes, whose numbers are checked label by label.

    Files that name their classes must number them alike."""
    if one.class_names and other.class_names and one.class_names != other.class_names:
        return False
    return _drop_classes(one) == _drop_classes(other)


def _drop_classes(layout: Layout) -> Layout:
    return replace(layout, num_classes=None, class_names=())


def digest(entries: Iterable[FileInfo]) -> str:
    """Return the SHA-256 of the paths, sizes and modification times of files."""
    text = "\n".join(f"{entry.path} {entry.bytes} {entry.modified_ms}" for entry in entries)
    return hashlib.sha256(text.encode()).hexdigest()


def examine(dataset: Arrivals, start: int, stop: int, num_classes: int) -> Iterator[Block | SkippedRows]:
    """Yield the good rows start <= id < stop as blocks and the bad ones as ranges; each kind in order.

    A row is bad if it cannot be decoded or has a label outside 0..num_classes-1. The search within a file ends after
    MOST_BROKEN + 1 undecodable records, because ``ranges_to_leave_out`` then drops the whole file. Costs O(log rows) reads
    per broken record."""
    for file, low, high, at in dataset.spans(start, stop):
        # A block that fails is bisected until each undecodable record is isolated.
        failures = 0
        confirmed = False
        ranges = [(at, at + high - low)]
        while ranges and failures <= MOST_BROKEN:
            begin, end = ranges.pop()
            next_row = begin
            try:
                for block in dataset.read(begin, end):
                    next_row = int(block.ids[-1]) + 1
                    yield from _with_labels(block, dataset, num_classes)
            except DataError as error:
                if not confirmed:
                    check_readable(dataset.store, file.path)
                    confirmed = True
                    ranges.append((next_row, end))
                elif end - next_row == 1:
                    failures += 1
                    yield SkippedRows(next_row, end, str(error) if file.path in str(error) else f"{file.path}: {error}")
                else:
                    middle = (next_row + end) // 2
                    ranges += [(middle, end), (next_row, middle)]


def _with_labels(block: Block, dataset: Arrivals, num_classes: int) -> Iterator[Block | SkippedRows]:
    """Yield the rows of a block whose labels are in range, and one range per run of adjacent other rows. O(ranges)."""
    columns = block.columns
    checks: list[tuple[Any, int, str]] = [(columns.labels, num_classes, "label")]
    if columns.coarse_labels is not None and dataset.layout.coarse:
        checks.append((columns.coarse_labels, dataset.layout.coarse, "coarse label"))
    bad = np.any([(labels < 0) | (labels >= limit) for labels, limit, _ in checks], axis=0)
    if not bad.any():
        yield block
        return
    # Adjacent bad rows become one range, so that a wrong --num-classes does not make one entry per row.
    edges = np.flatnonzero(np.diff(bad, prepend=False, append=False)).tolist()
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        label, limit, name = next(check for check in checks if not 0 <= check[0][low] < check[1])
        first = int(block.ids[low])
        reason = f"{dataset.where(first)}: {name} {label[low]} is not in 0..{limit - 1}"
        yield SkippedRows(first, first + high - low, reason, decoded=True)
    good: Ints = np.flatnonzero(~bad)
    if len(good):
        yield some_rows(block, good)


def merge_ranges(dataset: Arrivals, entries: Iterable[SkippedRows]) -> list[SkippedRows]:
    """Merge adjacent ranges of one file whose rows were decoded and left out only for their labels.

    A range that the boundary of two tasks had cut is whole again. Each record that cannot be decoded keeps an entry of
    its own, because they are counted per file. entries: in ascending order."""
    result: list[SkippedRows] = []
    for entry in entries:
        last = result[-1] if result else None
        beside = last and last.decoded and entry.decoded and last.end == entry.first
        if last and beside and dataset.segment(last.first) == dataset.segment(entry.first):
            result[-1] = last._replace(end=entry.end)
        else:
            result.append(entry)
    return result


def ranges_to_leave_out(dataset: Arrivals, entries: Iterable[SkippedRows]) -> list[SkippedRows]:
    """Return the ranges that a batch leaves out, ascending, from the ranges that its tasks found, ascending.

    The result does not depend on how the batch was split into tasks. A file with more than MOST_BROKEN undecodable
    records is left out whole, as one range with decoded=False."""
    result: list[SkippedRows] = []
    for number, some in groupby(merge_ranges(dataset, entries), lambda entry: dataset.segment(entry.first)):
        of_file = list(some)
        bad_entries = [entry for entry in of_file if not entry.decoded]
        if len(bad_entries) > MOST_BROKEN:
            _, start, stop = dataset.segments[number]
            first = dataset.firsts[number]
            words = f"more than {MOST_BROKEN} records cannot be decoded, so all of the file is left out"
            of_file = [SkippedRows(first, first + stop - start, f"{bad_entries[0].reason}; {words}")]
        result += of_file
    return result


def some_rows(block: Block, rows: Ints) -> Block:
    """Return the given rows of a block. rows: int64 positions in the block."""
    return Block(block.ids[rows], block.columns.take(rows))
