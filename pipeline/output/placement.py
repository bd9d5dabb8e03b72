"""Which workers get which rows of a chunk: dealt by groups, or as a table has it. Picklable, for the tasks that write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.assignment.groups import GroupTable
from pipeline.assignment.ranks import ranks
from pipeline.core.arrays import Ints
from pipeline.input.dataset import Block
from pipeline.strategies.base import Grouping


class Delivered(NamedTuple):
    """What becomes of a block. rows (places in it) and workers int64 [deliveries], copies int32 [deliveries], by worker and
    row; groups int64 [rows of the block]."""

    block: Block
    groups: Ints
    rows: Ints
    workers: Ints
    copies: npt.NDArray[np.int32]

    @property
    def by_row(self) -> Ints:
        """The deliveries in the order of their rows, then copies: int64 [deliveries]."""
        order: Ints = np.lexsort((self.copies, self.rows))
        return order


class Placement(Protocol):
    """neighbourhoods: whether the group of a row is written beside it; reads_images: whether the blocks must have them."""

    @property
    def num_workers(self) -> int: ...
    @property
    def neighbourhoods(self) -> bool: ...
    @property
    def reads_images(self) -> bool: ...

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[Delivered]:
        """All blocks of a chunk, in id order."""
        ...


@dataclass(frozen=True)
class Dealing:
    """By groups, whose rows are dealt. offsets: int64 [chunks, groups], the rank of a chunk's first row of each group."""

    grouping: Grouping
    table: GroupTable
    offsets: Ints

    @property
    def num_workers(self) -> int:
        return self.table.num_workers

    @property
    def neighbourhoods(self) -> bool:
        return self.grouping.neighbourhoods

    @property
    def reads_images(self) -> bool:
        return self.grouping.reads_images

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[Delivered]:
        offsets = self.offsets[chunk].copy()
        for block in blocks:
            groups = self.grouping.groups(block)
            owners = self.grouping.workers(block.ids, groups, ranks(groups, offsets), self.table)
            yield Delivered(block, groups, *delivered(owners, self.table.sparse[groups], self.num_workers))


def delivered(
    owners: Ints, broadcast: npt.NDArray[np.bool_], num_workers: int
) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
    """What is delivered of a block: rows, workers and copies, by worker, then by row. O(deliveries log).

    A broadcast row goes to every worker: copy 0 at its owner, 1..n-1 at the others in worker order."""
    everywhere = np.flatnonzero(broadcast)
    beside = np.repeat(everywhere, num_workers)
    others = np.tile(np.arange(num_workers), len(everywhere))
    kept = others != owners[beside]
    beside, others = beside[kept], others[kept]
    rows = np.concatenate([np.arange(len(owners)), beside])
    workers = np.concatenate([owners, others])
    copies = np.concatenate([np.zeros(len(owners), np.int64), others + (others < owners[beside])])
    order = np.lexsort((rows, workers))
    return rows[order], workers[order], copies[order].astype(np.int32)
