"""A seeded permutation of integers without a table: exact, and the same on every machine."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash


def keyed_permutation(values: Ints, size: int, key: int) -> Ints:
    """Return pi(value) for a pseudo-random permutation pi of [0, size) chosen by ``key``.

    A balanced Feistel network of eight rounds with cycle walking (Black and Rogaway 2002). Each value is permuted
    independently, so a uniform shuffle of any number of rows needs neither a sort nor a table. O(rows)."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = np.asarray(values).astype(np.uint64)
    pending = np.arange(len(result))
    current = result.copy()
    while len(pending):
        left = current >> np.uint64(half)
        right = current & mask
        for turn in range(8):
            round_output = keyed_hash((right | np.uint64(turn) << np.uint64(48)).astype(np.int64), key) & mask
            left, right = right, left ^ round_output
        current = left << np.uint64(half) | right
        # Cycle walking: values outside the range are permuted again until they fall inside.
        is_inside = current < size
        result[pending[is_inside]] = current[is_inside]
        pending = pending[~is_inside]
        current = current[~is_inside]
    return result.astype(np.int64)
