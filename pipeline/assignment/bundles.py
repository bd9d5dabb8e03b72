"""The placement of bundles: rows that share a value of a column, such as a patient's, and stay at one worker.

A strategy says how many rows of each of its groups a worker should get. Bundles are placed one after the other, each at
the worker where the counts are then nearest to these. Exact integers, so the result is the same for any partitioning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash

MOST_CELLS = 1 << 23  # (bundle, group) pairs that the driver holds, 20 bytes each
BundleOrder = Literal["largest", "drawn", "independent"]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class BundleCells:
    """The rows of bundles by group, one entry per bundle and group that has rows, ordered by both.

    Attributes:
        keys: uint64 [cells], the hash of the bundle's value.
        groups: int32 [cells].
        rows: int64 [cells].
    """

    keys: Keys
    groups: npt.NDArray[np.int32]
    rows: Ints

    def __len__(self) -> int:
        return len(self.keys)


def count_cells(keys: Keys, groups: Ints, rows: Ints | None = None) -> BundleCells:
    """Return the sums of rows with equal keys and groups. rows: int64 [entries]; None: one each. O(entries log)."""
    order = np.lexsort((groups, keys))
    keys = keys[order]
    groups = groups[order]
    firsts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (groups[1:] != groups[:-1])][: len(keys)])
    amounts = np.ones(len(keys), np.int64) if rows is None else rows[order]
    return BundleCells(keys[firsts], groups[firsts].astype(np.int32), np.add.reduceat(amounts, firsts))


def merge_cells(parts: Iterable[BundleCells]) -> BundleCells:
    """Return the sum of parts, at least one of which has cells."""
    some = list(parts)
    return count_cells(
        np.concatenate([part.keys for part in some]),
        np.concatenate([part.groups for part in some]),
        np.concatenate([part.rows for part in some]),
    )


@dataclass(frozen=True)
class PlacedBundles:
    """The worker of every bundle.

    Attributes:
        keys: uint64 [bundles], ascending.
        owners: int32 [bundles].
        sizes: int64 [bundles], rows.
        table: int64 [groups, workers], rows of each group by worker.
    """

    keys: Keys
    owners: npt.NDArray[np.int32]
    sizes: Ints
    table: Ints


def place_bundles(cells: BundleCells, targets: Ints, order: BundleOrder, seed: int) -> PlacedBundles:
    """Place every bundle.

    With the order "independent", a bundle's worker is drawn in proportion to the workers' totals, whatever its size.
    Otherwise it is the worker that minimises the sum of squared differences between counts and targets, which is the
    one with the least sum over the bundle's groups of rows x (count - target). Ties go to the worker that lacks most
    rows, then to the lowest. O(cells x workers).

    With one group, no worker gets more than its target plus the largest bundle. With even targets, sizes differ by at
    most the largest bundle, and by one row more in drawn order if targets differ by one. With several groups and equal
    targets, the sum of the squared differences is at most the sum of the squared cells, which is its mean if bundles are
    drawn independently.

    Args:
        cells: the rows of bundles by group.
        targets: int64 [groups, workers], whose rows add up to the sizes of the groups.
        order: "largest": the largest bundle first, ties in random order. "drawn": in random order.
        seed: of the random order.
    """
    firsts = np.flatnonzero(np.r_[True, cells.keys[1:] != cells.keys[:-1]])
    ends = np.append(firsts[1:], len(cells))
    keys = cells.keys[firsts]
    sizes = np.add.reduceat(cells.rows, firsts)
    draws = keyed_hash(keys.view(np.int64), seed)
    if order == "independent":
        owners = _drawn_owners(draws, targets.sum(axis=0))
    else:
        by_size = -sizes if order == "largest" else np.zeros_like(sizes)
        owners = np.empty(len(keys), np.int64)
        excess = -targets  # rows beyond the target, by group and worker
        total = excess.sum(axis=0)
        for bundle in np.lexsort((draws, by_size)):
            part = slice(firsts[bundle], ends[bundle])
            groups = cells.groups[part]
            cost = cells.rows[part] @ excess[groups]
            best = np.flatnonzero(cost == cost.min())
            worker = best[total[best].argmin()]
            owners[bundle] = worker
            excess[groups, worker] += cells.rows[part]
            total[worker] += sizes[bundle]
    table = np.zeros_like(targets)
    np.add.at(table, (cells.groups, np.repeat(owners, ends - firsts)), cells.rows)
    return PlacedBundles(keys, owners.astype(np.int32), sizes, table)


def _drawn_owners(draws: Keys, totals: Ints) -> Ints:
    """Return a worker for each bundle in proportion to totals, from a uniform 64-bit number: int64 [bundles]."""
    ends = np.cumsum(totals)
    # The remainder of 64 bits favours low numbers by less than rows / 2^64.
    owners: Ints = np.searchsorted(ends, (draws % np.uint64(ends[-1])).astype(np.int64), side="right")
    return owners
