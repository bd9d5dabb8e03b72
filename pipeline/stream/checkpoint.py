"""Spark's checkpoint held against the set, before a stream goes on: one that is behind, or ahead, would lose rows silently.

Spark writes CHECKPOINT/offsets/N before batch N, and CHECKPOINT/commits/N after it. Every batch leaves a trace in OUTPUT
before that: a generation, or a file of the quarantine."""

from __future__ import annotations

import re

from pipeline.errors import UsageError
from pipeline.shardset.generations import last_batch
from pipeline.shardset.manifest import ShardSet
from pipeline.storage.store import Store
from pipeline.stream.quarantine import FOLDER

_BATCH = re.compile(r"batch-(\d+)\b.*\.jsonl")


def check_checkpoint(store: Store, checkpoint: str, before: ShardSet | None, output: str) -> None:
    """Raises UsageError. checkpoint: as Spark is told. Four listings."""
    place = checkpoint.removeprefix("file://")
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
