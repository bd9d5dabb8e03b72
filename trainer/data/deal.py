"""The distribution of a shard set over another number of virtual workers."""

from __future__ import annotations

from trainer.data.loading import load_worker
from trainer.data.places import shared_shards
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
    sizes = [len(rows) for rows in rows_by_shard]
    return [rows_by_shard[shard].view(own) for shard, own in shared_shards(sizes, num_workers)]


def dealt_sizes(shards: Shards, num_workers: int) -> list[int]:
    """Return the number of rows that ``deal`` gives to each of N workers. Reads no row. Raises UsageError as ``deal``."""
    sizes = shards.shard_rows
    if num_workers < len(sizes):
        return [sum(sizes[worker::num_workers]) for worker in range(num_workers)]
    return [len(range(sizes[shard])[own]) for shard, own in shared_shards(sizes, num_workers)]
