"""Sets that grow: each append adds a generation of rows, as the next version of the manifest.

A version lists all files of the previous version and those of one more generation, so readers only see complete
generations, and every reader of shard sets can read a growing set. The key ``generations`` of the manifest describes each
of them; ``batch`` is the number that the source gave it, by which a repeated batch is recognised. The name of a file
contains the version that added it. The manifest grows by about 230 bytes per file, and a generation has at least one file
per worker that gets rows. No Spark."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pipeline.core.errors import DataError
from pipeline.core.json_values import build
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.versions import NAME

KEY = "generations"
MODEL = "_model/"
_VERSION = re.compile(r"-v(\d+)-\w+\.parquet")
_WORD = 1 << 64
Set = TypeVar("Set", bound=ShardSet)


@dataclass(frozen=True)
class Generation:
    """One generation of a growing set.

    Attributes:
        number: counts from 0.
        version: version of the manifest that added it.
        batch: its number in the source.
        source: digest of the batch's origin.
        rows: rows of this generation, without copies.
        copies: copies of this generation's rows.
        total: rows up to and including this generation.
        fingerprint: of those rows.
        mean: of each channel over those rows.
        quarantined: records that were put aside.
        closes: whether a window ends with this generation.
        seconds: from the start of the batch to its commit.
        buckets: number of buckets up to and including this generation.
    """

    number: int
    version: int
    batch: int
    source: str
    rows: int
    copies: int
    total: int
    fingerprint: str
    mean: list[float]
    quarantined: int = 0
    closes: bool = False
    seconds: float = 0.0
    buckets: int = 0


def generations(shards: ShardSet) -> list[Generation]:
    """Return the generations of a set, oldest first; empty for a set that was made at once.

    Raises DataError if their entries in the manifest are malformed."""
    known = Generation.__dataclass_fields__
    entries = shards.manifest.get(KEY) or []
    # as_of() needs these parts, which a set that was made at once may lack.
    parts = ("input", "image", "assignment") if entries else ()
    if missing := next((name for name in parts if not isinstance(shards.manifest.get(name), dict)), None):
        raise DataError(f"{shards.uri}/{NAME} is damaged: it has {KEY} and no {missing}; restore it")
    try:
        return [
            build(Generation, {name: value for name, value in entry.items() if name in known} | {"number": number})
            for number, entry in enumerate(entries)
        ]
    except ValueError as error:
        raise DataError(f"{shards.uri}/{NAME} is damaged: {KEY}: {error}; restore it") from None


def last_batch(shards: ShardSet) -> int:
    """Return the number of the batch that was committed last, -1 before the first."""
    return max((generation.batch for generation in generations(shards)), default=-1)


def version_of_file(path: str) -> int:
    """Return the version that added a file, 0 if its name contains none."""
    found = _VERSION.search(path)
    return int(found[1]) if found else 0


def appended(before: dict[str, Any] | None, made: dict[str, Any]) -> dict[str, Any]:
    """Return a set's manifest with one more generation. O(files).

    Values that cannot be summed, such as the neighbourhoods, are those of ``made``; models are merged by name.

    Args:
        before: manifest of the set, None for the first generation.
        made: manifest of the new generation alone, with final paths and version and one entry in ``generations``.
    """
    entry = made[KEY][0] | {"version": made["version"]}
    if before is None:
        return made | {KEY: [entry]}
    rows = before["rows"] + made["rows"]
    copies = before["copies"] + made["copies"]
    return made | {
        "rows": rows,
        "copies": copies,
        "input": _input(before["input"], made["input"]),
        "chunks": [*before["chunks"], *made["chunks"]],
        "workers": [_worker(*pair) for pair in zip(before["workers"], made["workers"], strict=True)],
        "eval": before["eval"],
        "model": _models(before["model"], made["model"]),
        "assignment": _files(before["assignment"], made["assignment"]),
        "seconds": _sums(before["seconds"], made["seconds"]),
        KEY: [*before[KEY], entry],
    }


def as_of(shards: Set, number: int) -> Set:
    """Return the set as it was after generation ``number``: its files, rows, fingerprint and means. O(files).

    Class counts per worker and sizes of neighbourhoods stay those of the newest generation. Raises IndexError if there is
    no such generation."""
    last = generations(shards)[number]
    manifest = shards.manifest

    def kept(part: dict[str, Any]) -> dict[str, Any]:
        files = [file for file in part["files"] if version_of_file(file["path"]) <= last.version]
        return part | {"files": files, "rows": sum(file["rows"] for file in files)}

    older = manifest | {
        "rows": last.total,
        "copies": sum(generation.copies for generation in generations(shards)[: number + 1]),
        "input": manifest["input"] | {"fingerprint": last.fingerprint, "rows": last.total},
        "image": manifest["image"] | {"mean": last.mean},
        "workers": [kept(worker) for worker in manifest["workers"]],
        "assignment": kept(manifest["assignment"]),
        KEY: manifest[KEY][: number + 1],
    }
    return replace(shards, manifest=older)


def sum_of_fingerprints(texts: Sequence[str]) -> str:
    """Return the fingerprint of all rows together, as ``rows-hash``."""
    parts = [text.partition("-") for text in texts]
    return f"{sum(int(rows) for rows, _, _ in parts)}-{sum(int(word, 16) for _, _, word in parts) % _WORD:016x}"


def _input(before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    listing = hashlib.sha256(f"{before['listing']} {made['listing']}".encode()).hexdigest()
    sums = {name: before[name] + made[name] for name in ("files", "bytes", "rows")}
    prints = sum_of_fingerprints([before["fingerprint"], made["fingerprint"]])
    return made | sums | {"fingerprint": prints, "listing": listing}


def _worker(before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    return _files(before, made) | {
        "copies": before["copies"] + made["copies"],
        "label_histogram": _added(before["label_histogram"], made["label_histogram"]),
    }


def _files(before: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    return before | {"rows": before["rows"] + made["rows"], "files": [*before["files"], *made["files"]]}


def _added(one: list[int], other: list[int]) -> list[int]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return [value + (shorter[place] if place < len(shorter) else 0) for place, value in enumerate(longer)]


def _models(before: dict[str, Any] | None, made: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the models of both manifests; of two with the same name the newer one."""
    by_name = {name_of_model(file["path"]): file for part in (before, made) if part for file in part["files"]}
    return {"files": list(by_name.values())} if by_name else None


def name_of_model(path: str) -> str:
    """Return a model file's path without its version: ``hash/arrays.npz`` for ``_model/v1-0123abcd/hash/arrays.npz``."""
    return path.removeprefix(MODEL).partition("/")[2]


def _sums(before: dict[str, float], made: dict[str, float]) -> dict[str, float]:
    return {name: round(before.get(name, 0.0) + made.get(name, 0.0), 3) for name in dict.fromkeys((*before, *made))}
