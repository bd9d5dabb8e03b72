"""``representative``: every mini-batch is stratified, so that it represents the worker's shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import GroupBy, Population, Sampler, SelectionStream, groups_option
from trainer.sampling.orders import level_pattern, members_of, select_of_passes


@dataclass(frozen=True)
class RepresentativeSampler(Sampler):
    """Draws passes over all rows, in which the groups alternate as evenly as possible.

    Among the first p rows of a pass, each group has its share of p, rounded up or down. The number of its rows in a
    mini-batch therefore differs from its share by less than two, without a row being drawn more often than others."""

    name: ClassVar[str] = "representative"
    summary: ClassVar[str] = "pass over a worker's rows, with each class or neighbourhood in proportion in a mini-batch"
    makes_passes: ClassVar[bool] = True
    sampling_groups: GroupBy = groups_option()

    def stream(self, population: Population) -> SelectionStream:
        members = members_of(population.groups(self.sampling_groups))
        rng = generator(population.seed, Purpose.GROUP_PATTERN, population.worker)
        # The sequence of groups is that of all passes: only which row of a group comes when is drawn for each pass.
        slots = members_of(level_pattern(np.array([len(rows) for rows in members]), rng))
        order = partial(_order, population, members, slots)
        return partial(select_of_passes, population, lru_cache(maxsize=2)(order))


def _order(population: Population, members: list[Ints], slots: list[Ints], turn: int) -> Ints:
    """Return the order of the rows in a pass. slots: the positions of each group in it."""
    rng = generator(population.seed, Purpose.GROUP_ORDER, population.worker, turn)
    order = np.empty(len(population), np.int64)
    for rows, positions in zip(members, slots, strict=True):
        order[positions] = rng.permutation(rows)
    return order
