"""A set that grows by generations: rows that are appended together, each generation as the next version of the manifest.

A version of such a set lists all files of the one before and those of one generation more, so readers see whole generations
only, and what reads any other set reads this one. ``generations`` in the manifest says what each was made of: ``batch`` is
the number that its source gave it, by which a batch that comes again is known. The number of the version that a file came
with stands in its name, so entries of files are those of any other set. The manifest grows by about 230 bytes a file: a
generation of a few thousand rows or less has one for each worker. No Spark."""

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
    """number: from 0; version: of the manifest, and of its files' names. batch: its number in its source; source: a digest
    of what the batch was. rows, copies: of this generation; total: rows up to it; fingerprint: of these; mean: of each
    channel over them. quarantined: records that were put aside; closes: whether a window ends with it; seconds: it took, up
    to the commit; buckets: up to it."""

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
    """Oldest first; none in a set that was made at once. Raises DataError where the manifest tells of them otherwise than it
    was written."""
    known = Generation.__dataclass_fields__
    try:
        return [
            build(Generation, {name: value for name, value in entry.items() if name in known} | {"number": number})
            for number, entry in enumerate(shards.manifest.get(KEY) or [])
        ]
    except ValueError as error:
        raise DataError(f"{shards.uri}/{NAME} is damaged: {KEY}: {error}; restore it") from None


def last_batch(shards: ShardSet) -> int:
    """The number of the batch that was committed last; -1 before the first."""
    return max((generation.batch for generation in generations(shards)), default=-1)


def version_of_file(path: str) -> int:
    """With which version of the set a file came; 0 where its name does not tell."""
    found = _VERSION.search(path)
    return int(found[1]) if found else 0


def appended(before: dict[str, Any] | None, made: dict[str, Any]) -> dict[str, Any]:
    """A set's manifest with a generation more. made: a manifest of that generation alone, its paths and its version final,
    with one entry under ``generations``; before: None for the first.

    What cannot be added up is taken as it is in ``made``: of the neighbourhoods, and of fitted models whatever it has anew.
    O(files)."""
    entry = made[KEY][0] | {"version": made["version"]}
    if before is None:
        return made | {KEY: [entry]}
    rows, copies = before["rows"] + made["rows"], before["copies"] + made["copies"]
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
    """The set as it was with generation ``number`` and none after it: its files, rows, fingerprint and means. Classes by
    worker and sizes of neighbourhoods are those of the newest. Raises IndexError where there is no such one. O(files)."""
    last, manifest = generations(shards)[number], shards.manifest

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
    """Of all rows together, as ``rows-hash``."""
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
    """Those of both; of two of one name the newer."""
    by_name = {name_of_model(file["path"]): file for part in (before, made) if part for file in part["files"]}
    return {"files": list(by_name.values())} if by_name else None


def name_of_model(path: str) -> str:
    """``hash/arrays.npz`` of ``_model/v1-0123abcd/hash/arrays.npz``."""
    return path.removeprefix(MODEL).partition("/")[2]


def _sums(before: dict[str, float], made: dict[str, float]) -> dict[str, float]:
    return {name: round(before.get(name, 0.0) + made.get(name, 0.0), 3) for name in dict.fromkeys((*before, *made))}
