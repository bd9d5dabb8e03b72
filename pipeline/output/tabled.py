"""Placement by a table: its lines are sorted and checked, and stored as one file per chunk for the tasks that write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.shardset.attempt import write_task_file
from pipeline.core.storage.store import Store
from pipeline.input.assignment_table import ABSENT
from pipeline.input.dataset import Block
from pipeline.output.placement import BlockDeliveries

ID, WORKER, COPY, GROUP = range(4)


@dataclass(frozen=True)
class LineCheck:
    """The result of checking the lines of a chunk.

    Attributes:
        path: file of the sorted lines.
        copies: number of lines that are copies.
        problem: the first problem as a line of text, or None.
    """

    path: str = ""
    copies: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class TablePlacement:
    """A Placement by a table.

    paths: file of each chunk's lines, int64 [4, lines] by id. neighbourhoods: True if the groups of the lines are
    neighbourhoods, which are written beside the rows."""

    store: Store
    paths: tuple[str, ...]
    num_workers: int
    neighbourhoods: bool
    reads_images: bool = False

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield each block of a chunk with the workers that the table gives its rows."""
        lines: Ints = np.frombuffer(self.store.read(self.paths[chunk]), "<i8").reshape(4, -1)
        for block in blocks:
            first, last = np.searchsorted(lines[ID], [block.ids[0], block.ids[-1] + 1])
            block_lines = lines[:, first:last]
            rows = block_lines[ID] - block.ids[0]
            workers = block_lines[WORKER]
            # Lines are sorted by id; writers expect deliveries by worker.
            order = np.lexsort((rows, workers))
            groups = block_lines[GROUP][block_lines[COPY] == 0]
            yield BlockDeliveries(block, groups, rows[order], workers[order], block_lines[COPY][order].astype(np.int32))


def check_lines(parts: Sequence[Ints], low: int, high: int, num_workers: int) -> tuple[Ints, str | None]:
    """Return the lines of the rows low..high-1, int64 [4, lines] by id and copy, and their first problem or None.

    Every row must have a line, and no two lines of a row may have the same worker. The lines of a row are numbered as
    copies 0, 1, 2 and so on; if the table has no copy numbers, they are numbered in the order of workers. A missing
    group becomes 0.

    Args:
        parts: lines, int64 [4, any].
        low: id of the first row.
        high: id after the last row.
        num_workers: n.
    """
    lines = np.concatenate([np.empty((4, 0), np.int64), *parts], axis=1)
    lines = lines[:, np.lexsort((lines[WORKER], lines[COPY], lines[ID]))]
    ids = lines[ID]
    workers = lines[WORKER]
    if len(missing := np.setdiff1d(np.arange(low, high), ids)):
        more = f", nor have {len(missing) - 1:,} others up to row {high - 1}" if len(missing) > 1 else ""
        return lines, f"row {missing[0]} has no worker{more}; a table needs every row once at least"
    if len(far := np.flatnonzero(workers >= num_workers)):
        return lines, f"row {ids[far[0]]} is for worker {workers[far[0]]}, but workers are 0..{num_workers - 1}"
    by_worker = np.lexsort((workers, ids))
    twice = np.flatnonzero((np.diff(ids[by_worker]) == 0) & (np.diff(workers[by_worker]) == 0))
    if len(twice):
        at = by_worker[twice[0]]
        return lines, f"row {ids[at]} is twice for worker {workers[at]}"
    # The position of each line within its row is the copy number that it must have.
    firsts = np.flatnonzero(np.diff(ids, prepend=low - 1))
    copy_numbers = np.arange(len(ids)) - np.repeat(firsts, np.diff([*firsts, len(ids)]))
    unsaid = lines[COPY] == ABSENT
    if unsaid.any() and not unsaid.all():
        return lines, f"the table has a copy for row {ids[np.flatnonzero(~unsaid)[0]]} and none for others"
    if unsaid.all():
        lines[COPY] = copy_numbers
    lines[GROUP][lines[GROUP] == ABSENT] = 0
    if len(odd := np.flatnonzero(lines[COPY] != copy_numbers)):
        return lines, f"the copies of row {ids[odd[0]]} are not numbered 0, 1, 2 and so on"
    return lines, None


def check_and_write_lines(
    store: Store, folder: str, parts: Sequence[Ints], bound: tuple[int, int], num_workers: int
) -> LineCheck:
    """Check the lines of a chunk (see ``check_lines``) and write them.

    Args:
        store: reaches the attempt.
        folder: folder inside the attempt.
        parts: lines, int64 [4, any].
        bound: first and end id of the chunk.
        num_workers: n.
    """
    lines, problem = check_lines(parts, *bound, num_workers)
    if problem:
        return LineCheck(problem=problem)
    path = write_task_file(store, folder, lines.astype("<i8").tobytes())
    return LineCheck(path, int((lines[COPY] > 0).sum()))
