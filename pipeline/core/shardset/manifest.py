"""The manifest of a committed shard set. Needs neither Spark nor torch, so that any reader can use it.

``OUTPUT/manifest.json`` defines the set: files that it does not list are not part of it. It is a copy of the newest
version (versions.py), and this project's own readers check that it is up to date."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.core.json_values import parse_object
from pipeline.core.shardset.contract import FORMAT_VERSION, Manifest
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.shardset.versions import NAME, path_of, versions_in_use
from pipeline.core.storage.retries import unreadable_is_data_error
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import names_dataframe, names_table


@dataclass(frozen=True)
class ShardSet:
    """A committed set: its store, the URI of its folder, and its manifest."""

    store: Store
    uri: str
    manifest: Manifest

    @property
    def num_workers(self) -> int:
        return self.manifest.num_workers

    def files(self) -> list[ShardFile]:
        """Return all shard files, worker by worker, in the order of ids within a worker."""
        return [file for worker in self.manifest.workers for file in worker.files]

    def eval_files(self) -> list[ShardFile]:
        """Return the files of the evaluation rows in the order of ids; empty without evaluation rows."""
        return self.manifest.evaluation.files if self.manifest.evaluation else []

    def assignment_files(self) -> list[ShardFile]:
        """Return the files that map rows to workers, in the order of ids; empty for sets of older versions."""
        return self.manifest.assignment.files if self.manifest.assignment else []

    def hashed_files(self) -> list[ShardFile]:
        """Return every file for which the manifest has rows, size and digest."""
        return [*self.files(), *self.eval_files(), *self.assignment_files()]

    def paths(self) -> set[str]:
        """Return the paths of all files of the set: shards, evaluation rows, assignment and models."""
        return {file.path for file in self.hashed_files()} | {*(self.manifest.model or ())}


def dumps(manifest: Manifest) -> bytes:
    return (json.dumps(manifest.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_committed(store: Store, uri: str) -> ShardSet | None:
    """Return the committed set at a URI, or None. Raises DataError for a manifest that this version cannot read.

    Reads manifest.json and, if it is outdated, the newest version. Costs one read and one listing."""
    uri = store.resolve(uri)
    while True:
        copy = _read(store, uri, NAME)
        newest = versions_in_use(store, uri).newest
        if newest <= (copy.manifest.version if copy else 0):
            return copy
        name = path_of("", newest).lstrip("/")
        shards = _read(store, uri, name)
        if shards is None:
            continue  # a newer version has replaced it meanwhile
        # manifest.json would stay older than this version, however often it is copied there.
        if shards.manifest.version != newest:
            raise _damaged(f"{uri}/{name}", f"its version is {shards.manifest.version}, not {newest}")
        return shards


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
        values = parse_object(data)
        version = values["format_version"]
    except (ValueError, KeyError):
        raise DataError(f"{uri}/{name} is not a shard manifest; move it away or choose another --output") from None
    # Checked before the fields: a newer format may have other fields without being damaged.
    if version != FORMAT_VERSION:
        raise DataError(f"{uri}/{name} has format version {str(version)[:80]}; this version reads {FORMAT_VERSION}")
    try:
        return ShardSet(store, uri, Manifest.from_json(values))
    except ValueError as fault:
        raise _damaged(f"{uri}/{name}", str(fault)) from None


def _damaged(path: str, fault: str) -> DataError:
    return DataError(f"{path} is damaged: {fault}; restore it, or move the folder away and make the set again")


def open_committed(store: Store, uri: str) -> ShardSet:
    """Return the committed set at a URI. Raises DataError if there is none."""
    shards = read_committed(store, uri)
    if shards is None:
        refuse_single_shard(store, uri)
        raise DataError(f"{uri} has no {NAME}: no shards were ever committed there; run sharding shard first")
    return shards


def refuse_single_shard(store: Store, uri: str) -> None:
    """Raise DataError with the right path if a URI is the folder of one worker in a committed set."""
    above, _, name = uri.rpartition("/")
    if name.startswith("worker=") and read_committed(store, above) is not None:
        raise DataError(f"{uri} is one shard of a set; give the folder of the set, {above}")


def materialize_command(shards: ShardSet) -> str:
    """Return the command that writes the shards of an assignment."""
    uri = shards.manifest.input.uri
    # The manifests of older versions do not name a table's id column.
    named = shards.manifest.input.id_column is not None
    if names_dataframe(uri):
        same = "DataFrame" if named else "DataFrame and id_column"
        return f"pipeline.materialize(assignment={shards.uri!r}, ...) from the same {same}"
    ids = " --id-column NAME" if names_table(uri) and not named else ""
    assignment, source, output = map(shlex.quote, (shards.uri, uri, f"{shards.uri}-shards"))
    return f"sharding materialize --assignment {assignment} --input {source}{ids} --output {output}"


def require_rows(shards: ShardSet) -> ShardSet:
    """Return the set itself. Raises DataError if it holds an assignment without shards."""
    if shards.manifest.assignment_only:
        raise DataError(
            f"{shards.uri} holds an assignment without shards; write them with {materialize_command(shards)}"
        )
    return shards


def missing_file(shards: ShardSet, *, models: bool = True) -> str | None:
    """Return a line about the first listed file that is missing or has another size, or None. O(files).

    models: whether models are checked too."""
    return next((line for _, line in _missing(shards, models=models)), None)


def missing_files(shards: ShardSet) -> dict[str, str]:
    """Return a line about every listed file that is missing or has another size, by its path. O(files)."""
    return dict(_missing(shards, models=True))


def _missing(shards: ShardSet, *, models: bool) -> Iterator[tuple[str, str]]:
    """Yield the path of each file of a set that is missing or has another size, and a line about it.

    Costs one listing per folder, of which a remote store answers many at once."""
    for path in shards.manifest.model or () if models else ():
        if not shards.store.exists(f"{shards.uri}/{path}"):
            yield path, f"{shards.uri}/{path} is missing"
    files = [*shards.hashed_files()]
    places = [f"{shards.uri}/{file.path}".rpartition("/") for file in files]
    listings = shards.store.list_all(folder for folder, _, _ in places)
    sizes = {folder: {entry.name: entry.bytes for entry in entries} for folder, entries in listings.items()}
    for file, (folder, _, name) in zip(files, places, strict=True):
        size = sizes[folder].get(name)
        if size != file.bytes:
            state = "is missing" if size is None else f"has {size} bytes, not {file.bytes}"
            yield file.path, f"{shards.uri}/{file.path} {state}"
