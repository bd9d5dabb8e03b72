"""The manifest: what a committed shard set holds. No Spark, no torch, so that any reader can use it.

``OUTPUT/manifest.json`` is what a reader goes by: files it does not list are not part of the set. It is a copy of the
newest version (versions.py), which this project's own readers hold it against."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DataError
from pipeline.shardset.versions import NAME, path_of, taken, version_of
from pipeline.storage.store import Store

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ShardFile:
    """path is relative to OUTPUT; rows counts copies too; sha256 of the file's bytes."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardSet:
    """A committed set: where it is and its manifest, as parsed JSON."""

    store: Store
    uri: str
    manifest: dict[str, Any]

    @property
    def num_workers(self) -> int:
        return int(self.manifest["num_workers"])

    def files(self) -> list[ShardFile]:
        """All shard files, worker by worker, in id order inside a worker."""
        return [ShardFile(**file) for worker in self.manifest["workers"] for file in worker["files"]]

    def eval_files(self) -> list[ShardFile]:
        """Those of the evaluation rows, in id order; none where there are no such rows."""
        return [ShardFile(**file) for file in (self.manifest.get("eval") or {}).get("files", [])]

    def paths(self) -> set[str]:
        """Every file the set owns: shards, evaluation rows and models."""
        beside = [self.manifest[key] for key in ("eval", "model") if self.manifest.get(key)]
        return {file.path for file in self.files()} | {file["path"] for part in beside for file in part["files"]}


def dumps(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def with_paths(manifest: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """A manifest whose files are elsewhere. place(path): the new path of a file under OUTPUT."""

    def moved(part: dict[str, Any] | None) -> dict[str, Any] | None:
        return part and {**part, "files": [{**file, "path": place(file["path"])} for file in part["files"]]}

    return {
        **manifest,
        "workers": [moved(worker) for worker in manifest["workers"]],
        "eval": moved(manifest["eval"]),
        "model": moved(manifest["model"]),
    }


def read_committed(store: Store, uri: str) -> ShardSet | None:
    """The committed set at a place, or None. Raises DataError for a manifest that this version cannot read.

    manifest.json, unless a newer version was committed than it is a copy of. One read and one listing."""
    uri = store.resolve(uri)
    while True:
        copy = _read(store, uri, NAME)
        newest = taken(store, uri).newest
        if newest <= (version_of(copy.manifest) if copy else 0):
            return copy
        if found := _read(store, uri, path_of("", newest).lstrip("/")):
            return found  # else a newer one has replaced it since


def _read(store: Store, uri: str, name: str) -> ShardSet | None:
    """The set that a manifest at a path under OUTPUT tells of; None where there is none."""
    try:
        data = store.read(f"{uri}/{name}")
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise DataError(f"{uri} is a file, not a folder of shards") from None
    try:
        manifest = json.loads(data)
        version = manifest["format_version"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{uri}/{name} is not a shard manifest; move it away or choose another --output") from None
    if version != FORMAT_VERSION:
        raise DataError(f"{uri}/{name} has format version {version}; this version reads {FORMAT_VERSION}")
    return ShardSet(store, uri, manifest)


def open_committed(store: Store, uri: str) -> ShardSet:
    """The committed set at a place. Raises DataError where there is none."""
    shards = read_committed(store, uri)
    if shards is None:
        raise DataError(f"{uri} has no {NAME}: no shards were ever committed there; run a job of jobs/ first")
    return shards


def missing_file(shards: ShardSet) -> str | None:
    """The first listed file that is absent or of another size, as a line; None when all are there. O(files)."""
    return next(_missing(shards), None)


def missing_files(shards: ShardSet) -> list[str]:
    """All of them."""
    return list(_missing(shards))


def _missing(shards: ShardSet) -> Iterator[str]:
    folders: dict[str, dict[str, int]] = {}
    for path in [file["path"] for file in (shards.manifest.get("model") or {}).get("files", [])]:
        if not shards.store.exists(f"{shards.uri}/{path}"):
            yield f"{shards.uri}/{path} is missing"
    for file in [*shards.files(), *shards.eval_files()]:
        folder, _, name = file.path.rpartition("/")
        if folder not in folders:
            folders[folder] = {entry.name: entry.bytes for entry in shards.store.list(f"{shards.uri}/{folder}")}
        size = folders[folder].get(name)
        if size != file.bytes:
            state = "is missing" if size is None else f"has {size} bytes, not {file.bytes}"
            yield f"{shards.uri}/{file.path} {state}"
