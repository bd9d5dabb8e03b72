"""``shuffle``: passes over all rows, each in a new order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

from trainer.sampling.base import Population, Sampler, SelectionStream
from trainer.sampling.orders import permutation, select_of_passes


@dataclass(frozen=True)
class ShuffleSampler(Sampler):
    """Draws passes over all rows, each pass in a new order."""

    name: ClassVar[str] = "shuffle"
    summary: ClassVar[str] = "pass over a worker's rows, in a new order each time"
    makes_passes: ClassVar[bool] = True

    def stream(self, population: Population) -> SelectionStream:
        order = partial(permutation, len(population), population.seed, population.worker)
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        return partial(select_of_passes, population, lru_cache(maxsize=2)(order))
