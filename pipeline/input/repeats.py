"""Rows that have the image of another row, and evaluation rows that have the image of a training row. Pure.

Images are compared by a 64-bit hash of their bytes. Each task sends the hashes of its rows to buckets, and one task per
bucket sorts what it gets, so that no process holds the hashes of all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.shardset.parts import Repeats

BUCKET_ROWS = 1 << 22  # rows that a task sorts: 64 MiB
EXAMPLES = 5
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ImageHashes:
    """Hashes of images. hashes: uint64 [rows]. ids: int64 [rows]. is_evaluation: whether these are evaluation rows."""

    hashes: Hashes
    ids: Ints
    is_evaluation: bool


def num_buckets(rows: int) -> int:
    return max(1, -(-rows // BUCKET_ROWS))


def split_by_bucket(images: ImageHashes, buckets: int) -> Iterator[tuple[int, ImageHashes]]:
    """Yield the rows of each bucket; equal hashes have the same one. O(rows x buckets)."""
    places = (images.hashes >> np.uint64(32)).astype(np.int64) * buckets >> 32
    for bucket in range(buckets):
        inside = places == bucket
        if inside.any():
            yield bucket, ImageHashes(images.hashes[inside], images.ids[inside], images.is_evaluation)


def find_repeats(parts: Sequence[ImageHashes]) -> Repeats:
    """Return the repeats among all rows of a bucket. O(rows log rows)."""
    hashes = np.concatenate([np.zeros(0, np.uint64), *(part.hashes for part in parts)])
    ids = np.concatenate([np.zeros(0, np.int64), *(part.ids for part in parts)])
    side = np.concatenate([np.zeros(0, np.bool_), *(np.full(len(part.ids), part.is_evaluation) for part in parts)])
    # Training rows first in each run of equal images, so that a run's first row is the one that others repeat.
    order = np.lexsort((ids, side, hashes))
    firsts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order][:1]))
    original = np.repeat(order[firsts], np.diff(firsts, append=len(order)))
    repeats = (original != order) & ~side[order]
    leaks = side[order] & ~side[original]
    return Repeats(
        int(repeats.sum()),
        int(leaks.sum()),
        _pairs(ids, original[repeats], order[repeats]),
        _pairs(ids, original[leaks], order[leaks]),
    )


def _pairs(ids: Ints, originals: Ints, others: Ints) -> list[list[int]]:
    """Return [id of the first row with an image, id of the other one], for the lowest other ids."""
    lowest = np.argsort(ids[others], kind="stable")[:EXAMPLES]
    pairs: list[list[int]] = np.stack([ids[originals[lowest]], ids[others[lowest]]], axis=1).tolist()
    return pairs


def merge_repeats(parts: Sequence[Repeats]) -> Repeats:
    """Return the repeats of all buckets."""

    def lowest(pairs: list[list[int]]) -> list[list[int]]:
        return sorted(pairs, key=lambda pair: pair[1])[:EXAMPLES]

    return Repeats(
        sum(part.rows for part in parts),
        sum(part.evaluation for part in parts),
        lowest([pair for part in parts for pair in part.examples]),
        lowest([pair for part in parts for pair in part.evaluation_examples]),
    )
