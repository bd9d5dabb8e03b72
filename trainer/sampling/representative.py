"""``representative``: every mini-batch is stratified, so that it represents the worker's shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import GroupBy, groups_option
from trainer.sampling.orders import PassOrder, level_pattern, members_of
from trainer.sampling.passes import PassRows, PassSampler


@dataclass(frozen=True)
class RepresentativeSampler(PassSampler):
    """Draws passes over all rows, in which the groups alternate as evenly as possible.

    Among the first p rows of a pass, each group has its share of p, rounded up or down. The number of its rows in a
    mini-batch therefore differs from its share by less than two, without a row being drawn more often than others."""

    name: ClassVar[str] = "representative"
    summary: ClassVar[str] = "pass over a worker's rows, with each class or neighbourhood in proportion in a mini-batch"
    sampling_groups: GroupBy = groups_option()

    def pass_order(self, rows: PassRows) -> PassOrder:
        assert rows.groups is not None, "checked before the run"
        members = members_of(np.unique(rows.groups, return_inverse=True)[1])
        rng = generator(rows.seed, Purpose.GROUP_PATTERN, rows.worker)
        # The sequence of groups is that of all passes: only which row of a group comes when is drawn for each pass.
        slots = members_of(level_pattern(np.array([len(places) for places in members]), rng))
        return partial(_order, rows, members, slots)


def _order(rows: PassRows, members: list[Ints], slots: list[Ints], turn: int) -> Ints:
    """Return the order of the rows in a pass. slots: the positions of each group in it."""
    rng = generator(rows.seed, Purpose.GROUP_ORDER, rows.worker, turn)
    order = np.empty(rows.num_rows, np.int64)
    for places, positions in zip(members, slots, strict=True):
        order[positions] = rng.permutation(places)
    return order
