"""How rows are cut into write tasks, and what is counted in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError

ROW_GROUP_ROWS = 1000  # of small images, and
ROW_GROUP_BYTES = 4 << 20  # of large ones
BUFFER_BYTES = 512 << 20  # of images that wait to be written, a task: two row groups of every worker
OPEN_FILES = 256  # of a task
MOST_RANGES = 512  # of workers
MOST_CHUNKS = 1 << 20
MIN_PIECE_ROWS = 256
MAX_PIECE_BYTES = 1 << 30
KEPT_BYTES = 64 << 20


def workers_at_once(record_bytes: int) -> int:
    """For how many workers a task can hold row groups as large as they should be, and a file."""
    rows = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // record_bytes))
    return max(1, min(OPEN_FILES, BUFFER_BYTES // (2 * rows * record_bytes)))


def workers_a_task(num_workers: int, record_bytes: int) -> int:
    """For how many workers a task writes: all, or a range of them, of which there are as few as a task has files open."""
    return min(num_workers, max(workers_at_once(record_bytes), -(-num_workers // MOST_RANGES)))


def row_group_rows(workers: int, record_bytes: int) -> int:
    """Of a row group, where a task writes for so many workers."""
    return max(1, min(ROW_GROUP_ROWS, BUFFER_BYTES // (2 * workers * record_bytes)))


def chunk_bounds(rows: int, num_workers: int, record_bytes: int) -> list[tuple[int, int]]:
    """The id ranges of files: one file a worker and chunk.

    Depends on the data and on N alone, never on the cluster: that is what makes the files the same bits anywhere.
    At least about 2,000 rows a file where the data allow it, at most about 64 MiB, and 16 chunks in between."""
    by_size = -(-rows * record_bytes // (num_workers * (64 << 20)))
    if by_size > MOST_CHUNKS:
        raise UsageError(f"{rows:,} rows over {num_workers:,} workers are {by_size:,} files each; use more workers")
    by_rows = rows // (num_workers * 2000)
    pieces = max(1, by_size, min(16, by_rows))
    cuts = [rows * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(cuts))


def piece_bounds(parts: list[tuple[int, int]], record_bytes: int) -> list[tuple[int, int]]:
    """Parts cut further where many workers leave few of them: the id ranges that a task reads, in order, each in one part.

    16 where the data allow 20,000 rows each, 64 MiB each up to 256 of them, and 1 GiB each beyond. Depends on the data and
    on N alone."""
    rows = parts[-1][1]
    size = rows * record_bytes
    wanted = max(size >> 30, min(256, max(size >> 26, min(16, rows // 20_000))))
    cuts: list[tuple[int, int]] = []
    for low, high in parts:
        inside = max(1, -(-wanted * (high - low) // max(1, rows)))
        cuts += pairwise(low + (high - low) * piece // inside for piece in range(inside + 1))
    return cuts


def pass_pieces(rows: int, record_bytes: int, cores: int) -> int:
    """Tasks of a pass over all rows: one a core, so that what a task holds is paid once a core, or a whole multiple of that
    where a piece would be over 1 GiB, so that a lost task costs minutes and not the run."""
    rounds = -(-rows * record_bytes // (cores * MAX_PIECE_BYTES))
    return max(1, min(cores * max(1, rounds), rows // MIN_PIECE_ROWS))


def point_pieces(pieces: int, size: int) -> int:
    """Tasks of a pass whose results, so many bytes, executors keep: a multiple of others' pieces, and about 64 MiB each at
    most, so that what does not fit their memory goes to disk part by part."""
    return pieces * max(1, -(-size // (pieces * KEPT_BYTES)))


@dataclass(frozen=True)
class ChunkCounts:
    """Rows by (chunk, group) of some consecutive chunks: int64 [chunks of them, groups], from chunk ``first`` on.

    What a task knows of a range of ids is about the chunks in it, so all tasks together send about one number a chunk and
    group, however many they are."""

    first: int
    table: Ints

    @property
    def stop(self) -> int:
        return self.first + len(self.table)

    @property
    def num_groups(self) -> int:
        return int(self.table.shape[1])

    def __add__(self, other: ChunkCounts) -> ChunkCounts:
        first, stop = min(self.first, other.first), max(self.stop, other.stop)
        table = np.zeros((stop - first, max(self.num_groups, other.num_groups)), np.int64)
        for part in (self, other):
            table[part.first - first : part.stop - first, : part.num_groups] += part.table
        return ChunkCounts(first, table)


def count_by_chunk(
    ids: Ints, groups: npt.NDArray[np.integer[Any]], num_groups: int, bounds: list[tuple[int, int]]
) -> ChunkCounts:
    """Rows by (chunk, group), of the chunks that the ids are in. At least one row. O(rows + chunks of them x groups)."""
    starts = np.array([low for low, _ in bounds], np.int64)
    chunk = np.searchsorted(starts, ids, side="right") - 1
    first, chunks = int(chunk.min()), int(np.ptp(chunk)) + 1
    flat = np.bincount((chunk - first) * num_groups + groups, minlength=chunks * num_groups)
    return ChunkCounts(first, flat.reshape(chunks, num_groups).astype(np.int64))


def all_counts(parts: Iterable[ChunkCounts], num_chunks: int, num_groups: int = 0) -> Ints:
    """The sum over all parts: int64 [chunks, groups], at least ``num_groups`` wide. O(what the parts hold)."""
    parts = list(parts)
    total = np.zeros((num_chunks, max([num_groups, *(part.num_groups for part in parts)])), np.int64)
    for part in parts:
        total[part.first : part.stop, : part.num_groups] += part.table
    return total


def offsets_by_chunk(counts: Ints) -> Ints:
    """The rank of the first row of each (chunk, group): exclusive prefix sums over chunks, int64 [chunks, groups]."""
    return np.cumsum(counts, axis=0) - counts
