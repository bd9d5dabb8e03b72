"""``weighted``: rows are drawn in proportion to weights of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import Population, Sampler, Selection, SelectionStream, example_table_option
from trainer.sampling.orders import PassOrder, indices


@dataclass(frozen=True)
class WeightedSampler(Sampler):
    """Draws rows in proportion to their weights, by systematic sampling.

    Of every N draws in a shard of N rows, a row with the share p of the shard's weights gets N p, rounded up or down. The
    rounding is random with the expected value N p, so that there is no bias, and less variance than with independent
    draws."""

    name: ClassVar[str] = "weighted"
    summary: ClassVar[str] = "draw a worker's rows in proportion to their weights in a table"
    column: ClassVar[str] = "weight"
    example_table: str = example_table_option()

    def stream(self, population: Population) -> SelectionStream:
        weights = population.values
        assert weights is not None, "read by the table's column"
        with np.errstate(over="ignore"):
            total = weights.sum()
        # Only then, because the division may change the last bits of shares.
        if not np.isfinite(total):
            weights = weights / weights.max()
            total = weights.sum()
        if weights.min() < 0 or not total > 0:
            raise UsageError(
                f"--example-table {self.example_table}: the weights of worker {population.worker}'s rows must be 0 or more,"
                f" and not all 0; the least is {weights.min():g}"
            )
        order = lru_cache(maxsize=2)(partial(_order, population, weights / total))
        return partial(_select, population, order)


def _order(population: Population, shares: np.ndarray, turn: int) -> Ints:
    """Return the rows of the next N draws, in random order, for a shard of N rows. shares: float64 [N], of sum 1."""
    rng = generator(population.seed, Purpose.GROUP_ORDER, population.worker, turn)
    rows = rng.permutation(len(population))
    # A ruler with a mark at every whole number and a random start is laid along the shares: a row gets as many draws as
    # there are marks in its share. The end is set, because rounding could lose the last mark.
    ends = np.cumsum(shares[rows]) * len(population)
    ends[-1] = len(population)
    marks = np.floor(ends + rng.random()).astype(np.int64)
    return rng.permutation(np.repeat(rows, np.diff(marks, prepend=0)))


def _select(population: Population, order: PassOrder, clock: int) -> Selection:
    batch = population.batch_size
    return Selection(indices(len(population), batch, clock, population.seed, population.worker, order))
