"""The group of every row, kept in files for the tasks that write: what a pass has found is not computed again.

One file a task of the pass: int32 in id order, 4 bytes a row. They lie in the folder of the attempt and go with it."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.shardset.attempt import task_folder
from pipeline.core.storage.store import Store


@dataclass(frozen=True)
class KeptRange:
    """The rows from id ``low`` up to and without ``high``; where their groups are."""

    low: int
    high: int
    path: str


def keep(store: Store, folder: str, low: int, groups: npt.NDArray[np.int32]) -> KeptRange:
    """Write the groups of rows from id ``low`` on. The name is unique to this try of a task."""
    kept = KeptRange(low, low + len(groups), f"{folder}/{uuid.uuid4().hex}")
    task_folder(store, folder)
    store.write_new(kept.path, groups.astype("<i4").tobytes())
    return kept


@lru_cache(maxsize=2)  # a task reads on from row to row
def _groups(store: Store, path: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(store.read(path), "<i4")


@dataclass(frozen=True)
class KeptGroups:
    """Ranges without gaps, by id."""

    store: Store
    ranges: tuple[KeptRange, ...]

    def __call__(self, ids: Ints) -> Ints:
        """int64 [rows]. ids: consecutive, at least one."""
        low, high = int(ids[0]), int(ids[-1]) + 1
        first = bisect_right(self.ranges, low, key=lambda kept: kept.low) - 1
        parts = []
        for kept in self.ranges[first:]:
            if kept.low >= high:
                break
            parts.append(_groups(self.store, kept.path)[max(low - kept.low, 0) : high - kept.low])
        return np.concatenate(parts).astype(np.int64)


@lru_cache(maxsize=8192)  # a block of rows has some of every class
def _of_class(store: Store, path: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(store.read(path), "<i4")


@dataclass(frozen=True)
class KeptByRank:
    """A number of every row by its group and its rank in that: one file a group that has rows.

    A process keeps those it has read, up to 8,192: 4 bytes a row of their groups."""

    store: Store
    paths: dict[int, str]

    def __call__(self, groups: Ints, ranks: Ints) -> Ints:
        """int64 [rows]. O(rows x groups among them)."""
        found = np.empty(len(groups), np.int64)
        for group in np.unique(groups).tolist():
            rows = groups == group
            found[rows] = _of_class(self.store, self.paths[group])[ranks[rows]]
        return found
