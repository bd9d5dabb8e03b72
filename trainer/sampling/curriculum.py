"""``curriculum``: easy rows first, by the losses of another run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from trainer.sampling.base import Population, Sampler, Selection, SelectionStream, example_table_option


class CurriculumPass(NamedTuple):
    """A pass over the easiest rows. position: number of its first example among all draws; rows: how many rows."""

    position: int
    rows: int


@dataclass(frozen=True)
class CurriculumSampler(Sampler):
    """Draws passes over the easiest rows of a shard, a share that grows linearly until it is the whole shard.

    Each pass draws its rows once, in random order. Each pass has the size of the share at its beginning."""

    name: ClassVar[str] = "curriculum"
    summary: ClassVar[str] = "pass over the easiest rows first, by losses in a table, and over more in each later pass"
    column: ClassVar[str] = "loss"
    example_table: str = example_table_option()
    easy_share: float = option(0.2, "share of the rows in the first pass", least=0.01, most=1)
    all_after: float = option(
        10.0, "epochs after which passes contain all rows", metavar="EPOCHS", least=0, most=10_000
    )

    def stream(self, population: Population) -> SelectionStream:
        assert population.values is not None, "read by the table's column"
        by_ease = np.argsort(population.values, kind="stable")
        order = lru_cache(maxsize=2)(partial(_order, population, by_ease))
        return partial(_select, population, self.passes(population), order)

    def passes(self, population: Population) -> list[CurriculumPass]:
        """Return the passes up to the first one over all rows, which all later ones repeat."""
        epoch_rows = population.batch_size * population.epoch_steps
        passes = [CurriculumPass(0, 0)]  # an empty one, dropped at the end
        while passes[-1].rows < len(population):
            position = passes[-1].position + passes[-1].rows  # the next pass begins where the last one ends
            epoch = position / epoch_rows
            grown = min(1.0, epoch / self.all_after) if self.all_after else 1.0
            rows = math.ceil(len(population) * (self.easy_share + (1 - self.easy_share) * grown))
            passes.append(CurriculumPass(position, rows))
        return passes[1:]


def _order(population: Population, by_ease: Ints, rows: int, turn: int) -> Ints:
    """Return the order of the easiest rows in a pass. by_ease: positions of all rows, the easiest first."""
    return generator(population.seed, Purpose.GROUP_ORDER, population.worker, turn).permutation(by_ease[:rows])


def _select(
    population: Population, passes: list[CurriculumPass], order: Callable[[int, int], Ints], clock: int
) -> Selection:
    """Return the mini-batch at a clock. passes: up to the first one over all rows; order: from (rows, turn)."""
    position = clock * population.batch_size
    stop = position + population.batch_size
    parts = []
    # A mini-batch may cross ends of passes.
    while position < stop:
        number = bisect_right(passes, position, key=lambda each: each.position) - 1
        turns, inside = divmod(position - passes[number].position, passes[number].rows)
        parts.append(order(passes[number].rows, number + turns)[inside : inside + stop - position])
        position += len(parts[-1])
    return Selection(np.concatenate(parts))
