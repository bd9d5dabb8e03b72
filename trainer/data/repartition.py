"""The mini-batches of a run that repartitions: drawn from all rows of its set; see ``trainer/sampling/repartition.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from trainer.config import Config
from trainer.coordination.cohorts import Cohort, Cohorts
from trainer.data.augment import Floats
from trainer.data.deal import deal
from trainer.data.rows import Rows
from trainer.data.sampling import Draw
from trainer.data.shards import Shards
from trainer.sampling.loss_statistics import LossStatistics
from trainer.sampling.partition_plan import PartitionPlan
from trainer.sampling.partition_stream import PartitionStream
from trainer.sampling.remainder import OpenPasses


class PartitionSampler:
    """Draws from all rows of a set, divided by a plan.

    Args:
        rows: all rows of the set.
        plan: the division.
        worker: number of the worker.
        statistics: the losses that divide the rows; None if losses do not count.
    """

    def __init__(self, rows: Rows, plan: PartitionPlan, worker: int, statistics: LossStatistics | None) -> None:
        self.rows = rows
        self.plan = plan
        self.statistics = statistics
        self.reads_table = statistics is not None
        self._stream = PartitionStream(plan, worker)
        # By id, so that the division does not depend on the shards that the rows come from.
        self._places: Ints = np.argsort(rows.ids, kind="stable")

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        if self.statistics is None:
            return Draw(self.rows, self._places[self._stream.draw(clock, None).numbers])
        assert table is not None, "every caller has the parameters"
        phase = self.plan.phase(clock)
        options = self.plan.options
        first_losses = options.warmup_epochs - options.ignore_epochs
        losses = first_losses if phase.number == 1 else options.interval
        importance = self.statistics.importance(table, phase, losses) if phase.number else None
        selection = self._stream.draw(clock, importance)
        keys = self.statistics.row_keys(phase, selection, len(self.rows))
        return Draw(self.rows, self._places[selection.numbers], keys=keys)


def all_rows(shards: Shards, *, targets: bool = False) -> Rows:
    """Return the rows of all shards of a set, each once. Raises as ``deal``.

    Needs twice their memory while it copies, unless images are mapped."""
    rows = deal(shards, 1, targets=targets)[0]
    firsts = np.unique(rows.ids, return_index=True)[1]
    return rows if len(firsts) == len(rows) else rows.view(np.sort(firsts))


def partition_plan(config: Config, shards: Shards, num_workers: int) -> PartitionPlan:
    """Return the plan of the workers of a run, who may follow others.

    Raises UsageError for a set or a mini-batch that cannot be repartitioned."""
    _refuse_ratios(config, shards, num_workers)
    plan = config.partition_plan(shards.rows, num_workers)
    plan.check()
    return plan


def rows_left(
    config: Config, shards: Shards, cohorts: Sequence[Cohort], clocks: Sequence[int], num_workers: int
) -> OpenPasses:
    """Return the epochs of deals that the last of some cohorts leaves to the next one, or the passes of an interval.

    Raises UsageError for a set or a mini-batch that cannot be repartitioned. See ``passes_left`` for the arguments."""
    _refuse_ratios(config, shards, num_workers)
    before = replace(config, cohorts=Cohorts(tuple(cohorts))).partition_plan(shards.rows, cohorts[-1].workers)
    later = before.followed_by(clocks, config.worker_batches(num_workers))
    if config.data.repartition == "random":
        return OpenPasses(later.turns.start, later.turns.stop, later.left_out)
    return OpenPasses(0, 0, later.left_out)  # each interval counts its passes anew


def _refuse_ratios(config: Config, shards: Shards, num_workers: int) -> None:
    """Raise UsageError for a set whose shards are not equal."""
    if shards.ratios_of(num_workers):
        raise UsageError(
            f"--repartition {config.data.repartition} divides rows equally, and the shards have ratios: make them without"
            " --ratios"
        )


def partition_sampler(config: Config, shards: Shards, rows: Rows, worker: int, num_workers: int) -> PartitionSampler:
    """Return the sampler of one worker of a run that repartitions. rows: all rows of the set."""
    return PartitionSampler(rows, partition_plan(config, shards, num_workers), worker, config.loss_statistics)
