"""Comparison of a committed set's files with its manifest, by size and by content. No Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from pipeline.core.json_values import parse_object
from pipeline.core.npz import from_bytes
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.storage.retries import is_transient, with_retries
from pipeline.core.storage.store import Store

READ_BYTES = 8 << 20
T = TypeVar("T")
Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def content_digest(store: Store, paths: Sequence[str], run: Run) -> str:
    """Return a digest of the contents of some files in their order, as 16 hexadecimal digits. Reads every file."""
    digests = [digest for digest, _ in run(partial(_digest_and_size, store), paths)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _digest_and_size(store: Store, path: str) -> tuple[str, int]:
    """Return the SHA-256 of a file, in hexadecimal digits, and its bytes."""
    digest = hashlib.sha256()
    size = 0
    with store.open(path) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return digest.hexdigest(), size


def damage_of(store: Store, uri: str, file: ShardFile) -> str | None:
    """Read a whole file and return a line about its damage, or None."""
    path = f"{uri}/{file.path}"
    try:
        digest, size = _read_twice(_digest_and_size, store, path)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _read_error(store, path, error)
    # The size is reported first, because it shows a truncated file; a digest only shows that bytes differ.
    if size != file.bytes:
        return f"{path} has {size} bytes, not {file.bytes}"
    return None if digest == file.sha256 else f"{path} has other content than was committed"


def _read_twice(read: Callable[[Store, str], T], store: Store, path: str) -> T:
    """Return what ``read`` returns of a file; after a transient error it is tried again as soon as the store answers.

    Not more often: with thousands of files whose HDFS blocks are lost, each would wait a minute. Raises OSError."""
    try:
        return read(store, path)
    except OSError as error:
        if not is_transient(error):
            raise
    with_retries(store.info)(path)
    return read(store, path)


def _read_error(store: Store, path: str, error: OSError) -> str:
    """Return a line about a file that could not be read. Raises OSError if the store does not answer at all."""
    if is_transient(error):  # of the store, or of the file alone, such as a bad sector or lost HDFS blocks
        try:
            store.info(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError:
            raise OSError(f"{path} cannot be read: {error}") from error
    return f"{path} cannot be read: {error}"


def model_damage(store: Store, uri: str, name: str) -> str | None:
    """Read a file of a fitted model and return a line about its damage, or None. name: its path under the set.

    Arrays and metadata are checked; other files, of models that Spark writes itself, must only exist."""
    path = f"{uri}/{name}"
    try:
        data = _read_twice(Store.read, store, path)
        # The manifest has no digests of these files: an .npz file has checksums of its arrays, metadata must be JSON.
        if path.endswith(".npz"):
            from_bytes(data)
        elif "/metadata/part-" in path:
            parse_object(data)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _read_error(store, path, error)
    except ValueError as error:
        return f"{path} is damaged: {error}"
    return None


def all_damage(shards: ShardSet, run: Run, checked: Collection[str] = ()) -> dict[str, str]:
    """Read every file of a set and return a line per damaged file, by the file's path under the set.

    Args:
        shards: the set. Models are read first, because each append of a stream replaces them and keeps other files.
        run: run(fn, items) maps a function over files.
        checked: paths of files that are not read.
    """
    models = [path for path in shards.manifest.model or () if path not in checked]
    files = [file for file in shards.hashed_files() if file.path not in checked]
    lines = run(partial(model_damage, shards.store, shards.uri), models)
    lines += run(partial(damage_of, shards.store, shards.uri), files)
    paths = [*models, *(file.path for file in files)]
    return {path: line for path, line in zip(paths, lines, strict=True) if line}


def first_damage(shards: ShardSet, run: Run) -> str | None:
    """Return the line about the first damaged file, or None. Reads every file, as ``all_damage`` does."""
    return next(iter(all_damage(shards, run).values()), None)
