"""``curriculum``: easy rows first, by the losses of another run."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from trainer.sampling.base import Population, Sampler, Selection, SelectionStream, example_table_option


class CurriculumSpan(NamedTuple):
    """Consecutive passes over the same number of the easiest rows.

    Attributes:
        position: number of the first example among all draws.
        rows: rows of each pass.
        number: number of the first pass among all passes.
    """

    position: int
    rows: int
    number: int


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
        return partial(_select, population, self.spans(population), order)

    def spans(self, population: Population) -> list[CurriculumSpan]:
        """Return the spans of passes up to the one over all rows, which has no end. O(log passes) for each."""
        span = CurriculumSpan(0, self._pass_rows(population, 0), 0)
        spans = [span]
        while span.rows < len(population):
            passes = self._passes_of(span, population)
            position = span.position + passes * span.rows
            span = CurriculumSpan(position, self._pass_rows(population, position), span.number + passes)
            spans.append(span)
        return spans

    def _pass_rows(self, population: Population, position: int) -> int:
        """Return the rows of a pass that begins at a position. They never fall as the position grows."""
        epoch = position / (population.batch_size * population.epoch_steps)
        grown = min(1.0, epoch / self.all_after) if self.all_after else 1.0
        return math.ceil(len(population) * (self.easy_share + (1 - self.easy_share) * grown))

    def _passes_of(self, span: CurriculumSpan, population: Population) -> int:
        """Return how many passes are over the rows of a span, which is not the last one."""

        def is_over(passes: int) -> bool:
            return self._pass_rows(population, span.position + passes * span.rows) > span.rows

        # By bisection of the rule itself, so that rounding moves no end.
        most = 1
        while not is_over(most):
            most *= 2
        return bisect_left(range(most), True, lo=most // 2, key=is_over)


def _order(population: Population, by_ease: Ints, rows: int, turn: int) -> Ints:
    """Return the order of the easiest rows in a pass. by_ease: positions of all rows, the easiest first."""
    return generator(population.seed, Purpose.GROUP_ORDER, population.worker, turn).permutation(by_ease[:rows])


def _select(
    population: Population, spans: list[CurriculumSpan], order: Callable[[int, int], Ints], clock: int
) -> Selection:
    """Return the mini-batch at a clock. spans: of the passes; order: from (rows, turn)."""
    position = clock * population.batch_size
    stop = position + population.batch_size
    parts = []
    # A mini-batch may cross ends of passes.
    while position < stop:
        span = spans[bisect_right(spans, position, key=lambda each: each.position) - 1]
        turns, inside = divmod(position - span.position, span.rows)
        parts.append(order(span.rows, span.number + turns)[inside : inside + stop - position])
        position += len(parts[-1])
    return Selection(np.concatenate(parts))
