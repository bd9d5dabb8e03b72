"""Spark's checkpoint held against the set, before a stream goes on: one that is behind, or ahead, would lose rows silently.
And what it has planned for a batch, of which some may be gone by the time of a restart.

Spark writes CHECKPOINT/offsets/N before batch N, and CHECKPOINT/commits/N after it. CHECKPOINT/sources/0 has the names of
files, in the format of FileStreamSourceLog. Every batch leaves a trace in OUTPUT before it is noted as done: a generation,
or a file of the quarantine."""

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
from pipeline.stream.quarantine import FOLDER

_BATCH = re.compile(r"batch-(\d+)\b.*\.jsonl")


def check_checkpoint(store: Store, checkpoint: str, before: ShardSet | None, output: str) -> None:
    """Raises UsageError. checkpoint: as Spark is told. Four listings."""
    place = _path(checkpoint)
    planned, done = (_last(store, f"{place}/{folder}") for folder in ("offsets", "commits"))
    last = last_batch(before) if before else -1
    if 0 <= planned < last:
        raise UsageError(
            f"{output} has batch {last}, and its checkpoint {place} only knows of {planned}: was that one restored? It"
            " cannot tell which rows are in the set; choose another --output and --checkpoint"
        )
    aside = {int(match[1]) for entry in store.list(f"{output}/{FOLDER}") if (match := _BATCH.fullmatch(entry.name))}
    lost = next((batch for batch in range(last + 1, done + 1) if batch not in aside), None)
    if lost is not None:
        raise UsageError(
            f"{output} has nothing of batch {lost}, which its checkpoint {place} has noted as done: was the output deleted"
            " or restored? To begin anew, choose another --checkpoint, or delete that one"
        )


def _last(store: Store, folder: str) -> int:
    """The highest number that is a file's name; -1 for none."""
    return max((int(entry.name) for entry in store.list(folder) if entry.name.isdecimal()), default=-1)


def planned_files(store: Store, checkpoint: str, batch: int) -> list[FileInfo]:
    """The files that Spark planned for a batch, with times and no sizes; its frame leaves out those that are gone. Empty
    where there is no log that can be read, whose format is Spark's own. O(files of the batch); every tenth time of all."""
    place = _path(checkpoint)
    try:
        last = _offset(store, place, batch)["logOffset"]
        first = _offset(store, place, batch - 1)["logOffset"] + 1 if batch else 0
        entries = [entry for number in range(first, last + 1) for entry in _logged(store, place, number)]
        return [FileInfo(store.resolve(unquote(path)), 0, time_ms, is_dir=False) for path, time_ms in entries]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return []


def planned_offsets(store: Store, checkpoint: str, batch: int) -> dict[int, tuple[int, int]]:
    """The messages start <= offset < end of each partition of a topic that Spark planned for a batch. Empty where there
    is no log that can be read."""
    place = _path(checkpoint)
    try:
        (ends,) = _offset(store, place, batch).values()
        first = _offset(store, place, batch - 1) if batch else _json_of(store, f"{place}/sources/0/0")
        (starts,) = first.values()
        return {int(number): (int(starts.get(number, 0)), int(end)) for number, end in ends.items()}
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def _logged(store: Store, place: str, number: int) -> list[tuple[str, int]]:
    """Path and time of the files under a number of the log: in a file of their own, or with those of all numbers before."""
    name = f"{place}/sources/0/{number}"
    data = store.read(name if store.exists(name) else f"{name}.compact")
    entries = [parse(line) for line in data.decode().splitlines()[1:]]
    found = [(entry["path"], entry["timestamp"]) for entry in entries if entry["batchId"] == number]
    if not all(fits(path, str) and fits(time_ms, int) for path, time_ms in found):
        raise ValueError("paths or times of another type")
    return found


def _offset(store: Store, place: str, batch: int) -> Any:
    """Of the only source, at the end of a batch. Raises FileNotFoundError."""
    return _json_of(store, f"{place}/offsets/{batch}")


def _json_of(store: Store, path: str) -> Any:
    """The last line of a file."""
    return parse(store.read(path).decode().splitlines()[-1])


def _path(checkpoint: str) -> str:
    return checkpoint.removeprefix("file://")
