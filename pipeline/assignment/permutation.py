"""A seeded permutation of integers without a table: exact, and the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.hashing import salts, splitmix64


def keyed_permutation(values: Ints, size: int, key: int) -> Ints:
    """Return pi(value) for a pseudo-random permutation pi of [0, size) chosen by ``key``.

    A balanced Feistel network of eight rounds with cycle walking (Black and Rogaway 2002). Each value is permuted
    independently, so a uniform shuffle of any number of rows needs neither a sort nor a table. O(rows)."""
    values = np.asarray(values)
    return keyed_permutations(values, np.zeros(len(values), np.int64), np.array([size], np.int64), [key])


def keyed_permutations(values: Ints, groups: Ints, sizes: Ints, keys: Sequence[int]) -> Ints:
    """Return the value of each row permuted among the values of its group, as ``keyed_permutation`` does.

    One call for all groups: a call for each group would cost a block of rows of many classes milliseconds.

    Args:
        values: int64 [rows], each below the size of its group.
        groups: int64 [rows].
        sizes: int64 [groups].
        keys: one per group.
    """
    bits = [max(1, (max(size - 1, 1).bit_length() + 1) // 2) for size in sizes.tolist()]
    result = np.asarray(values).astype(np.uint64)
    pending = np.arange(len(result))
    current = result.copy()
    limits = sizes.astype(np.uint64)
    halves = np.array(bits, np.uint64)
    masks = (np.uint64(1) << halves) - np.uint64(1)
    words = salts(keys)
    # Numbers of a single group are scalars, with which numpy computes twice as fast.
    is_single = len(sizes) == 1
    places = 0 if is_single else groups
    limits = limits[places]
    halves = halves[places]
    masks = masks[places]
    words = words[places]
    while len(pending):
        left = current >> halves
        right = current & masks
        for turn in range(8):
            # This is keyed_hash() of the right half and the turn.
            round_output = splitmix64((right | np.uint64(turn << 48)) ^ words) & masks
            left, right = right, left ^ round_output
        current = left << halves | right
        # Cycle walking: values outside the range are permuted again until they fall inside.
        is_inside = current < limits
        result[pending[is_inside]] = current[is_inside]
        again = ~is_inside
        pending = pending[again]
        current = current[again]
        if not is_single:
            limits = limits[again]
            halves = halves[again]
            masks = masks[again]
            words = words[again]
    return result.astype(np.int64)
