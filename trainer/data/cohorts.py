"""The rows and mini-batches of a run whose workers have changed: which rows a worker needs, and the reading of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache

import numpy as np

from pipeline.core.arrays import Ints
from trainer.config import Config
from trainer.coordination.cohorts import Cohort
from trainer.data.augment import Floats
from trainer.data.batches import Batches
from trainer.data.deal import dealt_places, even_places
from trainer.data.sampling import Draw
from trainer.data.shards import Rows, Shards, load_worker
from trainer.sampling.remainder import OpenPasses, WorkerPasses, first_passes, later_passes, open_passes


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


def present_passes(config: Config, shards: Shards) -> list[WorkerPasses]:
    """Return the passes of the workers of the present cohort. Reads no row.

    Raises UsageError if a worker would have no rows."""
    return passes_of(config, shards, config.cohorts.entries)


def passes_of(config: Config, shards: Shards, cohorts: Sequence[Cohort]) -> list[WorkerPasses]:
    """Return the passes of the workers of the last of some cohorts, which follow each other from the start of a run."""
    passes: list[WorkerPasses] = []
    for number, cohort in enumerate(cohorts):
        data = replace(config.data, batch_size=cohort.batch_size)
        ratios = shards.ratios_of(cohort.workers)
        batches = replace(config, data=data).worker_batches(cohort.workers, ratios)
        own = own_places(shards, cohort.workers, passes)
        if number:
            passes = later_passes(passes, cohort, own, batches, number)
        else:
            passes = first_passes(own, batches, config.run.seed)
    return passes


def own_places(shards: Shards, num_workers: int, before: Sequence[WorkerPasses]) -> list[Ints]:
    """Return the numbers of the rows over which each worker of a cohort makes its passes, counted over all shards, int64.

    Workers whose number does not change keep their rows, and a worker per shard has its shard. Otherwise the parts of two
    workers differ by at most one row, because all of them draw mini-batches of the same size.

    Args:
        shards: the set.
        num_workers: workers of the cohort.
        before: the passes of the cohort before; empty for the first one, to which the shards are dealt.
    Raises:
        UsageError: a worker would have no rows.
    """
    if len(before) == num_workers:
        return [passes.own for passes in before]
    if not before or num_workers == shards.num_workers:
        return dealt_places(shards, num_workers)
    return even_places(shards, num_workers)


def passes_left(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], clocks: Sequence[int], num_workers: int
) -> OpenPasses:
    """Return the passes that the last of some cohorts leaves to the next one.

    Args:
        config: the run.
        shards: its set.
        cohorts: the cohorts so far.
        clocks: of each worker of the last one.
        num_workers: workers of the next one.
    Raises:
        UsageError: one of them would have no rows.
    """
    before = passes_of(config, shards, cohorts)
    own_places(shards, num_workers, before)
    return open_passes(before, clocks)


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
        )
        for passes, own_numbers, own_rows in zip(needed, numbers, rows, strict=True)
    ]


def load_numbers(shards: Shards, numbers: Sequence[Ints], *, targets: bool) -> list[Rows]:
    """Read the rows with some numbers over all shards, for each of some workers. Keeps one whole shard in memory.

    Args:
        shards: the set.
        numbers: for each worker int64, ascending.
        targets: read real targets instead of labels.
    Raises:
        DataError, OSError: a file is damaged or cannot be read.
    """
    parts: list[list[Rows]] = [[] for _ in numbers]
    first = 0
    for shard in range(shards.num_workers):
        end = first + shards.worker_rows(shard)
        bounds = [np.searchsorted(own, (first, end)) for own in numbers]
        # Reading a shard takes long, and not every worker needs rows of all.
        if any(begin < stop for begin, stop in bounds):
            rows = load_worker(shards, shard, targets=targets)
            for own, (begin, stop), own_parts in zip(numbers, bounds, parts, strict=True):
                own_parts.append(_pick(rows, own[begin:stop] - first))
        first = end
    return [_joined(own_parts) for own_parts in parts]


def _pick(rows: Rows, places: Ints) -> Rows:
    """Return a copy of the rows at some places, with all that is known about them."""
    columns = (getattr(rows, item.name) for item in fields(Rows))
    return Rows(*(column[places] if len(column) else column for column in columns))


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Rows)))
