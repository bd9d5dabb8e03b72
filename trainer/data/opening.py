"""The opening of a shard set: its manifest is read and checked."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.manifest import missing_file, read_committed, refuse_single_shard, require_rows
from pipeline.core.shardset.schema import DTYPES
from pipeline.core.shardset.versions import NAME
from pipeline.core.storage.retries import unreadable_is_data_error, with_retries
from pipeline.core.storage.store import Store, configured_store
from pipeline.core.storage.uri import split_uri
from trainer.config import SEPARATOR
from trainer.data.bare_shards import SUFFIX, bare_files, open_bare
from trainer.data.shards import Shards


def open_shards(uri: str, *, lists_files: bool = True) -> Shards:
    """Open a committed set at a local path, ``hdfs://``, ``s3://`` or ``webhdfs://host:port/``, and check its manifest.

    Several paths, joined by SEPARATOR, or a Parquet file are shards without a manifest; see bare_shards.py. For a set,
    reads no row; costs one read and one listing per worker. Raises DataError if the set is missing or damaged.

    lists_files: whether all files of a set must be there; False without the listings, for a process of a run that has
    listed them, as every file is checked when it is read."""
    uri = os.fspath(uri)  # a path of pathlib, from Python
    uris = uri.split(SEPARATOR)
    store = store_of(uris[0])
    if len(uris) > 1 or (uri.endswith(SUFFIX) and not _is_folder(store, uri)):
        return open_bare(store, uris)
    with unreadable_is_data_error(uri):
        absolute = store.resolve(uri)
        store.exists(absolute)  # not retried, so that an unreachable host is reported at once
        committed = with_retries(read_committed)(store, uri)  # the manifest may be on a DataNode that was just lost
    if committed is None:
        refuse_single_shard(store, absolute)
        if bare_files(store, absolute):
            return open_bare(store, uris)
        raise DataError(
            f"{absolute} has no {NAME}: no shards were ever committed there; make them with"
            f" sharding shard --strategy stratified --input DATA --output {uri} --workers N"
        )
    shards = Shards(committed.store, committed.uri, require_rows(committed).manifest)
    try:
        shards.manifest.require("rows", "labels", "image")
        _check_layout(shards)
        _check_workers(shards)
        with unreadable_is_data_error(shards.uri):
            problem = missing_file(shards) if lists_files else None
            # An append or a replacement deletes files of the version that was read before it.
            is_replaced = problem is not None and with_retries(read_committed)(store, uri) != committed
    except ValueError as error:
        raise DataError(
            f"{shards.uri}/{NAME} is damaged ({' '.join(str(error).split())}); rerun the job that made it"
        ) from None
    if is_replaced:
        return open_shards(uri, lists_files=lists_files)
    if problem:
        raise DataError(f"{problem}: the set is damaged; rerun the job that made it")
    return shards


def _is_folder(store: Store, uri: str) -> bool:
    """Return whether a path is a folder, although it may have the suffix of a file."""
    with unreadable_is_data_error(uri), suppress(FileNotFoundError, NotADirectoryError):
        return with_retries(store.info)(store.resolve(uri)).is_dir
    return False


def store_of(uri: str) -> Store:
    """Return a store for reading a URI, with Hadoop's configuration unless it is a local path."""
    return Store() if split_uri(uri)[0] in ("", "file") else configured_store()


def _check_layout(shards: Shards) -> None:
    """Check the form of images and the sizes in the manifest.

    Raises DataError for images that this version does not read, ValueError for values that no job writes."""
    image = shards.manifest.image
    if image.dtype not in DTYPES or image.layout != "CHW":
        raise DataError(
            f"{shards.uri} holds {image.dtype} images in {image.layout} order; the trainer reads"
            f" {' and '.join(DTYPES)} in CHW: shard the data again with this version's jobs"
        )
    if any(abs(value) > float(np.finfo(np.float32).max) for value in image.mean):
        raise ValueError(f"means {image.mean}, which float32 does not hold")
    if min(shards.shape) < 1 or len(image.mean) != shards.shape[0] or shards.num_classes < 1 or shards.rows < 1:
        raise ValueError(f"image {image}, {shards.num_classes} classes, {shards.rows} rows")


def _check_workers(shards: Shards) -> None:
    """Raise DataError if a worker has no rows."""
    count = len(shards.manifest.workers)
    empty = [worker for worker in range(count) if not shards.worker_rows(worker)]
    if empty:
        fewer = max(1, count - len(empty))
        source, target = shlex.quote(shards.uri), shlex.quote(f"{shards.uri}-{fewer}")
        raise DataError(
            f"{shards.uri}: {len(empty)} of {count} workers have no rows (the first is {empty[0]}), and a worker"
            f" without rows cannot train; run sharding reshard --input {source} --output {target} --workers {fewer}"
        )
