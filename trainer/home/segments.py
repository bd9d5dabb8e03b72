"""What is appended to a host's metrics.jsonl and pushes.csv, in the run's home as files that never change.

  HOME/segments/000003.begun                        the third start of the run whose host leads it
  HOME/segments/000003-000000001234.metrics.jsonl   what that host's file has from byte 1234 on
  HOME/segments/host-1f..-000000000000.metrics.jsonl  the same of a host that does not lead
  HOME/segments/000003.settled                      all of the starts up to here is in HOME/metrics.jsonl and HOME/pushes.csv

A host that has put many segments merges neighbours: the first of them then holds what all of them held.

A host that leads begins with the whole log so far, and takes over what others have, so its files are the run's. Segments
name the byte where they begin: putting one in its place twice changes nothing, and where two starts wrote, because the first
was frozen and taken for dead, the later one's counts. Stores that append lose what a killed writer had open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pipeline.core.atomic import naming
from pipeline.core.errors import DataError, JobError
from trainer.home.folders import Folders
from trainer.home.place import Place, StorePlace, entries, write_whole
from trainer.run_files import METRICS, PUSHES, SEGMENTS

APPENDED = (METRICS, PUSHES)
_SEGMENT = re.compile(rf"(\d{{6,}}|host-[0-9a-f]+)-(\d{{12,}})\.({'|'.join(map(re.escape, APPENDED))})")
_MARK = re.compile(r"(\d{6,})\.(begun|settled)")
MARKS = re.compile(rf"{SEGMENTS}/{_MARK.pattern}")
NAMES = re.compile(rf"{SEGMENTS}/({_SEGMENT.pattern}|{_MARK.pattern})")
TRIES = 10
MOST, MERGED = 64, 32  # segments of a host's file, and how many neighbours become one where there are more
LARGEST = 64 << 20  # bytes of a merged segment, which is in memory


class Superseded(JobError):
    """Another start of the run, or another attempt of a host's part, has this one's place: it must not write any more."""


class Segment(NamedTuple):
    source: str
    offset: int
    file: str
    name: str
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class Log:
    """What is in HOME/segments. begun: the newest start; settled: the newest one whose log is whole; names: of all files."""

    segments: tuple[Segment, ...] = ()
    begun: int = 0
    settled: int = 0
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, files: Mapping[str, int]) -> Log:
        """files: bytes by name. Pure."""
        matches = [(match, size) for name, size in files.items() if (match := _SEGMENT.fullmatch(name))]
        segments = [Segment(match[1], int(match[2]), match[3], match[0], size) for match, size in matches]
        marks = [match for name in files if (match := _MARK.fullmatch(name))]
        begun = max((int(mark[1]) for mark in marks), default=0)
        settled = max((int(mark[1]) for mark in marks if mark[2] == "settled"), default=0)
        return cls(tuple(sorted(segments)), begun, settled, tuple(files))

    def end(self, source: str, file: str) -> int | None:
        """How far a host's file is here; None where none of it is."""
        return max((part.end for part in self.of_host(source, file)), default=None)

    def of_host(self, source: str, file: str) -> list[Segment]:
        """Return a host's segments of a file, by their first byte."""
        return [part for part in self.segments if (part.source, part.file) == (source, file)]

    def of_leaders(self, file: str) -> list[Segment]:
        """What HOME/file may lack, in order."""
        found = [part for part in self.segments if part.file == file and part.source.isdecimal()]
        return sorted((part for part in found if int(part.source) > self.settled), key=lambda part: int(part.source))

    def of_others(self) -> list[Segment]:
        return [part for part in self.segments if not part.source.isdecimal()]


def look(home: Place) -> Log:
    """One operation. Raises OSError."""
    return Log.of({entry.name: entry.bytes for entry in entries(home / SEGMENTS)})


def joined(base: bytes, parts: Iterable[tuple[int, bytes]]) -> bytes:
    """A file with its segments, (first byte, content), in their places. Raises ValueError where something is missing before
    one. Pure."""
    found = bytearray(base)
    for offset, data in parts:
        if offset > len(found):
            raise ValueError(f"bytes {len(found)} to {offset} are missing")
        if found[offset : offset + len(data)] != data:
            del found[offset:]
            found += data
    return bytes(found)


def whole_log(home: Place, file: str, log: Log) -> bytes:
    """A file as its hosts have written it so far. One operation a segment. Raises DataError, and OSError:
    FileNotFoundError where a segment is gone since ``log`` was listed."""
    try:
        base = (home / file).read_bytes()
    except FileNotFoundError:
        base = b""
    try:
        return joined(
            base, ((part.offset, (home / SEGMENTS / part.name).read_bytes()) for part in log.of_leaders(file))
        )
    except ValueError as error:
        raise DataError(f"{home / file} is damaged: {error}; choose another --output, or --overwrite") from None


def begin(home: StorePlace, work: Path) -> Folders:
    """Lead the run from here on: an earlier start that still lives is told so at its next copy. The work folder gets the log
    so far. Raises DataError and OSError."""
    while True:
        log = look(home)
        number = f"{log.begun + 1:06d}"
        try:
            home.store.put_new(str(home / SEGMENTS / f"{number}.begun"), uuid4().hex.encode())
            break
        except FileExistsError:
            continue
    begins = []
    for file, data in _whole_logs(home).items():
        if data:
            with naming(work / file):
                (work / file).write_bytes(data)
            begins.append((file, len(data)))
    return Folders(home, work, number, tuple(begins))


