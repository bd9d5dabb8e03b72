"""Segments: the bytes that hosts append to metrics.jsonl and pushes.csv, copied to the home of a remote run as files.

  HOME/segments/000003.begun                        marks the third start of the run on its leading host
  HOME/segments/000003-000000001234.metrics.jsonl   bytes from 1234 on of that host's file
  HOME/segments/host-1f..-000000000000.metrics.jsonl  the same for a host that does not lead
  HOME/segments/000003.settled                      HOME/metrics.jsonl and HOME/pushes.csv are complete up to this start

A segment changes only when a host that has many of them merges neighbours into the first of them.

The leading host begins with the whole log so far and takes over the lines of other hosts, so that its files are the log
of the run. The name of a segment contains the offset of its first byte: applying a segment twice changes nothing, and
if two starts wrote, because the first was frozen and considered dead, the later one counts. Segments are used because
appending to a file of a store loses the bytes that a killed writer had not closed."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import DataError, JobError
from pipeline.core.storage.claim import claim
from trainer.home.folders import Folders
from trainer.home.place import Place, StorePlace, copy_into, entries, write_whole
from trainer.run_files import METRICS, PUSHES, SEGMENTS

APPENDED = (METRICS, PUSHES)
_SEGMENT = re.compile(rf"(\d{{6,}}|host-[0-9a-f]+)-(\d{{12,}})\.({'|'.join(map(re.escape, APPENDED))})")
_MARK = re.compile(r"(\d{6,})\.(begun|settled)")
MARKS = re.compile(rf"{SEGMENTS}/{_MARK.pattern}")
NAMES = re.compile(rf"{SEGMENTS}/({_SEGMENT.pattern}|{_MARK.pattern})")
TRIES = 10
PAUSE_S = 0.05  # the longest before the second try; it grows with every try
# above MOST segments per host and file, MERGED neighbours are merged into one
MOST = 64
MERGED = 32
LARGEST = 64 << 20  # bytes of a merged segment, which is built in memory


class SupersededError(JobError):
    """The replacement of this start or attempt by a later one: this one must not write any more."""


class LogSegment(NamedTuple):
    """A segment, as its name and size tell.

    Attributes:
        source: prefix of its host (see Folders).
        offset: its first byte in the host's file.
        file: metrics.jsonl or pushes.csv.
        name: its name in HOME/segments.
        bytes: its size.
    """

    source: str
    offset: int
    file: str
    name: str
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class SegmentListing:
    """The listing of HOME/segments.

    Attributes:
        segments: sorted by host and first byte.
        last_start: number of the newest start, 0 before the first.
        last_settled_start: the newest start up to which the home's files are complete, 0 for none.
        names: the names of all files.
    """

    segments: tuple[LogSegment, ...] = ()
    last_start: int = 0
    last_settled_start: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def from_listing(cls, files: Mapping[str, int]) -> SegmentListing:
        """Parse the listing of HOME/segments. files: sizes in bytes by name. Pure."""
        matches = [(match, size) for name, size in files.items() if (match := _SEGMENT.fullmatch(name))]
        segments = [LogSegment(match[1], int(match[2]), match[3], match[0], size) for match, size in matches]
        marks = [match for name in files if (match := _MARK.fullmatch(name))]
        last_begun = max((int(mark[1]) for mark in marks), default=0)
        last_settled = max((int(mark[1]) for mark in marks if mark[2] == "settled"), default=0)
        return cls(tuple(sorted(segments)), last_begun, last_settled, tuple(files))

    def end(self, source: str, file: str) -> int | None:
        """Return the offset up to which a host's file is copied; None if it has no segment."""
        return max((part.end for part in self.host_segments(source, file)), default=None)

    def host_segments(self, source: str, file: str) -> list[LogSegment]:
        """Return a host's segments of a file, sorted by their first byte."""
        return [part for part in self.segments if (part.source, part.file) == (source, file)]

    def leader_segments(self, file: str) -> list[LogSegment]:
        """Return the leading hosts' segments that HOME/file may lack, by start and first byte."""
        segments = [part for part in self.segments if part.file == file and part.source.isdecimal()]
        return sorted(
            (part for part in segments if int(part.source) > self.last_settled_start), key=lambda part: int(part.source)
        )

    def foreign_segments(self) -> list[LogSegment]:
        """Return the segments of hosts that do not lead the run."""
        return [part for part in self.segments if not part.source.isdecimal()]


