"""What a stream keeps beside its rows: the fitted hash functions, once, and the counters of its buckets, every time."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from pyspark import SparkContext

from pipeline.clustering.hashes import Hashes
from pipeline.errors import DataError, UsageError
from pipeline.input.scan import Scan
from pipeline.runs.write import save_models
from pipeline.shardset.commit import Move
from pipeline.shardset.generations import name_of_model
from pipeline.shardset.manifest import ShardSet, open_committed
from pipeline.spark.images import Images
from pipeline.storage.store import Store
from pipeline.strategies import Context
from pipeline.strategies.hash import Hash
from pipeline.stream.buckets import State

HASHES, STATE = "hashes", "buckets"
ARRAYS = "arrays.npz"


def fit_functions(
    images: Images,
    scan: Scan,
    strategy: Hash,
    scratch: str,
    phase: Callable[[str], AbstractContextManager[None]],
) -> Hashes:
    """The functions of a strategy, fitted to a keyed sample of the rows."""
    context = Context(images, scan, [(0, scan.rows)], 1, phase, lambda text: None, scratch)
    return strategy.fit_functions(context, images, None)


def save_hashes(context: SparkContext, store: Store, hashes: Hashes, staging: str) -> list[Move]:
    """As a spark.ml model, whose buckets are counted elsewhere; what to move."""
    from pipeline.clustering.hash_model import HashModel  # loads spark.ml

    return save_models(context, store, {HASHES: HashModel(hashes, None, np.empty(0, np.int64))}, staging)


def save_state(store: Store, state: State, staging: str) -> Move:
    """The counters; what to move."""
    path = f"_model/{STATE}/{ARRAYS}"
    store.makedirs(f"{staging}/_model/{STATE}")
    store.write_new(f"{staging}/{path}", state.to_bytes())
    return f"{staging}/{path}", path


def load_state(shards: ShardSet) -> State:
    """Raises DataError where the set has none."""
    return State.from_bytes(_read(shards, STATE))


def load_hashes(shards: ShardSet) -> Hashes:
    """Of pixels. Raises DataError where the set has none, UsageError for those of features."""
    with np.load(io.BytesIO(_read(shards, HASHES)), allow_pickle=False) as data:
        arrays = dict(data)
    del arrays["keys"]
    if len(arrays.pop("grid")):
        raise UsageError(f"{shards.uri} has hash functions of real-valued features; a stream takes images of uint8")
    return Hashes.from_arrays(arrays)


def ready_hashes(store: Store, uri: str | None) -> Hashes | None:
    """Those of a committed set; None where no set is named. Raises DataError where there is none."""
    return load_hashes(open_committed(store, store.resolve(uri))) if uri else None


def _read(shards: ShardSet, name: str) -> bytes:
    listed = [file["path"] for file in (shards.manifest["model"] or {}).get("files", [])]
    found = next((path for path in listed if name_of_model(path) == f"{name}/{ARRAYS}"), None)
    if found is None:
        raise DataError(f"{shards.uri} has no hash functions and buckets: it was made by {shards.manifest['strategy']}")
    try:
        return shards.store.read(f"{shards.uri}/{found}")
    except FileNotFoundError:
        raise DataError(f"{shards.uri}/{found} is missing; the set is damaged") from None
