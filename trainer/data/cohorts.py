"""The rows and mini-batches of the workers of a run that has changed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, word
from trainer.config import Config
from trainer.data.augment import Floats
from trainer.data.batches import Batches, batches_of_sampler, population_of, sampler_of_rows
from trainer.data.cohort_passes import WorkerStream, present_streams
from trainer.data.gossip import GossipSampler
from trainer.data.holdout import trained_rows
from trainer.data.loading import load_worker
from trainer.data.places import present_places, table_entries
from trainer.data.repartition import all_rows, partition_sampler
from trainer.data.rows import Rows, join_rows
from trainer.data.sampling import Draw, RowSampler
from trainer.data.shards import Shards
from trainer.sampling.mixture import mixture_draw


class CohortSampler:
    """Draws the mini-batches of a worker of a cohort.

    Args:
        rows: the rows that the worker needs.
        numbers: their numbers over all shards, int64, ascending.
        stream: the rows that it draws.
        clock: its first clock.
    """

    reads_table = False

    def __init__(self, rows: Rows, numbers: Ints, stream: WorkerStream, clock: int) -> None:
        self.rows = rows
        self.numbers = numbers
        self.clock = clock
        self._draw = _drawing(stream)

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        numbers, passes, next_pass_rows = self._draw(clock - self.clock)
        return Draw(self.rows, np.searchsorted(self.numbers, numbers), passes, next_pass_rows)


def _drawing(stream: WorkerStream) -> Callable[[int], tuple[Ints, int | None, int]]:
    """Return a function from a step of a worker, from 0, to its rows and the two numbers of a Draw about their passes."""
    batch_size = stream.batch_size
    if stream.plans:
        mixed = mixture_draw(stream.plans, stream.passes, batch_size)
        return lambda step: (mixed(step), None, 0)
    [passes] = stream.passes
    # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
    order = lru_cache(maxsize=2)(passes.order)
    return lambda step: passes.draw(step * batch_size, batch_size, order)


class ShiftedSampler:
    """Draws the mini-batches of another sampler, as it would at other clocks.

    Args:
        sampler: the other sampler.
        shift: its clock minus the worker's clock.
    """

    def __init__(self, sampler: RowSampler, shift: int) -> None:
        self.sampler = sampler
        self.shift = shift
        self.reads_table = sampler.reads_table

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        return self.sampler.draw(clock + self.shift, table)


class WorkerDraws(NamedTuple):
    """The rows of one worker, and the sampler that draws from them.

    Attributes:
        worker: its number.
        rows: all rows that it may draw.
        sampler: draws them.
        own: positions of the rows of its own passes among them, int64; None for all.
    """

    worker: int
    rows: Rows
    sampler: RowSampler
    own: Ints | None = None


class CohortBatches(NamedTuple):
    """The mini-batches of one worker, and the rows that it has read for them."""

    batches: Batches
    rows: Rows


def build_cohort_batches(
    config: Config, shards: Shards, workers: Sequence[int] | None = None, *, targets: bool
) -> list[CohortBatches]:
    """Return the mini-batches of workers of the present cohort, and read their rows, one shard at a time.

    Args:
        config: the run.
        shards: its set.
        workers: numbers of the workers (default: all).
        targets: read real targets instead of labels.
    Raises:
        DataError, OSError: a file is damaged or cannot be read.
    """
    numbers = range(config.cohorts.present.workers) if workers is None else workers
    if config.data.repartition != "fixed":
        draws = _draws_of_deals
    else:
        draws = _draws_of_passes if config.sampler.makes_passes else _draws_without_passes
    results = []
    # The clocks and the augmentation are those of the run: only the rows are drawn by the cohort's rule.
    for each in draws(config, shards, numbers, targets):
        worker, rows, sampler, _ = each
        if config.data.gossip:
            sampler = _with_gossip(config, shards, each)
        results.append(CohortBatches(batches_of_sampler(config, shards, sampler, worker), rows))
    return results


def _with_gossip(config: Config, shards: Shards, draws: WorkerDraws) -> GossipSampler:
    """Return the sampler of a worker that exchanges examples. It begins without any, and without losses."""
    worker, rows, sampler, own = draws
    cohort = config.cohorts.present
    batch_size = config.cohort_batches(cohort, shards.ratios_of(cohort.workers))[worker]
    steps_per_pass = -(-len(rows if own is None else own) // batch_size)
    return GossipSampler(
        sampler, rows, config, worker, batch_size, steps_per_pass, places=own, begin=cohort.clock, turn=cohort.turn
    )


def _draws_of_passes(config: Config, shards: Shards, workers: Sequence[int], targets: bool) -> list[WorkerDraws]:
    """Return the draws of some workers, whose passes complete the open ones of the cohort before."""
    every = present_streams(config, shards)
    needed = [every[worker] for worker in workers]
    # Ascending, so that a shard needs to be read only once.
    numbers = [stream.numbers() for stream in needed]
    rows = load_numbers(shards, numbers, targets=targets)
    clock = config.cohorts.present.clock
    draws = []
    for stream, own_numbers, own_rows in zip(needed, numbers, rows, strict=True):
        own = np.searchsorted(own_numbers, np.sort(np.concatenate([passes.own for passes in stream.passes])))
        draws.append(WorkerDraws(stream.worker, own_rows, CohortSampler(own_rows, own_numbers, stream, clock), own))
    return draws


def _draws_without_passes(config: Config, shards: Shards, workers: Sequence[int], targets: bool) -> list[WorkerDraws]:
    """Return the draws of some workers by a sampler without passes, which leave nothing to complete.

    The workers draw from their present rows as they would draw at this epoch if the run had had them from the start, with
    random numbers of the cohort's own."""
    cohorts = config.cohorts.entries
    cohort = config.cohorts.present
    places = present_places(shards.shard_rows, [each.workers for each in cohorts], trained_rows(shards, config))
    entries = table_entries(shards.shard_rows, cohorts[0].workers) if config.table_sampler else None
    batches = config.worker_batches(cohort.workers, shards.ratios_of(cohort.workers))
    seed = word(config.run.seed, Purpose.COHORT, len(cohorts) - 1)
    draws = []
    # Together, so that each shard is read once for all of them.
    all_rows = load_numbers(shards, [places[worker] for worker in workers], targets=targets)
    for worker, rows in zip(workers, all_rows, strict=True):
        population = population_of(config, shards, rows, None, batches[worker], worker)
        numbers = None if entries is None else entries[places[worker]]
        population = replace(population, seed=seed, numbers=numbers)
        sampler = sampler_of_rows(config, shards, rows, population, cohort.workers)
        draws.append(WorkerDraws(worker, rows, ShiftedSampler(sampler, cohort.epoch_steps - cohort.clock)))
    return draws


def _draws_of_deals(config: Config, shards: Shards, workers: Sequence[int], targets: bool) -> list[WorkerDraws]:
    """Return the draws of some workers among whom all rows are divided anew."""
    rows = all_rows(shards, targets=targets)
    num_workers = config.cohorts.present.workers
    return [
        WorkerDraws(worker, rows, partition_sampler(config, shards, rows, worker, num_workers)) for worker in workers
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
