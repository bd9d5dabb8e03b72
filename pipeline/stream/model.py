"""The models that a stream stores beside its rows: fitted hash functions (once) and bucket counters (every
generation)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from pyspark import SparkContext

from pipeline.clustering.hashes import Hashes
from pipeline.core.errors import DataError, UsageError
from pipeline.core.npz import from_bytes
from pipeline.core.shardset.commit import Move
from pipeline.core.shardset.generations import STREAM_STATE, name_of_model
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.storage.store import Store
from pipeline.input.scan import Scan
from pipeline.runs.steps.write import save_models
from pipeline.spark.images import Images
from pipeline.strategies import Context
from pipeline.strategies.hash import Hash
from pipeline.stream.buckets import StreamState

HASHES = "hashes"
ARRAYS = "arrays.npz"


def fit_functions(
    images: Images,
    scan: Scan,
    strategy: Hash,
    scratch: str,
    phase: Callable[[str], AbstractContextManager[None]],
) -> Hashes:
    """Fit the strategy's hash functions to the rows of a batch, or to a sample of them.

    Args:
        images: the rows of the batch.
        scan: their scan.
        strategy: the configuration of the hash functions.
        scratch: folder for the fit's files.
        phase: context manager that times a named phase.
    """
    # The functions of a stream depend neither on its chunks nor on its workers: any number will do.
    context = Context(
        images,
        scan,
        bounds=[(0, scan.rows)],
        num_workers=1,
        phase=phase,
        report=lambda text: None,
        scratch=scratch,
    )
    return strategy.fit_functions(context, images, grid=None)


def save_hashes(context: SparkContext, store: Store, hashes: Hashes, staging: str) -> list[Move]:
    """Save the hash functions as a spark.ml model without bucket counts, and return the files to move."""
    from pipeline.clustering.hash_model import HashModel  # loads spark.ml

    return save_models(context, store, {HASHES: HashModel(hashes, None, np.empty(0, np.int64))}, staging)


def save_state(store: Store, state: StreamState, staging: str) -> Move:
    """Write the counters to the attempt's folder and return the file to move."""
    path = f"_model/{STREAM_STATE}/{ARRAYS}"
    store.makedirs(f"{staging}/_model/{STREAM_STATE}")
    store.write_new(f"{staging}/{path}", state.to_bytes())
    return f"{staging}/{path}", path


def load_state(shards: ShardSet) -> StreamState:
    """Return the counters of a set. Raises DataError if they are missing or damaged."""
    path, data = _read(shards, STREAM_STATE)
    try:
        return StreamState.from_bytes(data)
    except ValueError as error:
        raise _damage_error(path, error) from None


def load_hashes(shards: ShardSet) -> Hashes:
    """Return the hash functions of a set.

    Raises DataError if they are missing or damaged, and UsageError if they hash real-valued features instead of
    pixels."""
    path, data = _read(shards, HASHES)
    try:
        arrays = from_bytes(data)
        grid = arrays.pop("grid", np.empty(0))
        arrays.pop("keys", None)
        hashes = Hashes.from_arrays(arrays)
    except ValueError as error:
        raise _damage_error(path, error) from None
    if grid.size:
        raise UsageError(f"{shards.uri} has hash functions of real-valued features; a stream takes images of uint8")
    return hashes


def _damage_error(path: str, error: ValueError) -> DataError:
    return DataError(f"{path} is damaged: {error}; restore it, or begin a new set")


def ready_hashes(store: Store, uri: str | None) -> Hashes | None:
    """Return the hash functions of a committed set, or None without a uri. Raises DataError if there is no such set."""
    return load_hashes(open_committed(store, store.resolve(uri))) if uri else None


def _read(shards: ShardSet, name: str) -> tuple[str, bytes]:
    """Return the path of a model's arrays and their bytes. Raises DataError if they are missing."""
    path_in_set = next(
        (path for path in shards.manifest.model or () if name_of_model(path) == f"{name}/{ARRAYS}"), None
    )
    if path_in_set is None:
        raise DataError(f"{shards.uri} has no hash functions and buckets: it was made by {shards.manifest.strategy}")
    try:
        return f"{shards.uri}/{path_in_set}", shards.store.read(f"{shards.uri}/{path_in_set}")
    except FileNotFoundError:
        raise DataError(f"{shards.uri}/{path_in_set} is missing; the set is damaged") from None
