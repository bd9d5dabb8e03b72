"""The rows that arrived in one batch: which files hold them, and which records are left out because they are broken."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.converted import stored_layout, with_channels
from pipeline.input.dataset import Block, Dataset, Run
from pipeline.input.formats import FORMATS, Columns, DataFile, recognise
from pipeline.input.formats.cifar_binary import FixedRecords

CONFIRM_BYTES = 1 << 20
MOST_BROKEN = 100  # records of a file that cannot be decoded and are left out one by one; with more all of it is


class Broken(NamedTuple):
    """What is put aside, and why. source: a file, or a place in a topic; record: of the file, None for all of it; records:
    how many, from that one on, of which the reason tells the first; 0 where nobody can tell."""

    source: str
    record: int | None
    reason: str
    records: int = 1


class Found(NamedTuple):
    """Rows first <= id < end of one file that are left out. decoded: whether they can be read, and labels are out of range;
    of several the reason tells the first."""

    first: int
    end: int
    reason: str
    decoded: bool = False


class Segment(NamedTuple):
    """Records start <= r < stop of a file."""

    file: DataFile
    start: int
    stop: int


@dataclass(frozen=True)
class Arrivals(Dataset):
    """Ids begin at ``first``: the order of segments is the order of arrival."""

    segments: tuple[Segment, ...] = ()
    first: int = 0

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.segments)

    @cached_property
    def firsts(self) -> list[int]:
        """The id of the first row of each segment."""
        return [self.first + before for before in (0, *accumulate(stop - start for _, start, stop in self.segments))][
            :-1
        ]

    def spans(self, start: int, stop: int) -> Iterator[tuple[DataFile, int, int, int]]:
        for number in range(max(0, bisect_right(self.firsts, start) - 1), len(self.segments)):
            (file, begin, end), first = self.segments[number], self.firsts[number]
            if first >= stop:
                break
            low, high = max(start - first, 0) + begin, min(stop - first + begin, end)
            if low < high:
                yield file, low, high, first + low - begin

    def where(self, row: int) -> str:
        file, record = self.record(row)
        return FORMATS[self.format].where(file, record, stored_layout(file, self.layout))

    def record(self, row: int) -> tuple[DataFile, int]:
        """The file of a row, and its place there."""
        number = self.segment(row)
        return self.segments[number].file, self.segments[number].start + row - self.firsts[number]

    def segment(self, row: int) -> int:
        """The number of the one that a row is in."""
        return bisect_right(self.firsts, row) - 1

    def without(self, broken: Iterable[tuple[int, int]]) -> Arrivals:
        """The same without some rows, each (first id, end); ids close up."""
        segments, cuts, next_cut = [], sorted(broken), 0
        for (file, start, stop), first in zip(self.segments, self.firsts, strict=True):
            at, end = start, first + stop - start
            while next_cut < len(cuts) and cuts[next_cut][0] < end:
                low, high = (min(max(row - first + start, at), stop) for row in cuts[next_cut])
                segments.append(Segment(file, at, low))
                at = high
                if cuts[next_cut][1] > end:
                    break  # it goes on in the next file
                next_cut += 1
            segments.append(Segment(file, at, stop))
        return replace(self, segments=tuple(segment for segment in segments if segment.start < segment.stop))


def survey(
    store: Store,
    uri: str,
    entries: list[FileInfo],
    *,
    run: Run[Any, Any],
    first: int,
    format: str | None,
    shape: tuple[int, int, int] | None,
    expected: Layout | None,
    unlabelled: bool,
    channels: int | None = None,
) -> tuple[Arrivals | None, list[Broken]]:
    """The files of a batch, in their order, and what is wrong with some. expected: what rows of the set look like, None
    before there are any: then the first file that can be read tells, and its format. None where none can."""

    def look(entry: FileInfo) -> tuple[str, DataFile | None, Layout | None, list[Broken]]:
        return _look(store, entry, format, shape, unlabelled, channels)

    segments: list[Segment] = []
    broken: list[Broken] = []
    for entry, (name, file, layout, problems) in zip(entries, run(look, entries), strict=True):
        broken += problems
        if file is None or layout is None:
            continue
        expected, format = expected or layout, format or name
        if name != format or not _alike(layout, expected):
            broken.append(
                Broken(
                    entry.path,
                    None,
                    f"{entry.path} holds {layout.describe()} ({name}), and the stream {expected.describe()} ({format})",
                    file.rows,
                )
            )
            continue
        # Rows that are decoded together would be broken together.
        segments.append(Segment(replace(file, decode_rows=0), 0, file.rows))
    if not segments or expected is None or format is None:
        return None, broken
    files = tuple(segment.file for segment in segments)
    return Arrivals(store, uri, format, files, expected, tuple(segments), first), broken


def _look(
    store: Store,
    entry: FileInfo,
    format: str | None,
    shape: tuple[int, int, int] | None,
    unlabelled: bool,
    channels: int | None,
) -> tuple[str, DataFile | None, Layout | None, list[Broken]]:
    """One file's format, rows and layout, and what is wrong with it."""
    broken: list[Broken] = []
    try:
        entry = store.info(entry.path)
        name = format or recognise(store, [entry], shape)
        kind = FORMATS[name]
        if isinstance(kind, FixedRecords) and (rest := entry.bytes % kind.record_bytes(shape)):
            record = entry.bytes // kind.record_bytes(shape)
            reason = f"{entry.path}: its last record, {record}, has {rest} of {kind.record_bytes(shape)} bytes"
            broken.append(Broken(entry.path, record, reason))
            entry = replace(entry, bytes=entry.bytes - rest)
        try:
            file, layout = kind.survey(store, entry, shape)
        except DataError:
            confirm(store, entry.path)
            file, layout = kind.survey(store, entry, shape)
        file, layout = with_channels(file, layout, channels)
    except DataError as error:
        return "", None, None, [Broken(entry.path, None, str(error), 0)]
    except FileNotFoundError:
        return "", None, None, [Broken(entry.path, None, f"{entry.path} was gone when its batch began", 0)]
    except PermissionError:
        return "", None, None, [Broken(entry.path, None, f"{entry.path} cannot be read: permission denied", 0)]
    if not file.rows:
        return "", None, None, broken
    if unlabelled:
        layout = layout.without_labels()
    problem = None
    if not layout.labelled and not unlabelled:
        problem = f"{entry.path} has no labels, and --unlabelled is not given"
    elif layout.dtype != "uint8":
        problem = f"{entry.path} holds {layout.dtype}; a stream takes images of uint8"
    if problem:
        return name, None, None, [*broken, Broken(entry.path, None, problem, file.rows)]
    return name, file, layout, broken


