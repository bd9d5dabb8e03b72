"""The rows of the workers of a run that has changed them, and the passes over them. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Flags, Ints
from trainer.config import Config
from trainer.coordination.cohorts import Cohort
from trainer.data.holdout import trained_rows
from trainer.data.places import own_places, present_places
from trainer.data.repartition import rows_left
from trainer.data.shard_file import read_groups
from trainer.data.shards import Shards
from trainer.sampling.mixture import SourcePlan, cohort_plans, examples_before, parse_mix, source_rules
from trainer.sampling.passes import PassSampler
from trainer.sampling.remainder import OpenPasses, PassRule, WorkerPasses, first_passes, later_passes, open_passes


class WorkerStream(NamedTuple):
    """The rows that a worker of a cohort draws.

    Attributes:
        worker: its number.
        batch_size: its rows per mini-batch.
        passes: its passes over each set of a mixture, or over the only set.
        plans: the sets of its examples; empty for a run that mixes none.
    """

    worker: int
    batch_size: int
    passes: list[WorkerPasses]
    plans: list[SourcePlan]

    def numbers(self) -> Ints:
        """Return the numbers of all rows that it may draw, counted over all shards, int64, ascending."""
        return np.unique(np.concatenate([rows for passes in self.passes for rows in (*passes.parts, passes.own)]))

    def examples(self, steps: int) -> list[int]:
        """Return how many rows of each set it draws in its first steps."""
        count = steps * self.batch_size
        return examples_before(self.plans, count) if self.plans else [count]


def present_streams(config: Config, shards: Shards) -> list[WorkerStream]:
    """Return the rows of the workers of the present cohort. Reads no image, and no row unless the sampler has groups.

    Raises UsageError if a worker would have no rows, DataError and OSError."""
    assert isinstance(config.sampler, PassSampler)
    grouping = config.sampler.grouping
    groups = read_groups(shards, grouping) if grouping else None
    rules = [PassRule(config.run.seed, config.sampler, groups)]
    if config.data.mix:
        rules = source_rules(config.run.seed, len(shards.sets))
    return _streams(config, shards, config.cohorts.entries, rules, trained_rows(shards, config))


def _streams(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], rules: Sequence[PassRule], is_trained: Flags | None
) -> list[WorkerStream]:
    """Return the rows of the workers of the last of some cohorts, which follow each other from the start of a run.

    rules: of each set of a mixture; is_trained: the result of ``trained_rows``."""
    streams: list[WorkerStream] = []
    passes: list[list[WorkerPasses]] = []
    for number, cohort in enumerate(cohorts):
        # Workers whose number does not change keep their rows.
        own = own_by_set(shards, cohort.workers, [[each.own for each in before] for before in passes], is_trained)
        if number:
            positions = _positions(streams, cohorts[number - 1], cohort.own_ends)
            passes = [
                later_passes(before, at, rows, number * len(rules) + source)
                for source, (before, at, rows) in enumerate(zip(passes, positions, own, strict=True))
            ]
        else:
            passes = [first_passes(rows, rule) for rows, rule in zip(own, rules, strict=True)]
        batches = config.cohort_batches(cohort, shards.ratios_of(cohort.workers))
        streams = [
            WorkerStream(
                worker, batch, [each[worker] for each in passes], _plans(config, cohort, number, batch, worker)
            )
            for worker, batch in enumerate(batches)
        ]
    return streams


def _positions(streams: Sequence[WorkerStream], cohort: Cohort, ends: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each set how many rows of it each worker of a cohort has drawn when it ends.

    ends: their clocks, without mini-batches of other workers' examples."""
    counts = [stream.examples(end - cohort.clock) for stream, end in zip(streams, ends, strict=True)]
    return list(zip(*counts, strict=True))


def _plans(config: Config, cohort: Cohort, number: int, batch_size: int, worker: int) -> list[SourcePlan]:
    """Return the sets of the examples of a worker of a cohort; empty for a run that mixes none."""
    if not config.data.mix:
        return []
    spans = parse_mix(config.data.mix)
    return cohort_plans(spans, batch_size, config.run.seed, worker, clock=cohort.clock, number=number)


def own_by_set(
    shards: Shards, num_workers: int, before: list[list[Ints]], is_trained: Flags | None
) -> list[list[Ints]]:
    """Return ``own_places`` of each set of a mixture, or of a set as the only one, counted over all shards.

    before: the result for the cohort before; empty for the first one."""
    if not shards.sets:
        return [own_places(shards.shard_rows, num_workers, before[0] if before else [], is_trained)]
    if before and len(before[0]) == num_workers:
        return before
    # The shards of a mixture have the rows of its sets one after the other.
    sizes = [[each.worker_rows(shard) for each in shards.sets] for shard in range(shards.num_workers)]
    sets = np.repeat(np.tile(np.arange(len(shards.sets)), len(sizes)), np.ravel(sizes))
    if not before:
        own = own_places(shards.shard_rows, num_workers, [], is_trained)
        return [[rows[sets[rows] == number] for rows in own] for number in range(len(shards.sets))]
    result = []
    for number, each in enumerate(shards.sets):
        rows = np.flatnonzero(sets == number)
        own = own_places(each.shard_rows, num_workers, before[number], None if is_trained is None else is_trained[rows])
        result.append([rows[places] for places in own])
    return result


def passes_left(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], clocks: Sequence[int], num_workers: int
) -> OpenPasses:
    """Return the passes that the last of some cohorts leaves to the next one; none if the sampler makes no passes.

    Epochs of random deals count as passes.

    Args:
        config: the run.
        shards: its set.
        cohorts: the cohorts so far.
        clocks: of each worker of the last one, without mini-batches of other workers' examples.
        num_workers: workers of the next one.
    Raises:
        UsageError: one of them would have no rows, or the rows cannot be dealt to them.
    """
    if config.data.repartition != "fixed":
        return rows_left(config, shards, cohorts, clocks, num_workers)
    is_trained = trained_rows(shards, config)
    if not config.sampler.makes_passes:
        present = present_places(shards.shard_rows, [each.workers for each in cohorts], is_trained)
        own_places(shards.shard_rows, num_workers, present, is_trained)
        return OpenPasses(0, 0, 0)
    # The number of rows that are left does not depend on their order.
    streams = _streams(config, shards, cohorts, [PassRule(config.run.seed)] * max(1, len(shards.sets)), is_trained)
    passes = list(zip(*(stream.passes for stream in streams), strict=True))
    own_by_set(shards, num_workers, [[each.own for each in before] for before in passes], is_trained)
    open_ = [open_passes(*pair) for pair in zip(passes, _positions(streams, cohorts[-1], clocks), strict=True)]
    if not config.data.mix:
        return open_[0]
    # Each set has its own passes, so that there is no number of passes over all rows.
    return OpenPasses(0, 0, sum(each.left_out for each in open_))