def list_segments(home: Place) -> SegmentListing:
    """List HOME/segments. Costs one operation. Raises OSError."""
    return SegmentListing.from_listing({entry.name: entry.bytes for entry in entries(home / SEGMENTS)})


def apply_segments(file: BinaryIO, parts: Iterable[tuple[int, bytes]]) -> None:
    """Write segments into a file, one after the other, so that one of them is in memory at a time.

    A segment that changes existing bytes discards all bytes from its first on. Raises ValueError if bytes before a
    segment are missing.

    file: open for reading and writing, with the content without segments; parts: (first byte, content) of each segment,
    in the order of their application."""
    for offset, data in parts:
        length = file.seek(0, os.SEEK_END)
        if offset > length:
            raise ValueError(f"bytes {length} to {offset} are missing")
        file.seek(offset)
        if file.read(len(data)) != data:
            file.seek(offset)
            file.truncate()
            file.write(data)


def write_whole_log(home: Place, file: str, listing: SegmentListing, path: Path) -> int:
    """Write a log file as the leading hosts have copied it so far, and return its size in bytes.

    Costs one operation per segment, which is in memory, and one for each block of the home's file. Raises DataError if
    bytes are missing, FileNotFoundError if a segment was deleted after the listing, and OSError.

    file: metrics.jsonl or pushes.csv; listing: of HOME/segments; path: the local file, which is replaced."""
    with path_in_errors(path), open(path, "w+b") as whole:
        with suppress(FileNotFoundError):
            copy_into(home / file, whole)
        parts = ((part.offset, (home / SEGMENTS / part.name).read_bytes()) for part in listing.leader_segments(file))
        try:
            apply_segments(whole, parts)
        except ValueError as error:
            raise DataError(f"{home / file} is damaged: {error}; choose another --output, or --overwrite") from None
        return whole.seek(0, os.SEEK_END)


def begin_start(home: StorePlace, work: Path) -> Folders:
    """Begin a start that leads the run, and write the log so far into the work folder. Raises DataError and OSError.

    An earlier start that still runs notices this at its next copy."""
    # Two starts at the same time get different numbers, because their records differ.
    token = uuid4().hex.encode()
    while True:
        listing = list_segments(home)
        number = f"{listing.last_start + 1:06d}"
        if claim(home.store, str(home / SEGMENTS / f"{number}.begun"), token) == token:
            break
    return Folders(home, work, number, _write_whole_logs(home, work))


def _write_whole_logs(home: Place, work: Path) -> tuple[tuple[str, int], ...]:
    """Write each file of the log into the work folder, and return the names and sizes of those that are not empty.

    They include the bytes that an earlier start wrote before it noticed this one. Retried TRIES times while the segments
    change, because the earlier start may be merging them."""
    for _ in range(TRIES):
        listing = list_segments(home)
        try:
            sizes = [(file, write_whole_log(home, file, listing, work / file)) for file in APPENDED]
            for file, size in sizes:
                if not size:
                    (work / file).unlink()
            return tuple((file, size) for file, size in sizes if size)
        except (FileNotFoundError, DataError):
            if list_segments(home) == listing:
                raise
    raise OSError(f"{home / SEGMENTS}: others change the segments all the time")


def void(home: Place) -> None:
    """Begin the run anew: all segments of earlier starts become void, even those that a frozen start writes later.

    Their numbers are not used again. Costs up to two operations. Raises OSError."""
    listing = list_segments(home)
    if listing.last_start > listing.last_settled_start:
        write_whole(home / SEGMENTS / f"{listing.last_start:06d}.settled", b"")


def copy(folders: Folders, files: Sequence[str] = APPENDED) -> SegmentListing:
    """Copy all complete lines of the work folder's files to the home, and return the listing before the copy.

    Several processes of a host may copy at the same time. Costs one listing, and one write per file that has grown.
    Raises SupersededError if a later start leads the run, and OSError."""
    for tried in range(TRIES):
        # Processes that copied at the same moment would otherwise be in each other's way again.
        time.sleep(random.uniform(0, PAUSE_S) * tried)
        listing = list_segments(folders.home)
        if folders.leads and listing.last_start > int(folders.source):
            raise SupersededError(f"{folders.home} is in use by a later start of the run; this one ends")
        if all([_copy(folders, file, listing) for file in files]):
            return listing
    raise OSError(f"{folders.home / SEGMENTS}: others write the same segments all the time")


