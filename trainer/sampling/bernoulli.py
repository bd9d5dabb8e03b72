"""``bernoulli``: every row drawn independently, as in MLlib."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import Population, Sampler, Selection, SelectionStream


def bernoulli(rows: int, fraction: float, clock: int, seed: int, worker: int) -> Ints:
    """Return the rows of the mini-batch at a clock if each row is drawn independently with probability ``fraction``.

    The result is int64 [about rows * fraction], or all rows for a fraction of 1 or more. A binomial number of rows,
    drawn without replacement, has the same distribution as one coin per row, at a cost of O(drawn rows).

    Args:
        rows: number of rows in the shard.
        fraction: probability of a row.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
    """
    if fraction >= 1:
        return np.arange(rows)
    rng = generator(seed, Purpose.SAMPLING, worker, clock)
    return rng.choice(rows, rng.binomial(rows, fraction), replace=False, shuffle=False)


@dataclass(frozen=True)
class BernoulliSampler(Sampler):
    """Draws each row independently with the same probability."""

    name: ClassVar[str] = "bernoulli"
    summary: ClassVar[str] = "draw every row independently, and average each update over its examples, as MLlib does"
    fixed_size: ClassVar[bool] = False

    def stream(self, population: Population) -> SelectionStream:
        return partial(_select, population)


def _select(population: Population, clock: int) -> Selection:
    return Selection(bernoulli(len(population), population.share, clock, population.seed, population.worker))
