"""How rows are cut into write tasks, and what is counted in each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipeline.arrays import Ints


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
