"""The manifest of a committed shard set. Needs neither Spark nor torch, so that any reader can use it.

``OUTPUT/manifest.json`` defines the set: files that it does not list are not part of it. It is a copy of the newest
version (versions.py), and this project's own readers check that it is up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.json_values import fits, parse_object
from pipeline.core.shardset.versions import NAME, path_of, taken, version_of
from pipeline.core.storage.retries import unreadable_is_data_error
from pipeline.core.storage.store import Store

FORMAT_VERSION = 1
# Types of the keys that readers use, of a manifest and of some of its parts. Keys may be absent.
TYPES: dict[str, Any] = {
    "version": int,
    "rows": int,
    "copies": int,
    "generation": str,
    "strategy": str,
    "params": dict[str, Any],
    "asked": dict[str, Any],
    "ratios": list[int] | None,
    "chunks": list[list[int]],
    "neighbourhoods": list[dict[str, Any]] | None,
    "generations": list[dict[str, Any]] | None,
    "assignment_only": bool,
    "made": dict[str, str],
    "input": dict[str, Any],
    "image": dict[str, Any],
    "labels": dict[str, Any],
    "identity": str,
}
PARTS: dict[str, dict[str, Any]] = {
    "input": {"uri": str, "fingerprint": str | None, "listing": str},
    "image": {"shape": list[int], "dtype": str, "layout": str, "mean": list[float]},
    "labels": {"num_classes": int, "columns": list[str]},
}
FINGERPRINT = re.compile(r"\d+-[0-9a-f]{16}")
MOST_TEXT = 1024  # characters of a path or a name, so that a message that quotes it stays one readable line


@dataclass(frozen=True)
class ShardFile:
    """A file of a set.

    Attributes:
        path: relative to OUTPUT.
        rows: includes copies.
        bytes: size of the file.
        sha256: digest of the file's bytes.
    """

    path: str
    rows: int
    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ShardFile:
        """Return the file of a manifest's entry. Keys that a later version has added are ignored."""
        return cls(entry["path"], entry["rows"], entry["bytes"], entry["sha256"])


@dataclass(frozen=True)
class ShardSet:
    """A committed set: its store, the URI of its folder, and its manifest as parsed JSON."""

    store: Store
    uri: str
    manifest: dict[str, Any]

    @property
    def num_workers(self) -> int:
        return int(self.manifest["num_workers"])

    def files(self) -> list[ShardFile]:
        """Return all shard files, worker by worker, in the order of ids within a worker."""
        return [ShardFile.from_json(file) for worker in self.manifest["workers"] for file in worker["files"]]

    def eval_files(self) -> list[ShardFile]:
        """Return the files of the evaluation rows in the order of ids; empty without evaluation rows."""
        return [ShardFile.from_json(file) for file in (self.manifest.get("eval") or {}).get("files", [])]

    def assignment_files(self) -> list[ShardFile]:
        """Return the files that map rows to workers, in the order of ids; empty for sets of older versions."""
        return [ShardFile.from_json(file) for file in (self.manifest.get("assignment") or {}).get("files", [])]

    def hashed_files(self) -> list[ShardFile]:
        """Return every file for which the manifest has rows, size and digest."""
        return [*self.files(), *self.eval_files(), *self.assignment_files()]

    def paths(self) -> set[str]:
        """Return the paths of all files of the set: shards, evaluation rows, assignment and models."""
        model = (self.manifest.get("model") or {}).get("files", [])
        return {file.path for file in self.hashed_files()} | {file["path"] for file in model}


