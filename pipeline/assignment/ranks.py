"""Exact ranks of rows inside their groups.

Two passes give every row its rank in its group without a shuffle: count rows by (chunk, group), take prefix sums over
chunks (both tiny), then number the rows of each chunk from its offset, in id order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipeline.core.arrays import Ints


def ranks(groups: Ints, offsets: Ints) -> Ints:
    """Return the 0-based rank of each row in its group, in the given order; advances ``offsets`` [groups] in place. O(r
    log r)."""
    order = np.argsort(groups, kind="stable")
    sorted_groups = groups[order]
    firsts = np.flatnonzero(np.diff(sorted_groups, prepend=-1))
    counts = np.diff(firsts, append=len(sorted_groups))
    result = np.empty(len(groups), np.int64)
    result[order] = np.arange(len(groups)) - np.repeat(firsts, counts) + offsets[sorted_groups]
    offsets[sorted_groups[firsts]] += counts
    return result


def split_by_key(keys: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each key that occurs, ascending, and the places of its rows in order, int64.

    O(r log r) for r rows and any number of keys."""
    order = np.argsort(keys, kind="stable")
    # One mask per key would read all rows once for every key.
    for places in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        if len(places):
            yield int(keys[places[0]]), places


def runs_of_equal_keys(keys: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (key, first, end) of each run of equal keys. keys: 0 or more, ascending."""
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    for first, end in pairwise([*firsts.tolist(), len(keys)]):
        yield int(keys[first]), first, end
