"""Dealing of groups by a table of exact counts, and the tables of skewed shards.

A table says how many rows of each class every worker gets: int64 [classes, workers], whose rows add up to the sizes of
the classes. All arithmetic on counts is exact, so the same table gives the same shards for any partitioning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.assignment.ranks import runs_of_equal_keys
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.shardset.ratios import largest_remainder


@dataclass(frozen=True)
class TableDeal:
    """The worker of a row, from its group and its rank in the group: the first rows of a group go to worker 0.

    Attributes:
        table: int64 [groups, workers], rows of each group by worker.
    """

    table: Ints

    def counts(self, group: int) -> Ints:
        """Return the rows of a group by worker, int64 [workers]."""
        rows: Ints = self.table[group]
        return rows

    def owners(self, groups: Ints, ranks: Ints) -> Ints:
        """Return the workers of rows, int64 [rows]. O(rows log workers), and O(workers) per group with rows here.

        groups: int64 [rows], the group of each row; ranks: int64 [rows], the position of each row in its group."""
        owners = np.empty(len(groups), np.int64)
        order = np.argsort(groups, kind="stable")
        for group, first, end in runs_of_equal_keys(groups[order]):
            rows = order[first:end]
            owners[rows] = np.searchsorted(np.cumsum(self.table[group]), ranks[rows], side="right")
        return owners


def dirichlet_table(sizes: Ints, num_workers: int, alpha: float, rng: np.random.Generator, min_rows: int) -> Ints:
    """Return a table whose shares of each class are drawn from a symmetric Dirichlet distribution (Yurochkin et al. 2019).

    Shares are rounded by largest remainder. If a worker would have fewer than ``min_rows`` rows, all shares are mixed
    with equal ones, as little as it takes, instead of being drawn again. O(classes x workers log workers).

    Args:
        sizes: rows of each class, int64 [classes].
        num_workers: n.
        alpha: concentration; small values give each class to few workers, large ones equal shares.
        rng: draws the shares.
        min_rows: least number of rows of a worker.
    Raises:
        UsageError: there are fewer than ``min_rows`` rows per worker.
    """
    if min_rows * num_workers > sizes.sum():
        raise UsageError(
            f"--min-rows {min_rows} for each of {num_workers} workers is more than the {sizes.sum():,} rows of the input"
        )
    shares = rng.dirichlet(np.full(num_workers, alpha), len(sizes))
    # The rounding of a class costs a worker less than a row, so the goal leaves room for one per class.
    equal = sizes.sum() / num_workers
    goal = min(min_rows + len(sizes), equal)
    expected = sizes @ shares
    few = expected < goal
    mixed = np.max((goal - expected[few]) / (equal - expected[few]), initial=0.0)
    table = _rounded(sizes, (1 - mixed) * shares + mixed / num_workers)
    return _with_least_rows(table, min_rows)


def _rounded(sizes: Ints, shares: npt.NDArray[np.float64]) -> Ints:
    """Return each class in these shares, rounded by largest remainder: int64 [classes, workers]."""
    exact = sizes[:, None] * shares / shares.sum(axis=1, keepdims=True)
    table: Ints = np.floor(exact).astype(np.int64)
    for group, left in enumerate(sizes - table.sum(axis=1)):
        table[group, np.argsort(table[group] - exact[group], kind="stable")[:left]] += 1
    return table


def _with_least_rows(table: Ints, min_rows: int) -> Ints:
    """Move rows, in place, from the largest workers to those with fewer than ``min_rows``, and return the table.

    Before rounding every worker has enough rows, so only a few must be moved."""
    totals = table.sum(axis=0)
    for worker in np.flatnonzero(totals < min_rows):
        while totals[worker] < min_rows:
            donor = int(totals.argmax())
            label = int(table[:, donor].argmax())
            table[label, [donor, worker]] += [-1, 1]
            totals[[donor, worker]] += [-1, 1]
    return table


def class_table(sizes: Ints, num_workers: int, per_worker: int, rng: np.random.Generator) -> Ints:
    """Return a table in which every worker has rows of ``per_worker`` classes (McMahan et al. 2017).

    The classes are put in random order; each worker takes the next ones, round and round, so that the numbers of
    workers of two classes differ by at most one. The workers of a class divide it equally.

    Args:
        sizes: rows of each class, int64 [classes]; classes without rows are left out.
        num_workers: n.
        per_worker: classes of each worker.
        rng: draws the order of the classes.
    Raises:
        UsageError: there are fewer classes, or some would have no worker.
    """
    present = rng.permutation(np.flatnonzero(sizes))
    if per_worker > len(present):
        raise UsageError(f"--classes-per-worker {per_worker} is more than the {len(present)} classes of the input")
    if per_worker * num_workers < len(present):
        least = -(-len(present) // num_workers)
        raise UsageError(
            f"--classes-per-worker {per_worker} leaves classes without a worker: {num_workers} workers need at least"
            f" {least} each for {len(present)} classes"
        )
    table = np.zeros((len(sizes), num_workers), np.int64)
    # Place p of the round belongs to worker p // per_worker, and to the class at p modulo their number.
    places = np.arange(per_worker * num_workers)
    for place, label in enumerate(present):
        workers = places[place :: len(present)] // per_worker
        table[label, workers] = largest_remainder(sizes[label : label + 1], (1,) * len(workers))[0]
    return table


def sorted_table(sizes: Ints, num_workers: int, strictness: float) -> Ints:
    """Return the table of rows that are sorted by class and cut into equal pieces, one per worker.

    Args:
        sizes: rows of each class, int64 [classes].
        num_workers: n.
        strictness: the share of each class that is sorted, rounded down; the rest is dealt equally. 1 sorts all rows.
    """
    is_sorted = np.floor(sizes * strictness).astype(np.int64)
    total = int(is_sorted.sum())
    cuts = np.array([total * worker // num_workers for worker in range(num_workers + 1)])
    ends = np.cumsum(is_sorted)
    # The rows of a class at a worker are where its interval overlaps the worker's.
    low = np.maximum(cuts[:-1], (ends - is_sorted)[:, None])
    high = np.minimum(cuts[1:], ends[:, None])
    rest = largest_remainder(sizes - is_sorted, (1,) * num_workers, carry=True)
    table: Ints = np.maximum(high - low, 0) + rest
    return table
