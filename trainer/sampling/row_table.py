"""The base class of samplers whose loss table has an entry for each row."""

from __future__ import annotations

from abc import abstractmethod
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
class RowTableSampler(TableSampler):
    """The base class of samplers that draw rows by what the model predicted for each of them before.

    After passes over all rows, the rows of a mini-batch are drawn without replacement, by weights between 1 and
    ``pressure``."""

    has_owners: ClassVar[bool] = True
    has_row_entries: ClassVar[bool] = True
    pressure: float = option(
        100.0, "ratio of the probabilities of the most and the least likely row of a draw", least=1, most=1e6
    )

    @property
    def passes(self) -> int:
        """Passes over all rows before any row is drawn by the table."""
        return 1

    @abstractmethod
    def logits(self, entries: LossTable) -> npt.NDArray[np.float64]:
        """Return the logarithm of each row's weight, up to a constant, float64 [N]. entries: of the rows, float32 [N]."""

    @abstractmethod
    def entries(self, before: LossTable, losses: LossTable, hits: npt.NDArray[np.bool_]) -> LossTable:
        """Return new entries of rows, float32 [R].

        Args:
            before: their present entries, float32 [R].
            losses: their losses in a mini-batch, float32 [R].
            hits: whether their predictions were correct, bool [R].
        """

    def length(self, sizes: SetSizes) -> int:
        return sizes.rows

    def keys(self, population: Population) -> Ints:
        assert population.numbers is not None, "given to samplers with a table"
        return population.numbers

    def table_stream(self, population: Population) -> TableStream:
        return partial(self._select, population)

    def _select(self, population: Population, clock: int, table: LossTable) -> Selection:
        rows = len(population)
        batch = population.batch_size
        if clock * batch < self.passes * rows:
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
        last = len(keys) - 1 - first_of_reversed
        return changed, self.entries(table[changed], losses[last], hits[last])
