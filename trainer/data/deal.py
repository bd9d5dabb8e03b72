"""A shard set dealt over another number of virtual workers."""

from __future__ import annotations

import numpy as np

from pipeline.core.errors import UsageError
from trainer.data.shards import Rows, Shards, load_worker


def deal(shards: Shards, num_workers: int, *, targets: bool = False) -> list[Rows]:
    """The rows of each virtual worker; with as many workers as shards, its shard's.

    Worker w of more than M shards has a part of shard w mod M, every so many-th row, so it sees what that shard is made
    of; of fewer, it has the shards w, w + N, ... Holds all rows once. Raises UsageError where a worker would have none,
    DataError and OSError as ``load_worker``."""
    held = [load_worker(shards, shard, targets=targets) for shard in range(shards.num_workers)]
    if num_workers < len(held):
        return [_joined(held[worker::num_workers]) for worker in range(num_workers)]
    dealt = []
    for worker in range(num_workers):
        turn, shard = divmod(worker, len(held))
        sharers = len(range(shard, num_workers, len(held)))
        dealt.append(_part(held[shard], slice(turn, None, sharers)))
        if not len(dealt[-1]):
            raise UsageError(
                f"--workers {num_workers}: worker {worker} would have no rows, shard {shard} has {len(held[shard])}"
                f" for {sharers} workers; give fewer"
            )
    return dealt


def _part(rows: Rows, span: slice) -> Rows:
    return Rows(rows.images_NCHW[span], rows.labels[span], rows.ids[span], rows.hashes[span])


def _joined(parts: list[Rows]) -> Rows:
    fields = ("images_NCHW", "labels", "ids", "hashes")
    return Rows(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))
