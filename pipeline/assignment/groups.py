"""Where each group of rows begins among the workers, and which groups go to all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.arrays import Ints

MOST_COUNTS = 1 << 20  # of groups by worker that a manifest tells, about ten bytes each
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


def rows_by_worker(table: GroupTable) -> Ints:
    """int64 [workers, groups]: the rows of each group that a worker holds, copies included, where groups are dealt round
    robin."""
    places = (np.arange(table.num_workers)[:, None] - table.starts) % table.num_workers
    dealt = table.sizes // table.num_workers + (places < table.sizes % table.num_workers)
    return np.where(table.sparse, table.sizes, dealt)


def group_table(sizes: Ints, num_workers: int, start: Start = "zero", sparse_if: SparseIf = "never") -> GroupTable:
    """Where each group begins and whether it is broadcast.

    start: "zero" as in the papers (low workers get all remainders), or "carry": where the group before left off among
    the dense rows, which keeps totals within one. sparse_if: a group is sparse with size <= n ("le", the pseudo-code),
    < n ("lt", the prose) or never; with one worker nothing is."""
    sizes = np.asarray(sizes, np.int64)
    limit = {"le": num_workers, "lt": num_workers - 1, "never": -1}[sparse_if]
    sparse = (sizes <= limit) & (sizes > 0) & (num_workers > 1)
    dense_before = np.concatenate([[0], np.cumsum(np.where(sparse, 0, sizes))[:-1]]) if len(sizes) else sizes
    starts = dense_before % num_workers if start == "carry" else np.zeros_like(sizes)
    return GroupTable(sizes, starts.astype(np.int64), sparse, num_workers)
