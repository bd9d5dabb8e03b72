"""Spark's checkpoint: comparison with the set before a stream resumes, and the files or offsets planned for a batch.

A checkpoint that is behind or ahead of the set would lose rows silently. Planned files may have been deleted before
a restart. Spark writes CHECKPOINT/offsets/N before batch N, and CHECKPOINT/commits/N after it. CHECKPOINT/sources/0
contains the names of files, in the format of FileStreamSourceLog. Every batch leaves a generation or a quarantine file
in OUTPUT before Spark notes it as done."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from pipeline.core.errors import UsageError
from pipeline.core.json_values import fits, parse
from pipeline.core.shardset.generations import last_batch
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.quarantine import FOLDER

_BATCH = re.compile(r"batch-(\d+)\b.*\.jsonl")


def check_checkpoint(store: Store, checkpoint: str, before: ShardSet | None, output: str) -> None:
    """Raise UsageError if the checkpoint does not fit the set. Costs a read and three listings.

    Args:
        store: reaches the checkpoint and the output.
        checkpoint: its folder, as it is passed to Spark.
        before: the committed set, or None.
        output: folder of the set.
    """
    place = _path(checkpoint)
    # Before Spark plans a batch, which this checkpoint would hold for ever.
    check_query(before, _query_of(store, place))
    last_planned, last_done = (_last(store, f"{place}/{folder}") for folder in ("offsets", "commits"))
    last = last_batch(before) if before else -1
    # Batches up to the set's last number are skipped: rows that Spark newly assigns to them would be lost.
    if 0 <= last_planned < last:
        raise UsageError(
            f"{output} has batch {last}, but its checkpoint {place} ends at batch {last_planned}, so it does not record"
            " which rows are in the set (was it restored?); choose another --output and --checkpoint"
        )
    aside = {int(match[1]) for entry in store.list(f"{output}/{FOLDER}") if (match := _BATCH.fullmatch(entry.name))}
    # The rows of a batch that Spark has completed, but that left no trace in the output, are lost.
    lost_batch = next((batch for batch in range(last + 1, last_done + 1) if batch not in aside), None)
    if lost_batch is not None:
        raise UsageError(
            f"{output} lacks batch {lost_batch}, which its checkpoint {place} records as done: was the output or its"
            f" {FOLDER} deleted or restored? To start again, choose another --checkpoint, or delete this one"
        )


def check_query(before: ShardSet | None, query: str | None) -> None:
    """Raise UsageError if the set was written with another checkpoint.

    query: the id that the checkpoint gives its stream; None if it has none."""
    # Spark's checkpoint alone knows the files that were read: a new one would read them again, and commit their rows
    # twice.
    if before and before.manifest.stream and before.manifest.stream.query not in ("", query):
        raise UsageError(
            f"{before.uri} was written with another checkpoint: this one does not know which files are in it;"
            " give --checkpoint of that stream, or choose another --output"
        )


def _query_of(store: Store, place: str) -> str | None:
    """Return the id that a checkpoint gives its stream, or None if Spark has not started it yet."""
    try:
        return str(_json_of(store, f"{place}/metadata")["id"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _last(store: Store, folder: str) -> int:
    """Return the highest number among the file names of a folder, or -1."""
    return max((int(entry.name) for entry in store.list(folder) if entry.name.isdecimal()), default=-1)


def planned_files(store: Store, checkpoint: str, batch: int) -> list[FileInfo]:
    """Return the files that Spark planned for a batch, with times but without sizes.

    Unlike Spark's DataFrame, the list includes files that were deleted since.

    The format of the log is internal to Spark; without a readable log the result is empty. Costs O(files of the batch),
    for every tenth batch O(all files), because Spark compacts the log then."""
    place = _path(checkpoint)
    try:
        last = _offset(store, place, batch)["logOffset"]
        first = _offset(store, place, batch - 1)["logOffset"] + 1 if batch else 0
        entries = [entry for number in range(first, last + 1) for entry in _files_of_entry(store, place, number)]
        return [FileInfo(store.resolve(unquote(path)), 0, time_ms, is_dir=False) for path, time_ms in entries]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return []


def planned_offsets(store: Store, checkpoint: str, batch: int) -> dict[int, tuple[int, int]]:
    """Return the offsets start <= offset < end that Spark planned for a batch, by partition of the topic.

    Empty without a readable log."""
    place = _path(checkpoint)
    try:
        (ends,) = _offset(store, place, batch).values()
        first = _offset(store, place, batch - 1) if batch else _json_of(store, f"{place}/sources/0/0")
        (starts,) = first.values()
        return {int(number): (int(starts.get(number, 0)), int(end)) for number, end in ends.items()}
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def _files_of_entry(store: Store, place: str, number: int) -> list[tuple[str, int]]:
    """Return the path and time of the files of one log entry, from its own file or from a compacted one."""
    name = f"{place}/sources/0/{number}"
    data = store.read(name if store.exists(name) else f"{name}.compact")
    entries = [parse(line) for line in data.decode().splitlines()[1:]]
    files = [(entry["path"], entry["timestamp"]) for entry in entries if entry["batchId"] == number]
    if not all(fits(path, str) and fits(time_ms, int) for path, time_ms in files):
        raise ValueError("paths or times of another type")
    return files


def _offset(store: Store, place: str, batch: int) -> Any:
    """Return the end offset of a batch in the only source. Raises FileNotFoundError."""
    return _json_of(store, f"{place}/offsets/{batch}")


def _json_of(store: Store, path: str) -> Any:
    """Return the last line of a JSON lines file, parsed."""
    return parse(store.read(path).decode().splitlines()[-1])


def _path(checkpoint: str) -> str:
    return checkpoint.removeprefix("file://")
