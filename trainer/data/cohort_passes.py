"""The rows of the workers of a run that has changed them, and the passes over them. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.arrays import Flags, Ints
from trainer.config import Config
from trainer.coordination.cohorts import Cohort
from trainer.data.deal import dealt_places, even_places
from trainer.data.holdout import only_trained, trained_rows
from trainer.data.repartition import epochs_left
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
    return _passes(config, shards, config.cohorts.entries, rule, trained_rows(shards, config))


def _passes(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], rule: PassRule, is_trained: Flags | None
) -> list[WorkerPasses]:
    """Return the passes of the workers of the last of some cohorts, which follow each other from the start of a run.

    is_trained: the result of ``trained_rows``."""
    passes: list[WorkerPasses] = []
    for number, cohort in enumerate(cohorts):
        batches = config.cohort_batches(cohort, shards.ratios_of(cohort.workers))
        own = own_places(shards, cohort.workers, [each.own for each in passes], is_trained)
        passes = later_passes(passes, cohort, own, batches, number) if number else first_passes(own, batches, rule)
    return passes


def present_places(shards: Shards, cohorts: Sequence[Cohort], is_trained: Flags | None) -> list[Ints]:
    """Return the rows of each worker of the last of some cohorts, by the arguments of ``own_places``."""
    own: list[Ints] = []
    for cohort in cohorts:
        own = own_places(shards, cohort.workers, own, is_trained)
    return own


def own_places(shards: Shards, num_workers: int, before: Sequence[Ints], is_trained: Flags | None = None) -> list[Ints]:
    """Return the numbers of the rows over which each worker of a cohort makes its passes, counted over all shards, int64.

    Workers whose number does not change keep their rows, and a worker per shard has its shard. Otherwise the parts of two
    workers differ by at most one row, because all of them draw mini-batches of the same size.

    Args:
        shards: the set.
        num_workers: workers of the cohort.
        before: the rows of the cohort before; empty for the first one, to which the shards are dealt.
        is_trained: the result of ``trained_rows`` (default: workers train on all rows).
    Raises:
        UsageError: a worker would have no rows.
    """
    if len(before) == num_workers:
        return list(before)
    if before and num_workers != shards.num_workers:
        return even_places(shards, num_workers, is_trained)
    own = dealt_places(shards, num_workers)
    if is_trained is None:
        return own
    return [only_trained(rows, is_trained[rows], worker) for worker, rows in enumerate(own)]


def passes_left(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], clocks: Sequence[int], num_workers: int
) -> OpenPasses:
    """Return the passes that the last of some cohorts leaves to the next one; none if the sampler makes no passes.

    Epochs of random deals count as passes.

    Args:
        config: the run.
        shards: its set.
        cohorts: the cohorts so far.
        clocks: of each worker of the last one.
        num_workers: workers of the next one.
    Raises:
        UsageError: one of them would have no rows, or the rows cannot be dealt to them.
    """
    if config.data.repartition != "fixed":
        return epochs_left(config, shards, cohorts, clocks, num_workers)
    is_trained = trained_rows(shards, config)
    own_places(shards, num_workers, present_places(shards, cohorts, is_trained), is_trained)
    if not config.sampler.makes_passes:
        return OpenPasses(0, 0, 0)
    # The number of rows that are left does not depend on their order.
    return open_passes(_passes(config, shards, cohorts, PassRule(config.run.seed), is_trained), clocks)