def _copy(folders: Folders, file: str, listing: SegmentListing) -> bool:
    """Copy the new lines of a file. Returns False if another process was first, which may have copied fewer lines."""
    path = folders.work / file
    home = folders.home
    assert isinstance(home, StorePlace)
    if not path.exists():
        return True
    start = listing.end(folders.source, file)
    if start is None:
        start = dict(folders.begins).get(file, 0)
    with open(path, "rb") as lines:
        lines.seek(start)
        data = lines.read()
    data = data[: data.rfind(b"\n") + 1]  # the last line may still be written
    if data:
        return claim(home.store, str(home / SEGMENTS / f"{folders.source}-{start:012d}.{file}"), data) == data
    return True


def merge(folders: Folders, listing: SegmentListing) -> None:
    """Merge the smallest run of MERGED neighbours if this host has more than MOST segments of a file. Raises OSError.

    With more than MOST it also deletes segments whose bytes are in others, which a kill during a merge leaves. Neighbours
    of more than LARGEST bytes together are not merged. A frozen start that wakes up changes only its own segments. Only
    one process per host may merge at a time."""
    home = folders.home
    for file in APPENDED:
        sequence: list[LogSegment] = []
        redundant: list[LogSegment] = []  # their bytes are in earlier segments, so they can be deleted
        end = -1
        for part in listing.host_segments(folders.source, file):
            (sequence if part.end > end else redundant).append(part)
            end = max(end, part.end)
        if len(sequence) + len(redundant) <= MOST:
            continue
        if len(sequence) > MERGED:  # the window with the fewest bytes costs least to rewrite
            windows = [sequence[first : first + MERGED] for first in range(len(sequence) - MERGED + 1)]
            smallest = min(windows, key=lambda window: window[-1].end - window[0].offset)
            length = smallest[-1].end - smallest[0].offset
            if length <= LARGEST:
                with open(folders.work / file, "rb") as lines:
                    lines.seek(smallest[0].offset)
                    write_whole(home / SEGMENTS / smallest[0].name, lines.read(length))
                redundant += smallest[1:]
        for part in redundant:
            (home / SEGMENTS / part.name).unlink(missing_ok=True)


def unread(home: Place, parts: Iterable[LogSegment], offsets: dict[str, int]) -> Iterator[bytes]:
    """Yield the bytes of segments that were not read before, in whole lines. Raises OSError.

    A host whose segments are being merged is skipped until the next call.

    Args:
        home: the run's folder.
        parts: segments of one file, sorted by their first byte for each host.
        offsets: per host the offset up to which its file was read; updated.
    """
    late: set[str] = set()
    for part in parts:
        begin = offsets.get(part.source, part.offset)
        if part.end <= begin or part.source in late:
            continue
        try:
            data = (home / SEGMENTS / part.name).read_bytes() if part.offset <= begin else None
        except FileNotFoundError:
            data = None
        if data is None:  # bytes before this segment are missing, or it was deleted by a merge
            late.add(part.source)
            continue
        offsets[part.source] = part.offset + len(data)
        yield data[begin - part.offset :]


def lines_of_others(home: Place, listing: SegmentListing, offsets: dict[str, int]) -> Iterator[bytes]:
    """Yield the new events of hosts that do not lead the run, as lines of metrics.jsonl. Raises OSError.

    listing: of HOME/segments; offsets: per host the offset up to which its file was read, which is updated."""
    for data in unread(home, [part for part in listing.foreign_segments() if part.file == METRICS], offsets):
        yield from data.splitlines(keepends=True)


def complete_log(folders: Folders) -> None:
    """Complete the home's log files at the end of the run and delete all segments.

    Raises SupersededError and OSError."""
    listing = copy(folders)
    for file in APPENDED:
        if (folders.work / file).exists():
            write_whole(folders.home / file, folders.work / file)
    # The writes may have waited for the home longer than another host for the lease.
    if list_segments(folders.home).last_start > int(folders.source):
        raise SupersededError(f"{folders.home} is in use by a later start of the run; this one ends")
    # The mark comes after the files and before the deletions, so that a kill in between loses nothing.
    mark = f"{folders.source}.settled"
    write_whole(folders.home / SEGMENTS / mark, b"")
    for name in {*list_segments(folders.home).names, *listing.names} - {mark}:
        (folders.home / SEGMENTS / name).unlink(missing_ok=True)
