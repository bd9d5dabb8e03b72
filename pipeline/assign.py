"""Who gets which row: exact ranks inside groups, and the hashes and permutations that need no table. Pure numpy.

Two passes give every row its rank in its group without a shuffle: count rows by (chunk, group), take prefix sums over
chunks (both tiny), then number the rows of each chunk from its offset, in id order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Start = Literal["zero", "carry"]
SparseIf = Literal["le", "lt", "never"]


@dataclass(frozen=True)
class GroupTable:
    """Per group: sizes int64 [groups], starts int64 [groups] (the worker of rank 0), sparse bool [groups]."""

    sizes: Ints
    starts: Ints
    sparse: npt.NDArray[np.bool_]
    num_workers: int

    @property
    def copies(self) -> int:
        """Rows added by broadcasting sparse groups: (n - 1) * sum of their sizes."""
        return int(self.sizes[self.sparse].sum()) * (self.num_workers - 1)


def group_table(sizes: Ints, num_workers: int, start: Start = "zero", sparse_if: SparseIf = "never") -> GroupTable:
    """Where each group begins and whether it is broadcast (SPEC 2.2, 2.3).

    start: "zero" as in the papers (low workers get all remainders), or "carry": where the group before left off among
    the dense rows, which keeps totals within one. sparse_if: a group is sparse with size <= n ("le", the pseudo-code),
    < n ("lt", the prose) or never; with one worker nothing is."""
    sizes = np.asarray(sizes, np.int64)
    limit = {"le": num_workers, "lt": num_workers - 1, "never": -1}[sparse_if]
    sparse = (sizes <= limit) & (sizes > 0) & (num_workers > 1)
    dense_before = np.concatenate([[0], np.cumsum(np.where(sparse, 0, sizes))[:-1]]) if len(sizes) else sizes
    starts = dense_before % num_workers if start == "carry" else np.zeros_like(sizes)
    return GroupTable(sizes, starts.astype(np.int64), sparse, num_workers)


def chunk_bounds(rows: int, num_workers: int, record_bytes: int) -> list[tuple[int, int]]:
    """The id ranges that are written by one task each, so one file a worker and chunk.

    Depends on the data and on N alone, never on the cluster: that is what makes the files the same bits anywhere.
    At least about 2,000 rows a file where the data allow it, at most about 64 MiB, and 16 chunks in between."""
    by_size = -(-rows * record_bytes // (num_workers * (64 << 20)))
    by_rows = rows // (num_workers * 2000)
    pieces = max(1, by_size, min(16, by_rows))
    cuts = [rows * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(cuts))


def count_by_chunk(ids: Ints, groups: Ints, num_groups: int, bounds: list[tuple[int, int]]) -> Ints:
    """Rows by (chunk, group): int64 [chunks, groups]. O(rows)."""
    starts = np.array([low for low, _ in bounds], np.int64)
    chunk = np.searchsorted(starts, ids, side="right") - 1
    flat = np.bincount(chunk * num_groups + groups, minlength=len(bounds) * num_groups)
    return flat.reshape(len(bounds), num_groups).astype(np.int64)


def offsets_by_chunk(counts: Ints) -> Ints:
    """The rank of the first row of each (chunk, group): exclusive prefix sums over chunks, int64 [chunks, groups]."""
    return np.cumsum(counts, axis=0) - counts


def ranks(groups: Ints, offsets: Ints) -> Ints:
    """0-based rank of each row in its group, in the order given; advances ``offsets`` [groups] in place. O(r log r)."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    counts = np.bincount(ordered, minlength=len(offsets)).astype(np.int64)
    firsts = np.cumsum(counts) - counts
    result = np.empty(len(groups), np.int64)
    result[order] = np.arange(len(groups)) - firsts[ordered] + offsets[ordered]
    offsets += counts
    return result


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele et al. 2014, a bijective mixer of 64-bit words."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keyed_hash(values: Ints, key: int) -> npt.NDArray[np.uint64]:
    """A seeded 64-bit hash of each value."""
    salt = splitmix64(np.array([key & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return splitmix64(np.asarray(values).astype(np.uint64) ^ salt)


def keyed_permutation(values: Ints, size: int, key: int) -> Ints:
    """pi(value) for a pseudo-random permutation pi of [0, size) chosen by ``key``.

    A balanced Feistel network of eight rounds with cycle walking (Black and Rogaway 2002): each row is placed on its
    own, so a uniform shuffle of any number of rows needs neither a sort nor a table. O(rows)."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = np.asarray(values).astype(np.uint64)
    pending = np.arange(len(result))
    current = result.copy()
    while len(pending):
        left, right = current >> np.uint64(half), current & mask
        for turn in range(8):
            mixed = keyed_hash((right | np.uint64(turn) << np.uint64(48)).astype(np.int64), key) & mask
            left, right = right, left ^ mixed
        current = left << np.uint64(half) | right
        done = current < size
        result[pending[done]] = current[done]
        pending, current = pending[~done], current[~done]
    return result.astype(np.int64)