def confirm(store: Store, path: str) -> None:
    """Read all of a file that seems broken. Raises OSError where it is the file system that fails: then the batch fails, and
    comes again, and nothing is put aside."""
    with store.open(path) as file:
        while file.read(CONFIRM_BYTES):
            pass


def _alike(one: Layout, other: Layout) -> bool:
    """But for the number of classes, which labels are held against one by one."""
    return replace(one, num_classes=None) == replace(other, num_classes=None)


def digest(entries: Iterable[FileInfo]) -> str:
    """Of the names, sizes and times of files."""
    text = "\n".join(f"{entry.path} {entry.bytes} {entry.modified_ms}" for entry in entries)
    return hashlib.sha256(text.encode()).hexdigest()


def examine(dataset: Arrivals, start: int, stop: int, num_classes: int) -> Iterator[Block | Found]:
    """Rows start <= id < stop, and those that are left out; each kind in order. A label outside 0..num_classes-1 is a
    reason. The search in a file ends with the record of it after MOST_BROKEN that cannot be decoded: ``left_out`` takes all
    of it then. O(log rows) reads for a broken record."""
    for file, low, high, at in dataset.spans(start, stop):
        failures, confirmed = 0, False
        ranges = [(at, at + high - low)]
        while ranges and failures <= MOST_BROKEN:
            begin, end = ranges.pop()
            done = begin
            try:
                for block in dataset.read(begin, end):
                    done = int(block.ids[-1]) + 1
                    yield from _with_labels(block, dataset, num_classes)
            except DataError as error:
                if not confirmed:
                    confirm(dataset.store, file.path)
                    confirmed = True
                    ranges.append((done, end))
                elif end - done == 1:
                    failures += 1
                    yield Found(done, end, str(error) if file.path in str(error) else f"{file.path}: {error}")
                else:
                    middle = (done + end) // 2
                    ranges += [(middle, end), (done, middle)]


def _with_labels(block: Block, dataset: Arrivals, num_classes: int) -> Iterator[Block | Found]:
    """The rows of a block whose labels are in range, and the others: a range for those beside each other. O(ranges)."""
    columns = block.columns
    checks: list[tuple[Any, int, str]] = [(columns.labels, num_classes, "label")]
    if columns.coarse_labels is not None and dataset.layout.coarse:
        checks.append((columns.coarse_labels, dataset.layout.coarse, "coarse label"))
    bad = np.any([(labels < 0) | (labels >= limit) for labels, limit, _ in checks], axis=0)
    if not bad.any():
        yield block
        return
    edges = np.flatnonzero(np.diff(bad, prepend=False, append=False)).tolist()
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        label, limit, name = next(check for check in checks if not 0 <= check[0][low] < check[1])
        first = int(block.ids[low])
        reason = f"{dataset.where(first)}: {name} {label[low]} is not in 0..{limit - 1}"
        yield Found(first, first + high - low, reason, decoded=True)
    good: Ints = np.flatnonzero(~bad)
    if len(good):
        yield some_rows(block, good)


def joined(dataset: Arrivals, found: Iterable[Found]) -> list[Found]:
    """Neighbours in a file of which only the labels are wrong become one range. found: ascending."""
    merged: list[Found] = []
    for entry in found:
        last = merged[-1] if merged else None
        beside = last and last.decoded and entry.decoded and last.end == entry.first
        if last and beside and dataset.segment(last.first) == dataset.segment(entry.first):
            merged[-1] = last._replace(end=entry.end)
        else:
            merged.append(entry)
    return merged


def left_out(dataset: Arrivals, found: Iterable[Found]) -> list[Found]:
    """What is left out of a batch for what its tasks have found, ascending both: the same however it was cut for them. A
    file of which more than MOST_BROKEN records cannot be decoded goes whole, as one range that is not decoded."""
    result: list[Found] = []
    for number, some in groupby(joined(dataset, found), lambda entry: dataset.segment(entry.first)):
        of_file = list(some)
        broken = [entry for entry in of_file if not entry.decoded]
        if len(broken) > MOST_BROKEN:
            (_, start, stop), first = dataset.segments[number], dataset.firsts[number]
            words = f"more than {MOST_BROKEN} records cannot be decoded, so all of the file is left out"
            of_file = [Found(first, first + stop - start, f"{broken[0].reason}; {words}")]
        result += of_file
    return result


def some_rows(block: Block, rows: Ints) -> Block:
    """rows: places in the block."""
    taken: dict[str, Any] = {item.name: getattr(block.columns, item.name) for item in fields(Columns)}
    some: dict[str, Any] = {name: None if values is None else values[rows] for name, values in taken.items()}
    return Block(block.ids[rows], Columns(**some))
