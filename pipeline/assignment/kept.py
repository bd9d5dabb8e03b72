"""The group of every row, stored in files for the tasks that write, so that a pass is not repeated.

There is one file per task of the pass: int32 in id order, 4 bytes per row. The files are in the attempt's folder and
are deleted with it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.shardset.attempt import write_task_file
from pipeline.core.storage.store import Store


@dataclass(frozen=True)
class KeptRange:
    """The rows low <= id < high, and the path of their groups."""

    low: int
    high: int
    path: str


def write_groups(store: Store, folder: str, low: int, groups: npt.NDArray[np.int32]) -> KeptRange:
    """Write the groups of the rows from id ``low`` on, and return the file.

    Args:
        store: reaches the attempt.
        folder: folder inside the attempt.
        low: id of the first row.
        groups: int32 [rows].
    """
    return KeptRange(low, low + len(groups), write_task_file(store, folder, groups.astype("<i4").tobytes()))


def _read_numbers(store: Store, path: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(store.read(path), "<i4")


_range_groups = lru_cache(maxsize=2)(_read_numbers)  # a task reads rows in order
_group_numbers = lru_cache(maxsize=8192)(_read_numbers)  # a block has rows of every class


@dataclass(frozen=True)
class KeptGroups:
    """Consecutive stored ranges, ordered by id."""

    store: Store
    ranges: tuple[KeptRange, ...]

    def __call__(self, ids: Ints) -> Ints:
        """Return the groups of rows, int64 [rows]. ids: consecutive, at least one."""
        low = int(ids[0])
        high = int(ids[-1]) + 1
        first = bisect_right(self.ranges, low, key=lambda kept_range: kept_range.low) - 1
        parts = []
        for kept_range in self.ranges[first:]:
            if kept_range.low >= high:
                break
            groups = _range_groups(self.store, kept_range.path)
            parts.append(groups[max(low - kept_range.low, 0) : high - kept_range.low])
        return np.concatenate(parts).astype(np.int64)


@dataclass(frozen=True)
class KeptByRank:
    """A stored number for every row, by its group and its rank in the group: one file per group that has rows.

    A process caches up to 8,192 files, 4 bytes per row of their groups."""

    store: Store
    paths: dict[int, str]

    def __call__(self, groups: Ints, ranks: Ints) -> Ints:
        """Return the numbers of rows, int64 [rows]. O(rows x groups among them)."""
        workers = np.empty(len(groups), np.int64)
        for group in np.unique(groups).tolist():
            rows = groups == group
            workers[rows] = _group_numbers(self.store, self.paths[group])[ranks[rows]]
        return workers
