"""The rows and mini-batches of the workers of a run that has changed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np

from pipeline.core.arrays import Ints
from trainer.config import Config
from trainer.data.augment import Floats
from trainer.data.batches import Batches
from trainer.data.cohort_passes import present_passes
from trainer.data.loading import load_worker
from trainer.data.own_augmentation import own_augmentation
from trainer.data.rows import Rows, join_rows
from trainer.data.sampling import Draw
from trainer.data.shards import Shards
from trainer.sampling.remainder import WorkerPasses


class CohortSampler:
    """Draws the mini-batches of a worker of a cohort.

    Args:
        rows: the rows that the worker needs.
        numbers: their numbers over all shards, int64, ascending.
        passes: the worker's passes.
    """

    reads_table = False

    def __init__(self, rows: Rows, numbers: Ints, passes: WorkerPasses) -> None:
        self.rows = rows
        self.numbers = numbers
        self.passes = passes
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        self._order = lru_cache(maxsize=2)(passes.order)

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        numbers, passes, next_pass_rows = self.passes.draw(clock, self._order)
        return Draw(self.rows, np.searchsorted(self.numbers, numbers), passes, next_pass_rows)


def build_cohort_batches(
    config: Config, shards: Shards, workers: Sequence[int] | None = None, *, targets: bool
) -> list[Batches]:
    """Return the mini-batches of workers of the present cohort, and read their rows, one shard at a time.

    Args:
        config: the run.
        shards: its set.
        workers: numbers of the workers (default: all).
        targets: read real targets instead of labels.
    Raises:
        DataError, OSError: a file is damaged or cannot be read.
    """
    every = present_passes(config, shards)
    needed = every if workers is None else [every[worker] for worker in workers]
    # Ascending, so that a shard needs to be read only once.
    numbers = [np.unique(np.concatenate([*passes.parts, passes.own])) for passes in needed]
    rows = load_numbers(shards, numbers, targets=targets)
    return [
        Batches(
            CohortSampler(own_rows, own_numbers, passes),
            shards.mean,
            seed=config.run.seed,
            worker=passes.worker,
            augment=config.data.augment,
            own=own_augmentation(config),
        )
        for passes, own_numbers, own_rows in zip(needed, numbers, rows, strict=True)
    ]


def load_numbers(shards: Shards, numbers: Sequence[Ints], *, targets: bool) -> list[Rows]:
    """Read the rows with some numbers over all shards, for each of some workers.

    Keeps these rows and one whole shard in memory, unless rows are mapped.

    Args:
        shards: the set.
        numbers: for each worker int64, ascending.
        targets: read real targets instead of labels.
    Raises:
        DataError, OSError: a file is damaged or cannot be read.
    """
    if shards.mapped:
        return _view_numbers(shards, numbers, targets=targets)
    results: list[Rows | None] = [None for _ in numbers]
    first = 0
    for shard in range(shards.num_workers):
        end = first + shards.worker_rows(shard)
        bounds = [np.searchsorted(own, (first, end)) for own in numbers]
        # Reading a shard takes long, and not every worker needs rows of all.
        if any(begin < stop for begin, stop in bounds):
            rows = load_worker(shards, shard, targets=targets)
            for index, (own, (begin, stop)) in enumerate(zip(numbers, bounds, strict=True)):
                result = results[index] or _empty(rows, len(own))
                _fill(result, rows, own[begin:stop] - first, slice(begin, stop))
                results[index] = result
            del rows  # before the next shard is read, which takes as much memory
        first = end
    return [result for result in results if result is not None]


def _view_numbers(shards: Shards, numbers: Sequence[Ints], *, targets: bool) -> list[Rows]:
    """Return ``load_numbers`` of a set whose rows are mapped: views of all shards together."""
    rows = join_rows([load_worker(shards, shard, targets=targets) for shard in range(shards.num_workers)])
    return [rows.view(own) for own in numbers]


def _empty(rows: Rows, count: int) -> Rows:
    """Return arrays for a number of rows, with the columns of ``rows``; a column that these lack stays empty."""
    columns = (getattr(rows, item.name) for item in fields(Rows))
    return Rows(*(np.empty((count if len(column) else 0, *column.shape[1:]), column.dtype) for column in columns))


def _fill(result: Rows, rows: Rows, places: Ints, target: slice) -> None:
    """Copy the rows at some places to a range of other rows."""
    for item in fields(Rows):
        column = getattr(rows, item.name)
        if len(column):
            getattr(result, item.name)[target] = column[places]
