"""The workers of the rows of a chunk, dealt by groups or read from a table. Picklable, for the tasks that write."""

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


class BlockDeliveries(NamedTuple):
    """A block and its deliveries, i.e. rows with the workers that get them, ordered by worker, then row.

    Attributes:
        block: the rows.
        groups: int64 [rows of the block].
        rows: int64 [deliveries], positions in the block.
        workers: int64 [deliveries].
        copies: int32 [deliveries], 0 for the owner.
    """

    block: Block
    groups: Ints
    rows: Ints
    workers: Ints
    copies: npt.NDArray[np.int32]

    @property
    def row_order(self) -> Ints:
        """The order of deliveries by row, then copy: int64 [deliveries]."""
        order: Ints = np.lexsort((self.copies, self.rows))
        return order


class Placement(Protocol):
    """A rule that decides which workers get a row.

    neighbourhoods: True if a row's group is written beside it; reads_images: True if blocks must contain images."""

    @property
    def num_workers(self) -> int: ...
    @property
    def neighbourhoods(self) -> bool: ...
    @property
    def reads_images(self) -> bool: ...

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield the blocks of a chunk, in id order, with their deliveries."""
        ...


@dataclass(frozen=True)
class Dealing:
    """A Placement that deals the rows of each group. offsets: int64 [chunks, groups], rank of a chunk's first row in
    each group."""

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

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield each block of a chunk with the workers that its rows' groups and ranks give them."""
        offsets = self.offsets[chunk].copy()
        for block in blocks:
            groups = self.grouping.groups(block)
            owners = self.grouping.workers(block.ids, groups, ranks(groups, offsets), self.table)
            yield BlockDeliveries(block, groups, *deliver_rows(owners, self.table.sparse[groups], self.num_workers))


def deliver_rows(
    owners: Ints, broadcast: npt.NDArray[np.bool_], num_workers: int
) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
    """Return the deliveries of a block: rows, workers and copies, by worker, then by row. O(deliveries log).

    A broadcast row goes to every worker: copy 0 to its owner, 1..n-1 to the others in worker order.

    Args:
        owners: int64 [rows].
        broadcast: bool [rows].
        num_workers: n.
    """
    everywhere = np.flatnonzero(broadcast)
    beside = np.repeat(everywhere, num_workers)
    others = np.tile(np.arange(num_workers), len(everywhere))
    # The owner has copy 0 already.
    is_other = others != owners[beside]
    beside = beside[is_other]
    others = others[is_other]
    rows = np.concatenate([np.arange(len(owners)), beside])
    workers = np.concatenate([owners, others])
    copies = np.concatenate([np.zeros(len(owners), np.int64), others + (others < owners[beside])])
    order = np.lexsort((rows, workers))
    return rows[order], workers[order], copies[order].astype(np.int32)
