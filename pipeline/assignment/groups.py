"""The worker at which each group of rows starts, and the groups that go to all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.assignment.shares import TableDeal
from pipeline.assignment.uneven import RatioDeal
from pipeline.core.arrays import Ints
from pipeline.core.errors import UnsuitableError
from pipeline.core.shardset.ratios import Ratios, rounded_up

MOST_COUNTS = 1 << 20  # entries of rows by worker and group in a manifest, about ten bytes each
Start = Literal["zero", "carry"]
SparseIf = Literal["le", "lt", "never"]


@dataclass(frozen=True)
class GroupTable:
    """The dealing of groups to workers.

    Attributes:
        sizes: int64 [groups].
        starts: int64 [groups], the worker of rank 0.
        sparse: bool [groups], True if all workers get the group.
        num_workers: n.
        uneven: deals rows in unequal shares, in ratios or by a table of counts; None: round robin.
    """

    sizes: Ints
    starts: Ints
    sparse: npt.NDArray[np.bool_]
    num_workers: int
    uneven: RatioDeal | TableDeal | None = None

    def owners(self, groups: Ints, ranks: Ints) -> Ints:
        """Return the worker of each row from its group and its rank in the group, int64 [rows]."""
        if self.uneven:
            return self.uneven.owners(groups, ranks)
        return (self.starts[groups] + ranks) % self.num_workers

    @property
    def copies(self) -> int:
        """Number of rows added by broadcasting sparse groups: (n - 1) * sum of their sizes."""
        return int(self.sizes[self.sparse].sum()) * (self.num_workers - 1)


def rows_by_worker(table: GroupTable) -> Ints:
    """Return the rows of each group per worker, copies included, as ``table.owners`` deals them: int64 [workers,
    groups]."""
    if table.uneven:
        rows_if_dealt = np.array([table.uneven.counts(group) for group in range(len(table.sizes))]).T
    else:
        # Round robin from the group's first worker: the remainder goes to the workers at the lowest places after it.
        places = (np.arange(table.num_workers)[:, None] - table.starts) % table.num_workers
        rows_if_dealt = table.sizes // table.num_workers + (places < table.sizes % table.num_workers)
    return np.where(table.sparse, table.sizes, rows_if_dealt)


def group_table(
    sizes: Ints,
    num_workers: int,
    start: Start = "zero",
    sparse_if: SparseIf = "never",
    ratios: Ratios | None = None,
    table: Ints | None = None,
) -> GroupTable:
    """Decide for each group of rows which worker gets its first row, and whether all workers get all of it.

    Args:
        sizes: rows of each group, int64 [groups].
        num_workers: n.
        start: the worker of a group's first row. "zero": worker 0, as in the papers, which gives all remainders to low
            workers. "carry": the worker after the last one of the previous group, separately for dense and sparse
            groups, which keeps the totals of workers within one of each other.
        sparse_if: a group is sparse, and copied to all workers, if its size is <= n ("le", as in the papers'
            pseudo-code), < n ("lt", as in their prose), or never; with one worker no group is sparse.
        ratios: shares of the workers, in lowest terms; None: equal. With ratios, "carry" adds each worker's rounding
            error in a group to its share of the next one.
        table: rows of each group by worker, int64 [groups, workers], which decides instead of start and ratios.
    """
    sizes = np.asarray(sizes, np.int64)
    limit = {"le": num_workers, "lt": num_workers - 1, "never": -1}[sparse_if]
    sparse = (sizes <= limit) & (sizes > 0) & (num_workers > 1)
    starts = np.zeros_like(sizes)
    if start == "carry":
        for kind in (sparse, ~sparse):
            starts[kind] = (np.cumsum(sizes[kind]) - sizes[kind]) % num_workers
    uneven: RatioDeal | TableDeal | None = TableDeal(table) if table is not None else None
    if ratios and uneven is None:
        uneven = _ratio_deal(sizes, sparse, ratios, carry=start == "carry")
    return GroupTable(sizes, starts, sparse, num_workers, uneven)


def check_copies(copies: int, rows: int, remedies: str) -> None:
    """Raise UnsuitableError if copies of sparse groups more than double the rows.

    Args:
        copies: number of copies in addition to the rows.
        rows: number of rows.
        remedies: changes that the user can make, as the end of a sentence.
    """
    if copies > rows:
        raise UnsuitableError(
            "too many groups of similar rows have at most as many rows as there are workers: their copies add"
            f" {copies:,} to {rows:,} rows; use {remedies}"
        )


def _ratio_deal(sizes: Ints, sparse: npt.NDArray[np.bool_], ratios: Ratios, *, carry: bool) -> RatioDeal:
    """Return the dealing of every group in shares of the workers' ratios; see ``group_table`` for the arguments.

    Rounding errors are carried separately among sparse and among dense groups. Every worker gets all rows of a sparse
    group, so the division of that group must not change a worker's share of a dense one."""
    # True if a worker's share of a group is rounded up, bool [groups, workers].
    up = np.zeros((len(sizes), len(ratios)), np.bool_)
    for kind in (sparse, ~sparse):
        up[kind] = rounded_up(sizes[kind], ratios, carry=carry)
    return RatioDeal(ratios, sizes, np.packbits(up, axis=1))
