"""The split of rows into write tasks, and counts of rows by chunk and group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError

ROW_GROUP_ROWS = 1000  # limit for small images
ROW_GROUP_BYTES = 4 << 20  # limit for large images
BUFFER_BYTES = 512 << 20  # images buffered per task: two row groups of every worker
OPEN_FILES = 256  # files that a task keeps open
MOST_RANGES = 512  # ranges of workers
MOST_CHUNKS = 1 << 20
MIN_PIECE_ROWS = 256  # rows per task of a pass, at least
MAX_PIECE_BYTES = 1 << 30  # images that a task of a pass reads, at most
KEPT_BYTES = 64 << 20  # results that executors cache per task, at most


def workers_at_once(record_bytes: int) -> int:
    """Return the number of workers for which one task can buffer full-sized row groups and keep files open."""
    rows = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // record_bytes))
    return max(1, min(OPEN_FILES, BUFFER_BYTES // (2 * rows * record_bytes)))


def workers_per_task(num_workers: int, record_bytes: int) -> int:
    """Return the number of workers for which one task writes: all of them, or the length of a range of workers.

    There are at most MOST_RANGES ranges."""
    return min(num_workers, max(workers_at_once(record_bytes), -(-num_workers // MOST_RANGES)))


def row_group_rows(workers: int, record_bytes: int) -> int:
    """Return the rows per Parquet row group when one task writes for ``workers`` workers."""
    return max(1, min(ROW_GROUP_ROWS, BUFFER_BYTES // (2 * workers * record_bytes)))


def chunk_bounds(rows: int, num_workers: int, record_bytes: int) -> list[tuple[int, int]]:
    """Return the chunks of the rows, as consecutive id ranges (first, end). A worker gets one file per chunk.

    The ranges depend only on the data and on N, not on the cluster, so that the files have the same bytes everywhere.
    There are at most 16 chunks, and fewer if files would have less than 2,000 rows on average. There are more if files
    would exceed 64 MiB. Raises UsageError if that takes more than MOST_CHUNKS.

    Args:
        rows: number of all rows.
        num_workers: N.
        record_bytes: bytes of a row's image.
    """
    by_size = -(-rows * record_bytes // (num_workers * (64 << 20)))
    if by_size > MOST_CHUNKS:
        raise UsageError(f"{rows:,} rows over {num_workers:,} workers are {by_size:,} files each; use more workers")
    by_rows = rows // (num_workers * 2000)
    pieces = max(1, by_size, min(16, by_rows))
    cuts = [rows * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(cuts))


def piece_bounds(parts: list[tuple[int, int]], record_bytes: int) -> list[tuple[int, int]]:
    """Return the id ranges (first, end) that tasks read, in order, each within one chunk.

    With many workers there are few chunks, because each worker gets one file per chunk. To make enough tasks, chunks
    are divided in proportion to their rows. A chunk has at least one range. In all there is at least one range per
    20,000 rows, up to 16; for larger data one per 64 MiB, up to 256; beyond that one per 1 GiB, up to MOST_CHUNKS. The
    ranges depend on the data and on the chunks, not on the cluster.

    Args:
        parts: the chunks, as consecutive id ranges (see ``chunk_bounds``).
        record_bytes: bytes of a row's image.
    """
    rows = parts[-1][1]
    size = rows * record_bytes
    total_pieces = max(min(MOST_CHUNKS, size >> 30), min(256, max(size >> 26, min(16, rows // 20_000))))
    cuts: list[tuple[int, int]] = []
    for low, high in parts:
        inside = max(1, -(-total_pieces * (high - low) // max(1, rows)))
        cuts += pairwise(low + (high - low) * piece // inside for piece in range(inside + 1))
    return cuts


def pass_pieces(rows: int, record_bytes: int, cores: int) -> int:
    """Return the number of tasks of a pass over all rows: one per core, so that each core pays a task's fixed cost
    once.

    If a piece would exceed 1 GiB, the number is a multiple of the cores, so that a lost task costs minutes instead of
    the run."""
    rounds = -(-rows * record_bytes // (cores * MAX_PIECE_BYTES))
    return max(1, min(cores * max(1, rounds), rows // MIN_PIECE_ROWS))


def point_pieces(pieces: int, size: int) -> int:
    """Return the number of tasks of a pass whose results are cached by executors.

    It is a multiple of the tasks of other passes, with at most about 64 MiB of results per task, so that results that
    exceed the memory move to disk part by part.

    Args:
        pieces: number of tasks of other passes.
        size: bytes of all results.
    """
    return pieces * max(1, -(-size // (pieces * KEPT_BYTES)))


@dataclass(frozen=True)
class ChunkCounts:
    """Number of rows by (chunk, group) for consecutive chunks from ``first`` on: int64 [these chunks, groups].

    A task counts only the chunks in its id range. All tasks together therefore send about one number per chunk and
    group, whatever their number."""

    first: int
    table: Ints

    @property
    def stop(self) -> int:
        return self.first + len(self.table)

    @property
    def num_groups(self) -> int:
        return int(self.table.shape[1])

    def __add__(self, other: ChunkCounts) -> ChunkCounts:
        first = min(self.first, other.first)
        stop = max(self.stop, other.stop)
        table = np.zeros((stop - first, max(self.num_groups, other.num_groups)), np.int64)
        for part in (self, other):
            table[part.first - first : part.stop - first, : part.num_groups] += part.table
        return ChunkCounts(first, table)


def count_by_chunk(
    ids: Ints, groups: npt.NDArray[np.integer[Any]], num_groups: int, bounds: list[tuple[int, int]]
) -> ChunkCounts:
    """Return the number of rows by (chunk, group), from the first to the last chunk that contains an id.

    O(rows + these chunks x groups).

    Args:
        ids: int64 [rows], at least one.
        groups: group of each row.
        num_groups: number of groups.
        bounds: id ranges of all chunks.
    """
    starts = np.array([low for low, _ in bounds], np.int64)
    chunk = np.searchsorted(starts, ids, side="right") - 1
    first = int(chunk.min())
    chunks = int(np.ptp(chunk)) + 1
    flat = np.bincount((chunk - first) * num_groups + groups, minlength=chunks * num_groups)
    return ChunkCounts(first, flat.reshape(chunks, num_groups).astype(np.int64))


def sum_counts(parts: Iterable[ChunkCounts], num_chunks: int, num_groups: int = 0) -> Ints:
    """Return the sum of all parts, int64 [num_chunks, groups], with at least ``num_groups`` columns. O(size of the
    parts)."""
    parts = list(parts)
    total = np.zeros((num_chunks, max([num_groups, *(part.num_groups for part in parts)])), np.int64)
    for part in parts:
        total[part.first : part.stop, : part.num_groups] += part.table
    return total


def offsets_by_chunk(counts: Ints) -> Ints:
    """Return the rank of the first row of each (chunk, group): exclusive prefix sums over chunks, int64 [chunks,
    groups]."""
    return np.cumsum(counts, axis=0) - counts