def dumps(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def with_paths(manifest: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """Return a manifest with other file paths. place(path): the new path of a file, relative to OUTPUT."""

    def moved(part: dict[str, Any] | None) -> dict[str, Any] | None:
        return part and {**part, "files": [{**file, "path": place(file["path"])} for file in part["files"]]}

    return {
        **manifest,
        "workers": [moved(worker) for worker in manifest["workers"]],
        "eval": moved(manifest["eval"]),
        "model": moved(manifest["model"]),
        "assignment": moved(manifest.get("assignment")),
    }


def read_committed(store: Store, uri: str) -> ShardSet | None:
    """Return the committed set at a URI, or None. Raises DataError for a manifest that this version cannot read.

    Reads manifest.json and, if it is outdated, the newest version. Costs one read and one listing."""
    uri = store.resolve(uri)
    while True:
        copy = _read(store, uri, NAME)
        newest = taken(store, uri).newest
        if newest <= (version_of(copy.manifest) if copy else 0):
            return copy
        if found := _read(store, uri, path_of("", newest).lstrip("/")):
            return found  # otherwise a newer version has replaced it meanwhile


def _read(store: Store, uri: str, name: str) -> ShardSet | None:
    """Return the set of the manifest at a path under OUTPUT, or None if there is no such file."""
    with unreadable_is_data_error(f"{uri}/{name}"):
        try:
            data = store.read(f"{uri}/{name}")
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise DataError(f"{uri} is a file, not a folder of shards") from None
    try:
        manifest = parse_object(data)
        version = manifest["format_version"]
    except (ValueError, KeyError):
        raise DataError(f"{uri}/{name} is not a shard manifest; move it away or choose another --output") from None
    if version != FORMAT_VERSION:
        raise DataError(f"{uri}/{name} has format version {str(version)[:80]}; this version reads {FORMAT_VERSION}")
    if fault := _fault(manifest):
        raise DataError(f"{uri}/{name} is damaged: {fault}; restore it, or make the set again with --overwrite")
    return ShardSet(store, uri, manifest)


def _fault(manifest: dict[str, Any]) -> str | None:
    """Return the first fault in a manifest's values, workers and files, or None.

    Readers and writers join its paths to their own folders, so paths that lead out of the set's folder are refused."""
    workers = manifest.get("workers")
    if not isinstance(workers, list) or not _is_count(manifest.get("num_workers")):
        return "num_workers or workers is missing"
    if fault := _mistyped(manifest):
        return fault
    parts = {f"workers[{index}]": worker for index, worker in enumerate(workers)}
    parts |= {name: manifest[name] for name in ("eval", "assignment", "model") if manifest.get(name) is not None}
    for name, part in parts.items():
        files = part.get("files") if isinstance(part, dict) else None
        if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
            return f"{name} has no list of files"
        for file in files:
            path = file.get("path")
            if not isinstance(path, str) or not _stays_inside(path):
                return f"{name} lists the path {str(path)[:80]!r}, which is not one inside the set's folder"
            counted = _is_count(file.get("rows")) and _is_count(file.get("bytes"))
            if name != "model" and not (counted and isinstance(file.get("sha256"), str) and file["sha256"]):
                return f"{name} lists {path} without its rows, bytes and sha256"
            # Rows of a shard are not compressed, and readers allocate memory for the listed number before they read.
            if name not in ("model", "assignment") and file["rows"] > file["bytes"]:
                return f"{name} lists {path} with {file['rows']} rows in {file['bytes']} bytes"
            if name == "model" and path.count("/") < 2:
                return f"model lists the path {path!r}, which is not _model/VERSION/NAME"
    return None


def _mistyped(manifest: dict[str, Any]) -> str | None:
    """Return in words the first value that has another type than readers rely on, or None."""
    places = {"": manifest} | {f"{name}.": manifest[name] for name in PARTS if isinstance(manifest.get(name), dict)}
    for place, part in places.items():
        for key, hint in (PARTS[place.rstrip(".")] if place else TYPES).items():
            if key not in part:
                continue
            value = part[key]
            # The URI of an input is as long as its user made it.
            too_long = key != "uri" and isinstance(value, str) and len(value) > MOST_TEXT
            if too_long or not fits(value, hint):
                return f"{place}{key} is {str(value)[:80]!r}"
    found = (manifest.get("input") or {}).get("fingerprint")
    if found is not None and not FINGERPRINT.fullmatch(found):
        return f"input.fingerprint is {found[:80]!r}"
    return None


def _is_count(value: object) -> bool:
    return fits(value, int) and isinstance(value, int) and value >= 0


def _stays_inside(path: str) -> bool:
    """True if a path is relative, cannot leave its folder and is no longer than a store's."""
    return (
        len(path) <= MOST_TEXT
        and all(part not in ("", ".", "..") for part in path.split("/"))
        and not set(path) & set("\\\0\n:*?")
    )


def open_committed(store: Store, uri: str) -> ShardSet:
    """Return the committed set at a URI. Raises DataError if there is none."""
    shards = read_committed(store, uri)
    if shards is None:
        refuse_single_shard(store, uri)
        raise DataError(f"{uri} has no {NAME}: no shards were ever committed there; run a job of jobs/ first")
    return shards


def refuse_single_shard(store: Store, uri: str) -> None:
    """Raise DataError with the right path if a URI is the folder of one worker in a committed set."""
    above, _, name = uri.rpartition("/")
    if name.startswith("worker=") and read_committed(store, above) is not None:
        raise DataError(f"{uri} is one shard of a set; give the folder of the set, {above}")


def with_rows(shards: ShardSet) -> ShardSet:
    """Return the set itself. Raises DataError if it holds an assignment without shards."""
    if shards.manifest.get("assignment_only"):
        raise DataError(
            f"{shards.uri} holds an assignment without shards; write them with spark-submit jobs/materialize.py"
            f" --assignment {shards.uri} --input {shards.manifest['input']['uri']} --output {shards.uri}-shards"
        )
    return shards


def missing_file(shards: ShardSet) -> str | None:
    """Return a line about the first listed file that is missing or has another size, or None. O(files)."""
    return next(_missing(shards), None)


def missing_files(shards: ShardSet) -> list[str]:
    """Return a line about every listed file that is missing or has another size. O(files)."""
    return list(_missing(shards))


def _missing(shards: ShardSet) -> Iterator[str]:
    folders: dict[str, dict[str, int]] = {}
    for path in [file["path"] for file in (shards.manifest.get("model") or {}).get("files", [])]:
        if not shards.store.exists(f"{shards.uri}/{path}"):
            yield f"{shards.uri}/{path} is missing"
    for file in shards.hashed_files():
        folder, _, name = file.path.rpartition("/")
        if folder not in folders:
            folders[folder] = {entry.name: entry.bytes for entry in shards.store.list(f"{shards.uri}/{folder}")}
        size = folders[folder].get(name)
        if size != file.bytes:
            state = "is missing" if size is None else f"has {size} bytes, not {file.bytes}"
            yield f"{shards.uri}/{file.path} {state}"
