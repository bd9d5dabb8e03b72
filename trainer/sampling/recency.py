"""``recency``: online batch selection, by the most recent loss of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from trainer.sampling.base import LossTable, Population, Selection, SetSizes, TableSampler, TableStream
from trainer.sampling.orders import indices


@dataclass(frozen=True)
class RecencySampler(TableSampler):
    """Draws rows by the rank of their most recent loss: the probability falls exponentially from rank to rank.

    From rank to rank of N rows, the weight falls by the factor pressure^(1/N), so that the row of the greatest loss has
    about ``pressure`` times the weight of the one of the least. The first pass draws every row once.

    Loshchilov and Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2015."""

    name: ClassVar[str] = "recency"
    summary: ClassVar[str] = "draw a row the more often, the greater its most recent loss is among a worker's rows"
    first_value: ClassVar[float] = -1.0  # below any loss: the row has not been drawn, and is due before all others
    has_owners: ClassVar[bool] = True
    has_row_entries: ClassVar[bool] = True
    pressure: float = option(
        100.0, "ratio of the probabilities of the rows of greatest and least loss", least=1, most=1e6
    )

    def length(self, sizes: SetSizes) -> int:
        return sizes.rows

    def keys(self, population: Population) -> Ints:
        assert population.numbers is not None, "given to samplers with a table"
        return population.numbers

    def table_stream(self, population: Population) -> TableStream:
        return partial(self._select, population)

    def logits(self, losses: LossTable) -> npt.NDArray[np.float64]:
        """Return the logarithm of each row's weight. losses: most recent ones of a worker's rows, float32 [N]."""
        ranks = np.empty(len(losses))
        # The loss of a row that was never drawn is negative; its rank is before all others.
        ranks[np.argsort(np.where(losses < 0, -np.inf, -losses), kind="stable")] = np.arange(len(losses))
        return -math.log(self.pressure) * ranks / len(losses)

    def _select(self, population: Population, clock: int, table: LossTable) -> Selection:
        rows = len(population)
        batch = population.batch_size
        if clock * batch < rows:
            return Selection(indices(rows, batch, clock, population.seed, population.worker))
        rng = generator(population.seed, Purpose.TABLE_DRAW, population.worker, clock)
        # The greatest of these sums are a sample without replacement, one row after the other by the weights that are
        # left (the Gumbel-max trick).
        order = np.argsort(-(self.logits(table[population.numbers]) + rng.gumbel(size=rows)), kind="stable")
        return Selection(np.resize(order, batch))

    def targets(
        self, table: LossTable, keys: Ints, losses: LossTable, hits: npt.NDArray[np.bool_]
    ) -> tuple[Ints, LossTable]:
        # Of a row that is in the mini-batch twice the last example counts.
        changed, first_of_reversed = np.unique(keys[::-1], return_index=True)
        return changed, losses[::-1][first_of_reversed]
