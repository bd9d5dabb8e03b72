"""Where each group of rows begins among the workers, and which groups go to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.assignment.uneven import RatioDeal
from pipeline.core.arrays import Ints
from pipeline.core.shardset.ratios import Ratios, rounded_up

MOST_COUNTS = 1 << 20  # of groups by worker that a manifest tells, about ten bytes each
Start = Literal["zero", "carry"]
SparseIf = Literal["le", "lt", "never"]


@dataclass(frozen=True)
class GroupTable:
    """Per group: sizes int64 [groups], starts int64 [groups] (the worker of rank 0), sparse bool [groups].

    uneven: how rows are dealt to workers that get unequal shares; None: round robin."""

    sizes: Ints
    starts: Ints
    sparse: npt.NDArray[np.bool_]
    num_workers: int
    uneven: RatioDeal | None = None

    def owners(self, groups: Ints, ranks: Ints) -> Ints:
        """The worker of each row by its group and its rank in that, int64 [rows]."""
        if self.uneven:
            return self.uneven.owners(groups, ranks)
        return (self.starts[groups] + ranks) % self.num_workers

    @property
    def copies(self) -> int:
        """Rows added by broadcasting sparse groups: (n - 1) * sum of their sizes."""
        return int(self.sizes[self.sparse].sum()) * (self.num_workers - 1)


def rows_by_worker(table: GroupTable) -> Ints:
    """int64 [workers, groups]: the rows of each group that a worker holds, copies included, where ``table.owners`` deals
    them."""
    if table.uneven:
        dealt = np.array([table.uneven.counts(group) for group in range(len(table.sizes))]).T
    else:
        places = (np.arange(table.num_workers)[:, None] - table.starts) % table.num_workers
        dealt = table.sizes // table.num_workers + (places < table.sizes % table.num_workers)
    return np.where(table.sparse, table.sizes, dealt)


def group_table(
    sizes: Ints,
    num_workers: int,
    start: Start = "zero",
    sparse_if: SparseIf = "never",
    ratios: Ratios | None = None,
) -> GroupTable:
    """Where each group begins and whether it is broadcast.

    start: "zero" as in the papers (low workers get all remainders), or "carry": where the group before left off, dense and
    sparse ones each among themselves, which keeps totals within one. sparse_if: a group is sparse with size <= n ("le", the
    pseudo-code), < n ("lt", the prose) or never; with one worker nothing is. ratios: of the shares, in lowest terms;
    "carry" then hands on what rounding has cost each of them."""
    sizes = np.asarray(sizes, np.int64)
    limit = {"le": num_workers, "lt": num_workers - 1, "never": -1}[sparse_if]
    sparse = (sizes <= limit) & (sizes > 0) & (num_workers > 1)
    starts = np.zeros_like(sizes)
    if start == "carry":
        for kind in (sparse, ~sparse):
            starts[kind] = (np.cumsum(sizes[kind]) - sizes[kind]) % num_workers
    uneven = _uneven(sizes, sparse, ratios, carry=start == "carry") if ratios else None
    return GroupTable(sizes, starts, sparse, num_workers, uneven)


def _uneven(sizes: Ints, sparse: npt.NDArray[np.bool_], ratios: Ratios, *, carry: bool) -> RatioDeal:
    """Every worker has all of a sparse group, so those hand nothing on to dense ones."""
    up = np.zeros((len(sizes), len(ratios)), np.bool_)
    for kind in (sparse, ~sparse):
        up[kind] = rounded_up(sizes[kind], ratios, carry=carry)
    return RatioDeal.of(ratios, sizes, up)
