"""The places of the rows of each worker of a run, counted over all shards. Pure: reads no row, and loads no pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeline.core.arrays import Flags, Ints
from pipeline.core.errors import UsageError


def dealt_places(sizes: Sequence[int], num_workers: int) -> list[Ints]:
    """Return the numbers of the rows that ``deal`` gives to each of N workers, counted over all shards, int64.

    Raises UsageError if a worker would have no rows. sizes: rows of each shard."""
    ends = np.cumsum(sizes)
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    if num_workers < len(numbers):
        return [np.concatenate(numbers[worker::num_workers]) for worker in range(num_workers)]
    return [numbers[shard][own] for shard, own in shared_shards(sizes, num_workers)]


def shared_shards(sizes: Sequence[int], num_workers: int) -> list[tuple[int, slice]]:
    """Return the shard of each of N workers for N >= M shards, and its rows there: every k-th row if k workers share it.

    Raises UsageError if a worker would have no rows. sizes: rows of each shard."""
    shares = []
    for worker in range(num_workers):
        turn, shard = divmod(worker, len(sizes))
        sharers = len(range(shard, num_workers, len(sizes)))
        if turn >= sizes[shard]:
            raise UsageError(
                f"--workers {num_workers}: worker {worker} would have no rows, shard {shard} has {sizes[shard]} for"
                f" {sharers} workers; give fewer"
            )
        shares.append((shard, slice(turn, None, sharers)))
    return shares


def even_places(sizes: Sequence[int], num_workers: int, is_trained: Flags | None = None) -> list[Ints]:
    """Return the numbers of the rows of each of N workers whose parts differ by at most one row, int64, ascending.

    The rows of all shards are merged in proportion to the sizes of the shards, and dealt in turn. Every part therefore
    represents the set as its shards do. From shards of equal size, this is what ``deal`` gives to a multiple or a divisor
    of their number. Rows are counted over all shards.

    Args:
        sizes: rows of each shard.
        num_workers: number of workers.
        is_trained: whether workers train on each row, bool [rows]; the others are dealt to nobody (default: on all).
    Raises:
        UsageError: a worker would have no rows.
    """
    # Equal fractions are equal floats, because a quotient is rounded correctly: the order is the same on every host.
    shares = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes if size])
    merged = np.argsort(shares, kind="stable")
    if is_trained is not None:
        merged = merged[is_trained[merged]]
    total = len(merged)
    if num_workers > total:
        kind = "" if is_trained is None else " that are not held out"
        raise UsageError(
            f"--workers {num_workers}: worker {total} would have no rows, the set has {total}{kind}; give {total} or fewer"
        )
    return [np.sort(merged[worker::num_workers]) for worker in range(num_workers)]


def only_trained(rows: Ints, is_trained: Flags, worker: int) -> Ints:
    """Return the rows of a worker that it trains on, int64. Raises UsageError if there are none.

    is_trained: whether it trains on each of the rows, bool."""
    if not is_trained.any():
        raise UsageError(
            f"--switch-on holdout leaves worker {worker} none of its {len(rows)} rows to train on: give a smaller"
            " --holdout-share"
        )
    return rows[is_trained]


def present_places(sizes: Sequence[int], cohorts: Iterable[int], is_trained: Flags | None = None) -> list[Ints]:
    """Return the rows of each worker of the last of some cohorts. cohorts: workers of each; rest: see ``own_places``."""
    own: list[Ints] = []
    for num_workers in cohorts:
        own = own_places(sizes, num_workers, own, is_trained)
    return own


def own_places(
    sizes: Sequence[int], num_workers: int, before: Sequence[Ints], is_trained: Flags | None = None
) -> list[Ints]:
    """Return the numbers of the rows over which each worker of a cohort makes its passes, counted over all shards, int64.

    Workers whose number does not change keep their rows, and a worker per shard has its shard. Otherwise the parts of two
    workers differ by at most one row, because all of them draw mini-batches of the same size.

    Args:
        sizes: rows of each shard.
        num_workers: workers of the cohort.
        before: the rows of the cohort before; empty for the first one, to which the shards are dealt.
        is_trained: the result of ``trained_rows`` (default: workers train on all rows).
    Raises:
        UsageError: a worker would have no rows.
    """
    if len(before) == num_workers:
        return list(before)
    if before and num_workers != len(sizes):
        return even_places(sizes, num_workers, is_trained)
    own = dealt_places(sizes, num_workers)
    if is_trained is None:
        return own
    return [only_trained(rows, is_trained[rows], worker) for worker, rows in enumerate(own)]


def table_entries(sizes: Sequence[int], num_workers: int) -> Ints:
    """Return the entry of each row in a loss table with an entry per row, int64, by its number over all shards.

    Args:
        sizes: rows of each shard.
        num_workers: number of the workers with which the run began, in whose order the entries are.
    """
    order = np.concatenate(dealt_places(sizes, num_workers))
    entries = np.empty(len(order), np.int64)
    entries[order] = np.arange(len(order))
    return entries


def own_entries(sizes: Sequence[int], cohorts: Sequence[int]) -> list[Ints]:
    """Return the entries of such a table that each worker of the last of some cohorts updates, int64.

    Args:
        sizes: rows of each shard.
        cohorts: workers of each, from the start of the run.
    """
    entries = table_entries(sizes, cohorts[0])
    return [entries[rows] for rows in present_places(sizes, cohorts)]
