"""The source folder of a stream of files: the entries that Spark skips, and files that change after a batch took them.

Spark identifies a file by its path alone, so later contents of that path are never read. The stream therefore records
the size, time and change mark of each file as its batch found them, in OUTPUT/_taken/batch-NNNNNNNN.jsonl, one line per
file. Every COMPACT_BATCHES batches, one file replaces all earlier ones. A repeated batch writes its file again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pipeline.core.errors import DataError
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import readable
from pipeline.input.files import check_no_table, entries_below

FOLDER = "_taken"
COMPACT_BATCHES = 100
READ_AT_ONCE = 16
NAMES_SHOWN = 3
AFTER_ALL = 1 << 62  # larger than any batch number
# Files that Spark and Hadoop write beside data files; they contain no rows.
BOOKKEEPING = re.compile(r"_SUCCESS|_temporary|_spark_metadata|\..*\.crc")
_BATCH = re.compile(r"batch-(\d+)\.jsonl")


@dataclass
class Inbox:
    """The source folder of one run of a stream.

    Attributes:
        store: reaches the folder and the output.
        uri: the folder, resolved.
        output: folder of the shard set, resolved.
    """

    store: Store
    uri: str
    output: str
    _states: dict[str, FileInfo] = field(default_factory=dict)
    _next: int = -1  # _states holds the files of all batches before this one
    _left_out: set[str] | None = None  # paths skipped by the previous look; None before the first
    _known_left_out: set[str] = field(default_factory=set)

    def list_files(self) -> Look:
        """List the folder and its partition folders, such as label=3.

        Raises:
            DataError: the files belong to a table, such as Delta's, or a folder cannot be listed.
        """
        entries = entries_below(self.store, self.uri)
        check_no_table(entry for entry in entries if entry.name != "_spark_metadata")  # a log that Spark's source reads
        files = {entry.path: entry for entry in entries if not entry.is_dir and not is_left_out(entry)}
        left_out = {
            entry.path: entry for entry in entries if is_left_out(entry) and not BOOKKEEPING.fullmatch(entry.name)
        }
        # A name that is hidden in one look only is a draft, which will be renamed.
        lasting = {path for path in left_out if self._left_out is None or path in self._left_out}
        self._left_out = set(left_out)
        fresh = [left_out[path] for path in sorted(lasting - self._known_left_out)]
        self._known_left_out |= lasting
        return Look(files, fresh)

    def check_at_start(self, *, first: bool) -> list[str]:
        """Return warnings about entries that a stream will not read. first: True if the set does not exist yet.

        Raises:
            DataError: as ``list_files``, or a stream without a set would skip a folder.
        """
        look = self.list_files()
        folders = [entry.path for entry in look.left_out if entry.is_dir and entry.name[0] not in "._"]
        if first and folders:
            raise DataError(
                f"{folders[0]} is a folder inside the source, whose files a stream does not read; name the folder that"
                " holds the data files"
            )
        return [*look.warnings(), *warnings_of(self._changes(look, self._load(AFTER_ALL)))]

    def changes(self, batch: int, look: Look) -> list[Change]:
        """Return the files of earlier batches that have changed since, in order of path."""
        if self._next != batch:
            self._states = self._load(batch)
        return self._changes(look, self._states)

    def record(self, batch: int, files: Iterable[FileInfo]) -> None:
        """Record the state of files that a batch takes or found changed, before the batch is committed."""
        if batch and batch % COMPACT_BATCHES == 0 and self._states:
            self._compact(batch - 1)
        states = {file.path: file for file in files}
        if states:
            self.store.replace(self._path(batch), _lines(states.values()))
        self._states |= states
        self._next = batch + 1

    def _changes(self, look: Look, recorded: dict[str, FileInfo]) -> list[Change]:
        """Return the files whose present state differs from the recorded one, by path. recorded: recorded states by
        path."""
        both = sorted(recorded.keys() & look.files.keys())
        pairs = [(recorded[path], look.files[path]) for path in both]
        return [Change(before, now) for before, now in pairs if _state(before) != _state(now)]

    def _load(self, batch: int) -> dict[str, FileInfo]:
        """Return the files of all batches before *batch*, each in its latest recorded state."""
        numbers = sorted(number for number in self._numbers() if number < batch)
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            return {file.path: file for files in pool.map(self._read, numbers) for file in files}

    def _read(self, batch: int) -> list[FileInfo]:
        """Return the files in the notes of a batch. Raises DataError if they are damaged."""
        path = self._path(batch)
        try:
            lines = self.store.read(path).decode().splitlines()
            return [FileInfo(**json.loads(line), is_dir=False) for line in lines]
        except (ValueError, TypeError):  # no JSON, or another object
            raise DataError(
                f"{path} is damaged; restore it, or delete it to ignore later changes of the files in it"
            ) from None

    def _compact(self, last: int) -> None:
        """Write all states up to batch *last*, which is done, into the file of that batch."""
        self.store.replace(self._path(last), _lines(self._states.values()))
        for number in self._numbers():
            if number < last:
                self.store.delete(self._path(number))

    def _numbers(self) -> list[int]:
        entries = self.store.list(f"{self.output}/{FOLDER}")
        return [int(match[1]) for entry in entries if (match := _BATCH.fullmatch(entry.name))]

    def _path(self, batch: int) -> str:
        return f"{self.output}/{FOLDER}/batch-{batch:08d}.jsonl"


@dataclass(frozen=True)
class Look:
    """A listing of the source folder.

    Attributes:
        files: the files that Spark's source reads, by path.
        left_out: folders and hidden files that it skips and that were not reported yet.
    """

    files: dict[str, FileInfo]
    left_out: list[FileInfo]

    def warnings(self) -> list[str]:
        """Return one line about skipped entries, if there are any."""
        if not self.left_out:
            return []
        names = [readable(entry.path) + "/" * entry.is_dir for entry in self.left_out]
        return [
            f"not read: {_names_in_words(names)}; a stream takes the files of its source folder and of partition folders"
            " such as label=3, but for names that begin with _ or ., end with ._COPYING_ or are not UTF-8"
        ]


@dataclass(frozen=True)
class Change:
    """The state of a file when its batch took it, and its state now."""

    before: FileInfo
    now: FileInfo

    def describe(self) -> str:
        """Return a sentence for the quarantine."""
        before = self.before
        now = self.now
        change = "was replaced or appended to"
        if (before.bytes, before.modified_ms) == (now.bytes, now.modified_ms):
            change = "may have been replaced (another change mark)"  # or had its mode, owner or links changed
        return (
            f"{now.path} {change} after a batch took it ({_size_and_time(before)}; now {_size_and_time(now)}): it is not"
            " read again; add new rows under a new name"
        )


def is_left_out(entry: FileInfo) -> bool:
    """True for a folder that is not a partition, and for a file whose name Spark's source or a batch job skips."""
    hidden = entry.name.startswith((".", "_")) or entry.name.endswith("._COPYING_")
    return entry.is_dir or hidden or readable(entry.path) != entry.path


def warnings_of(changes: list[Change]) -> list[str]:
    """Return one line about changed files, if there are any."""
    if not changes:
        return []
    others = f"; {len(changes) - 1:,} more files changed likewise" if len(changes) > 1 else ""
    return [f"{changes[0].describe()}{others}"]


def _names_in_words(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more}"


def _state(file: FileInfo) -> tuple[int, int, str]:
    return file.bytes, file.modified_ms, file.change


def _size_and_time(file: FileInfo) -> str:
    time = datetime.fromtimestamp(file.modified_ms / 1000, UTC)
    return f"{file.bytes:,} bytes of {time:%Y-%m-%d %H:%M:%S}Z"


def _lines(files: Iterable[FileInfo]) -> bytes:
    records = [
        {"path": file.path, "bytes": file.bytes, "modified_ms": file.modified_ms, "change": file.change}
        for file in files
    ]
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()