def _whole_logs(home: Place) -> dict[str, bytes]:
    """Return ``whole_log`` of each file, with what the earlier start wrote before it could know of this one. That start may
    be merging segments until then."""
    for _ in range(TRIES):
        log = look(home)
        try:
            return {file: whole_log(home, file, log) for file in APPENDED}
        except (FileNotFoundError, DataError):
            if look(home) == log:
                raise
    raise OSError(f"{home / SEGMENTS}: others change the segments all the time")


def void(home: Place) -> None:
    """The run begins anew: what earlier starts wrote, or will write that were frozen, does not count. Their numbers are not
    given again. Two operations. Raises OSError."""
    log = look(home)
    if log.begun > log.settled:
        write_whole(home / SEGMENTS / f"{log.begun:06d}.settled", b"")


def copy(folders: Folders, files: Sequence[str] = APPENDED) -> Log:
    """Have all whole lines of the work folder's files in the home. Several processes of a host may do it at once. One
    listing, and a file for each that has grown. Raises Superseded and OSError."""
    for _ in range(TRIES):
        log = look(folders.home)
        if folders.leads and log.begun > int(folders.source):
            raise Superseded(f"{folders.home} is in use by a later start of the run; this one ends")
        if all([_copy(folders, file, log) for file in files]):
            return log
    raise OSError(f"{folders.home / SEGMENTS}: others write the same segments all the time")


def _copy(folders: Folders, file: str, log: Log) -> bool:
    """False: another process was first, and may not have come as far."""
    path, home = folders.work / file, folders.home
    assert isinstance(home, StorePlace)
    if not path.exists():
        return True
    start = log.end(folders.source, file)
    if start is None:
        start = dict(folders.begins).get(file, 0)
    with open(path, "rb") as lines:
        lines.seek(start)
        data = lines.read()
    data = data[: data.rfind(b"\n") + 1]
    if data:
        try:
            home.store.put_new(str(home / SEGMENTS / f"{folders.source}-{start:012d}.{file}"), data)
        except FileExistsError:
            return False
    return True


def merge(folders: Folders, log: Log) -> None:
    """Merge neighbours among this host's segments where there are more than MOST of a file: those that hold least.

    A kill leaves segments whose bytes others have too, and a start that was frozen changes segments of its own alone. One
    process of a host may do it at a time. Raises OSError."""
    home = folders.home
    for file in APPENDED:
        mine: list[Segment] = []
        doubled: list[Segment] = []
        end = -1
        for part in log.of_host(folders.source, file):
            (mine if part.end > end else doubled).append(part)
            end = max(end, part.end)
        if len(mine) + len(doubled) <= MOST:
            continue
        if len(mine) > MERGED:
            windows = [mine[first : first + MERGED] for first in range(len(mine) - MERGED + 1)]
            some = min(windows, key=lambda window: window[-1].end - window[0].offset)
            length = some[-1].end - some[0].offset
            if length <= LARGEST:
                with open(folders.work / file, "rb") as lines:
                    lines.seek(some[0].offset)
                    write_whole(home / SEGMENTS / some[0].name, lines.read(length))
                doubled += some[1:]
        for part in doubled:
            (home / SEGMENTS / part.name).unlink(missing_ok=True)


def unread(home: Place, parts: Iterable[Segment], taken: dict[str, int]) -> Iterator[bytes]:
    """Yield what segments hold beyond what was taken before, in whole lines.

    parts: of one file, of each host by their first byte. taken: the byte of each host's file up to which its segments were
    taken, which is moved on. A host whose segments are being merged is left to the next look. Raises OSError."""
    late: set[str] = set()
    for part in parts:
        begin = taken.get(part.source, part.offset)
        if part.end <= begin or part.source in late:
            continue
        try:
            data = (home / SEGMENTS / part.name).read_bytes() if part.offset <= begin else None
        except FileNotFoundError:
            data = None
        if data is None:
            late.add(part.source)
            continue
        taken[part.source] = part.offset + len(data)
        yield data[begin - part.offset :]


def lines_of_others(home: Place, log: Log, taken: dict[str, int]) -> Iterator[bytes]:
    """The lines that hosts which do not lead have copied and that were not taken yet. taken: as ``unread`` has it. Raises
    OSError."""
    for data in unread(home, [part for part in log.of_others() if part.file == METRICS], taken):
        yield from data.splitlines(keepends=True)


def settle(folders: Folders) -> None:
    """The run ends: make the home's files whole, and delete what they were made of. Raises Superseded and OSError."""
    log = copy(folders)
    for file in APPENDED:
        if (folders.work / file).exists():
            write_whole(folders.home / file, (folders.work / file).read_bytes())
    mark = f"{folders.source}.settled"
    write_whole(folders.home / SEGMENTS / mark, b"")
    for name in {*look(folders.home).names, *log.names} - {mark}:
        (folders.home / SEGMENTS / name).unlink(missing_ok=True)
