"""Sets that grow: each append adds a generation of rows, as the next version of the manifest.

A version lists all files of the previous version and the files of one more generation, so readers only see complete
generations, and every reader of shard sets can read a growing set. The key ``generations`` of the manifest describes each
generation; ``batch`` is the number of its batch in the source, by which a repeated batch is recognised. The name of a
file contains the version that added it. The manifest grows by about 230 bytes per file, and a generation has at least
one file per worker that gets rows. No Spark."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pipeline.core.errors import DataError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Assignment, Generation, Input, Worker
from pipeline.core.shardset.versions import NAME

KEY = "generations"
MODEL = "_model/"
_VERSION = re.compile(r"-v(\d+)-\w+\.parquet")
_WORD = 1 << 64
Set = TypeVar("Set", bound=ShardSet)
Part = TypeVar("Part", Worker, Assignment)


def generations(shards: ShardSet) -> list[Generation]:
    """Return the generations of a set, oldest first; empty for a set that does not grow.

    Raises DataError if the manifest lacks a part that ``as_of`` needs."""
    entries = shards.manifest.generations
    parts = ("input", "image", "assignment") if entries else ()
    if missing := next((name for name in parts if name in shards.manifest.absent), None):
        raise DataError(f"{shards.uri}/{NAME} is damaged: it has {KEY} and no {missing}; restore it")
    return entries


def last_batch(shards: ShardSet) -> int:
    """Return the number of the batch that was committed last, -1 before the first."""
    return max((generation.batch for generation in generations(shards)), default=-1)


def version_of_file(path: str) -> int:
    """Return the version that added a file, 0 if its name contains none."""
    match = _VERSION.search(path)
    return int(match[1]) if match else 0


def append_generation(before: Manifest | None, new: Manifest) -> Manifest:
    """Return a set's manifest with one more generation. O(files).

    Values that cannot be summed, such as the neighbourhoods, are taken from ``new``; models are merged by name.

    Args:
        before: manifest of the set, None for the first generation.
        new: manifest of the new generation alone, with final paths and version and one entry in ``generations``.
    """
    # The version was unknown when the entry was made: it is chosen during the commit.
    entry = replace(new.generations[0], version=new.version)
    if before is None:
        return replace(new, generations=[entry])
    assert before.assignment, "a growing set has an assignment"
    assert new.assignment, "a growing set has an assignment"
    return replace(
        new,
        rows=before.rows + new.rows,
        copies=before.copies + new.copies,
        input=_input(before.input, new.input),
        chunks=[*before.chunks, *new.chunks],
        workers=[_worker(*pair) for pair in zip(before.workers, new.workers, strict=True)],
        evaluation=before.evaluation,
        model=_models(before.model, new.model),
        assignment=Assignment(
            rows=before.assignment.rows + new.assignment.rows,
            files=[*before.assignment.files, *new.assignment.files],
        ),
        seconds=_sums(before.seconds, new.seconds),
        generations=[*before.generations, entry],
    )


def as_of(shards: Set, number: int) -> Set:
    """Return the set as it was after generation ``number``: its files, rows, fingerprint and means. O(files).

    Copies and class counts of workers, and neighbourhoods, still describe the newest generation. Raises IndexError if
    there is no such generation."""
    entries = generations(shards)
    last = entries[number]
    manifest = shards.manifest

    def kept(part: Part) -> Part:
        """Return a part of the manifest with only the files of the generation and earlier ones."""
        # The manifest has no list of files per generation; their names contain the version that added them.
        files = [file for file in part.files if version_of_file(file.path) <= last.version]
        return replace(part, files=files, rows=sum(file.rows for file in files))

    older = replace(
        manifest,
        rows=last.total,
        copies=sum(generation.copies for generation in entries[: number + 1]),
        input=replace(manifest.input, fingerprint=last.fingerprint, rows=last.total),
        image=replace(manifest.image, mean=last.mean),
        workers=[kept(worker) for worker in manifest.workers],
        assignment=manifest.assignment and kept(manifest.assignment),
        generations=entries[: number + 1],
    )
    return replace(shards, manifest=older)


def sum_of_fingerprints(texts: Sequence[str]) -> str:
    """Return the fingerprint of all rows together, as ``rows-hash``."""
    parts = [text.partition("-") for text in texts]
    return f"{sum(int(rows) for rows, _, _ in parts)}-{sum(int(word, 16) for _, _, word in parts) % _WORD:016x}"


def _input(before: Input, new: Input) -> Input:
    """Return the origin of all rows: sums of the numbers, and fingerprint and listing of both parts together."""
    assert before.fingerprint, "a growing set has fingerprints"
    assert new.fingerprint, "a growing set has fingerprints"
    return replace(
        new,
        files=before.files + new.files,
        bytes=before.bytes + new.bytes,
        rows=before.rows + new.rows,
        fingerprint=sum_of_fingerprints([before.fingerprint, new.fingerprint]),
        listing=hashlib.sha256(f"{before.listing} {new.listing}".encode()).hexdigest(),
    )


def _worker(before: Worker, new: Worker) -> Worker:
    """Return the shard of a worker with the files and rows of one more generation."""
    return replace(
        before,
        rows=before.rows + new.rows,
        copies=before.copies + new.copies,
        files=[*before.files, *new.files],
        label_histogram=_add_counts(before.label_histogram, new.label_histogram),
    )


def _add_counts(one: list[int], other: list[int]) -> list[int]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return [value + (shorter[place] if place < len(shorter) else 0) for place, value in enumerate(longer)]


def _models(before: list[str] | None, new: list[str] | None) -> list[str] | None:
    """Return the paths of the models of both manifests; of two with the same name the newer one."""
    by_name = {name_of_model(path): path for path in [*(before or ()), *(new or ())]}
    return [*by_name.values()] or None


STREAM_STATE = "buckets"  # the model that a stream replaces at each append


def name_of_model(path: str) -> str:
    """Return a model file's path without its version: ``hash/arrays.npz`` for ``_model/v1-0123abcd/hash/arrays.npz``."""
    return path.removeprefix(MODEL).partition("/")[2]


def _sums(before: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    return {name: round(before.get(name, 0.0) + new.get(name, 0.0), 3) for name in dict.fromkeys((*before, *new))}
