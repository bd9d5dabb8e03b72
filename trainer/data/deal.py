"""The distribution of a shard set over another number of virtual workers."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Flags, Ints
from pipeline.core.errors import UsageError
from trainer.data.loading import load_worker
from trainer.data.rows import Rows, join_rows
from trainer.data.shards import Shards


def deal(shards: Shards, num_workers: int, *, targets: bool = False) -> list[Rows]:
    """Return the rows of each of N virtual workers, from M shards. With N = M each worker gets its shard.

    For N > M, worker w gets every k-th row of shard w mod M, which k workers share, so that its rows are representative
    of the shard. For N < M it gets the shards w, w + N, ... The result holds every row once.

    Args:
        shards: the set of M shards.
        num_workers: N.
        targets: read real targets instead of labels.

    Raises:
        UsageError: a worker would have no rows.
        DataError, OSError: a file is damaged or cannot be read.
    """
    rows_by_shard = [load_worker(shards, shard, targets=targets) for shard in range(shards.num_workers)]
    # With fewer workers than shards, whole shards are joined, otherwise each shard is shared by some workers.
    if num_workers < len(rows_by_shard):
        return [join_rows(rows_by_shard[worker::num_workers]) for worker in range(num_workers)]
    rows_by_worker = []
    for worker in range(num_workers):
        turn, shard = divmod(worker, len(rows_by_shard))
        sharers = len(range(shard, num_workers, len(rows_by_shard)))
        rows_by_worker.append(rows_by_shard[shard].view(slice(turn, None, sharers)))
        if not len(rows_by_worker[-1]):
            raise _empty_worker(num_workers, worker, shard, len(rows_by_shard[shard]), sharers)
    return rows_by_worker


def dealt_sizes(shards: Shards, num_workers: int) -> list[int]:
    """Return the number of rows that ``deal`` gives to each of N workers. Reads no row."""
    sizes = [shards.worker_rows(shard) for shard in range(shards.num_workers)]
    if num_workers < len(sizes):
        return [sum(sizes[worker::num_workers]) for worker in range(num_workers)]
    turns = [divmod(worker, len(sizes)) for worker in range(num_workers)]
    return [len(range(turn, sizes[shard], len(range(shard, num_workers, len(sizes))))) for turn, shard in turns]


def dealt_places(shards: Shards, num_workers: int) -> list[Ints]:
    """Return the numbers of the rows that ``deal`` gives to each of N workers, counted over all shards, int64. Reads no row.

    Raises UsageError if a worker would have no rows."""
    ends = np.cumsum([shards.worker_rows(shard) for shard in range(shards.num_workers)])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    if num_workers < len(numbers):
        return [np.concatenate(numbers[worker::num_workers]) for worker in range(num_workers)]
    places = []
    for worker in range(num_workers):
        turn, shard = divmod(worker, len(numbers))
        sharers = len(range(shard, num_workers, len(numbers)))
        places.append(numbers[shard][turn::sharers])
        if not len(places[-1]):
            raise _empty_worker(num_workers, worker, shard, len(numbers[shard]), sharers)
    return places


def even_places(shards: Shards, num_workers: int, is_trained: Flags | None = None) -> list[Ints]:
    """Return the numbers of the rows of each of N workers whose parts differ by at most one row, int64, ascending.

    The rows of all shards are merged in proportion to the sizes of the shards, and dealt in turn. Every part therefore
    represents the set as its shards do. From shards of equal size, this is what ``deal`` gives to a multiple or a divisor
    of their number. Rows are counted over all shards. Reads no row.

    Args:
        shards: the set.
        num_workers: number of workers.
        is_trained: whether workers train on each row, bool [rows]; the others are dealt to nobody (default: on all).
    Raises:
        UsageError: a worker would have no rows.
    """
    sizes = [shards.worker_rows(shard) for shard in range(shards.num_workers)]
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


def _empty_worker(num_workers: int, worker: int, shard: int, rows: int, sharers: int) -> UsageError:
    return UsageError(
        f"--workers {num_workers}: worker {worker} would have no rows, shard {shard} has {rows} for {sharers} workers;"
        " give fewer"
    )
