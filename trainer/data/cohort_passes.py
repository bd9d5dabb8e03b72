"""The rows of the workers of a run that has changed them, and the passes over them. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.core.arrays import Ints
from trainer.config import Config
from trainer.coordination.cohorts import Cohort
from trainer.data.deal import dealt_places, even_places
from trainer.data.shard_file import read_groups
from trainer.data.shards import Shards
from trainer.sampling.passes import PassSampler
from trainer.sampling.remainder import OpenPasses, PassRule, WorkerPasses, first_passes, later_passes, open_passes


def present_passes(config: Config, shards: Shards) -> list[WorkerPasses]:
    """Return the passes of the workers of the present cohort. Reads no image, and no row unless the sampler has groups.

    Raises UsageError if a worker would have no rows, DataError and OSError."""
    assert isinstance(config.sampler, PassSampler)
    grouping = config.sampler.grouping
    groups = read_groups(shards, grouping) if grouping else None
    rule = PassRule(config.run.seed, config.sampler, groups)
    return _passes(config, shards, config.cohorts.entries, rule)


def _passes(config: Config, shards: Shards, cohorts: Sequence[Cohort], rule: PassRule) -> list[WorkerPasses]:
    """Return the passes of the workers of the last of some cohorts, which follow each other from the start of a run."""
    passes: list[WorkerPasses] = []
    for number, cohort in enumerate(cohorts):
        data = replace(config.data, batch_size=cohort.batch_size)
        ratios = shards.ratios_of(cohort.workers)
        batches = replace(config, data=data).worker_batches(cohort.workers, ratios)
        own = own_places(shards, cohort.workers, [each.own for each in passes])
        passes = later_passes(passes, cohort, own, batches, number) if number else first_passes(own, batches, rule)
    return passes


def present_places(shards: Shards, cohorts: Sequence[Cohort]) -> list[Ints]:
    """Return the rows of each worker of the last of some cohorts, as ``own_places`` does."""
    own: list[Ints] = []
    for cohort in cohorts:
        own = own_places(shards, cohort.workers, own)
    return own


def own_places(shards: Shards, num_workers: int, before: Sequence[Ints]) -> list[Ints]:
    """Return the numbers of the rows over which each worker of a cohort makes its passes, counted over all shards, int64.

    Workers whose number does not change keep their rows, and a worker per shard has its shard. Otherwise the parts of two
    workers differ by at most one row, because all of them draw mini-batches of the same size.

    Args:
        shards: the set.
        num_workers: workers of the cohort.
        before: the rows of the cohort before; empty for the first one, to which the shards are dealt.
    Raises:
        UsageError: a worker would have no rows.
    """
    if len(before) == num_workers:
        return list(before)
    if not before or num_workers == shards.num_workers:
        return dealt_places(shards, num_workers)
    return even_places(shards, num_workers)


def passes_left(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], clocks: Sequence[int], num_workers: int
) -> OpenPasses:
    """Return the passes that the last of some cohorts leaves to the next one; none if the sampler makes no passes.

    Args:
        config: the run.
        shards: its set.
        cohorts: the cohorts so far.
        clocks: of each worker of the last one.
        num_workers: workers of the next one.
    Raises:
        UsageError: one of them would have no rows.
    """
    own_places(shards, num_workers, present_places(shards, cohorts))
    if not config.sampler.makes_passes:
        return OpenPasses(0, 0, 0)
    # The number of rows that are left does not depend on their order.
    return open_passes(_passes(config, shards, cohorts, PassRule(config.run.seed)), clocks)
