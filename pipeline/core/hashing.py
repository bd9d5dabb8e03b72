"""Hash functions with equal results on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.core.arrays import Ints


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64-bit words bijectively (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def salts(keys: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the word of each key with which ``keyed_hash`` changes values before it mixes them: uint64 [keys]."""
    return splitmix64(np.array([key & 0xFFFFFFFFFFFFFFFF for key in keys], np.uint64))


def keyed_hash(values: Ints, key: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each value that depends on a key."""
    return splitmix64(np.asarray(values).astype(np.uint64) ^ salts([key]))


def is_drawn(ids: Ints, rows: int, count: int, key: int) -> npt.NDArray[np.bool_]:
    """Draw about ``count`` of ``rows`` ids, those with the smallest keyed hashes: bool [ids].

    The same ids are drawn for any partitioning."""
    if count >= rows:
        return np.ones(len(ids), np.bool_)
    is_below: npt.NDArray[np.bool_] = keyed_hash(ids, key) < np.uint64((count << 64) // rows)
    return is_below


def row_hashes(
    ids: Ints,
    labels: npt.NDArray[Any],
    coarse_labels: npt.NDArray[Any] | None,
    targets: npt.NDArray[np.float32] | None,
    images: npt.NDArray[Any],
) -> npt.NDArray[np.uint64]:
    """Return a hash of each row over id, labels, target and pixels: uint64 [rows]. About 0.7 us per CIFAR row.

    The sum modulo 2^64 is the fingerprint of a set. It is equal for equal sets in any order and partitioning, and differs
    if a row is lost, duplicated, relabelled or altered. images: [rows, ...]."""
    with np.errstate(over="ignore"):
        # Chained, not summed: values that change places between columns or rows change the hash. The constants tell a
        # coarse label from a target with the same bits.
        seeds = splitmix64(ids.astype(np.uint64))
        seeds = splitmix64(seeds + labels.astype(np.uint64))
        if coarse_labels is not None:
            seeds = splitmix64(seeds + coarse_labels.astype(np.uint64) + np.uint64(1))
        if targets is not None:
            seeds = splitmix64(seeds + targets.view(np.uint32).astype(np.uint64) + np.uint64(2))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, _images(images), seeds.tolist()), np.uint64, len(ids))


def image_hashes(images: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return a hash of the bytes of each image, equal for equal images: uint64 [rows]. images: [rows, ...]."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, _images(images)), np.uint64, len(images))


def _images(images: npt.NDArray[Any]) -> Iterator[memoryview]:
    """Yield the bytes of each image, without a copy if they are contiguous."""
    data = np.ascontiguousarray(images).reshape(-1).data.cast("B")
    size = len(data) // max(1, len(images))
    return (data[at : at + size] for at in range(0, len(data), size or 1))
