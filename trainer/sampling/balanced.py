"""``balanced``: as many rows of every group in a mini-batch, however rare the group is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import GroupBy, Population, Sampler, Selection, SelectionStream, groups_option
from trainer.sampling.orders import members_of


@dataclass(frozen=True)
class BalancedSampler(Sampler):
    """Draws the groups of a worker's shard in turn, and the rows of each group in passes over the group.

    Rows of rare groups are therefore drawn more often than others. The numbers of rows of two groups in a mini-batch
    differ by at most one, and so do the numbers of draws of two rows of a group."""

    name: ClassVar[str] = "balanced"
    summary: ClassVar[str] = (
        "equally many rows of each class or neighbourhood in a mini-batch, the rows of rare ones more often"
    )
    sampling_groups: GroupBy = groups_option()

    def stream(self, population: Population) -> SelectionStream:
        members = members_of(population.groups(self.sampling_groups))
        # A mini-batch can contain the end of one pass over a group and the beginning of the next.
        order = lru_cache(maxsize=2 * len(members))(partial(_order, population, members))
        return partial(_select, population, members, order)


def _order(population: Population, members: list[Ints], group: int, turn: int) -> Ints:
    """Return the order of the rows of a group in a pass over it, int64. members: the positions of each group's rows."""
    number = turn * len(members) + group
    return generator(population.seed, Purpose.GROUP_ORDER, population.worker, number).permutation(members[group])


def _select(population: Population, members: list[Ints], order: Callable[[int, int], Ints], clock: int) -> Selection:
    """Return the mini-batch at a clock: position p of the stream has draw p // G of group p % G, of G groups."""
    positions = np.arange(clock * population.batch_size, (clock + 1) * population.batch_size)
    ranks, groups = np.divmod(positions, len(members))
    places = np.empty(len(groups), np.int64)
    for group in np.unique(groups).tolist():
        slots = np.flatnonzero(groups == group)
        turns, inside = np.divmod(ranks[slots], len(members[group]))
        # A mini-batch can contain the end of one pass over a group and the beginning of the next.
        for turn in np.unique(turns).tolist():
            places[slots[turns == turn]] = order(group, turn)[inside[turns == turn]]
    return Selection(places)
