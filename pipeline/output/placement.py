"""The workers of the rows of a chunk, dealt by groups or read from a table. Picklable, for the tasks that write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.assignment.bundles import Keys
from pipeline.assignment.groups import GroupTable
from pipeline.assignment.ranks import ranks
from pipeline.core.arrays import Ints
from pipeline.core.errors import JobError
from pipeline.core.shardset.schema import value_hashes
from pipeline.input.dataset import Block
from pipeline.strategies.base import Grouping
from pipeline.strategies.checks import check_numbers


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
        """Yield each block of a chunk with the workers that its rows' groups and ranks give them.

        Raises JobError for a grouping that returns anything else than a group and a worker for each row."""
        offsets = self.offsets[chunk].copy()
        for block in blocks:
            rows = len(block.ids)
            groups = check_numbers(self.grouping.groups(block), "groups", self.grouping, rows, len(self.table.sizes))
            owners = self.grouping.workers(block.ids, groups, ranks(groups, offsets), self.table)
            owners = check_numbers(owners, "workers", self.grouping, rows, self.num_workers)
            yield BlockDeliveries(block, groups, *deliver_rows(owners, self.table.sparse[groups], self.num_workers))


@dataclass(frozen=True)
class BundledDealing:
    """A Placement of rows that share a value of a column at one worker.

    Attributes:
        grouping: returns the groups of rows, which are written beside them.
        bundle: the column.
        keys: uint64 [bundles], hashes of its values, ascending.
        owners: int32 [bundles], the worker of each.
        num_workers: n.
    """

    grouping: Grouping
    bundle: str
    keys: Keys
    owners: npt.NDArray[np.int32]
    num_workers: int

    @property
    def neighbourhoods(self) -> bool:
        return self.grouping.neighbourhoods

    @property
    def reads_images(self) -> bool:
        return self.grouping.reads_images

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield each block of a chunk with the workers of its rows' bundles. Raises JobError for an unknown value."""
        for block in blocks:
            keys = bundle_keys(block, self.bundle)
            places = np.searchsorted(self.keys, keys)
            if not np.array_equal(self.keys[np.minimum(places, len(self.keys) - 1)], keys):
                raise JobError(
                    f"the column {self.bundle} changed while the input was sharded: rerun on a settled input"
                )
            owners = self.owners[places].astype(np.int64)
            alone = np.zeros(len(owners), np.bool_)
            yield BlockDeliveries(block, self.grouping.groups(block), *deliver_rows(owners, alone, self.num_workers))


def bundle_keys(block: Block, bundle: str) -> Keys:
    """Return a hash of the value that a column has in each row, uint64 [rows]. bundle: the column."""
    columns = block.columns
    own = {"label": columns.labels, "coarse_label": columns.coarse_labels}
    values = pa.array(own[bundle]) if bundle in own else columns.attributes[bundle]
    # -0.0 equals 0.0, but has another text; a sum with 0.0 has no sign.
    return value_hashes(pc.add(values, 0.0) if pa.types.is_floating(values.type) else values)


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
    broadcast_rows = np.flatnonzero(broadcast)
    copy_rows = np.repeat(broadcast_rows, num_workers)
    copy_workers = np.tile(np.arange(num_workers), len(broadcast_rows))
    # The owner has copy 0 already.
    is_copy = copy_workers != owners[copy_rows]
    copy_rows = copy_rows[is_copy]
    copy_workers = copy_workers[is_copy]
    # Workers below the owner count from 1. A worker above it has its own number, because the owner is skipped.
    numbers = copy_workers + (copy_workers < owners[copy_rows])
    rows = np.concatenate([np.arange(len(owners)), copy_rows])
    workers = np.concatenate([owners, copy_workers])
    copies = np.concatenate([np.zeros(len(owners), np.int64), numbers])
    order = np.lexsort((rows, workers))
    return rows[order], workers[order], copies[order].astype(np.int32)
