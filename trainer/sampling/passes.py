"""The base class of samplers that make passes: each row of a worker is drawn once per pass, in an order of the sampler's."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple

from pipeline.core.arrays import Ints
from trainer.sampling.base import Population, Sampler, SelectionStream
from trainer.sampling.orders import PassOrder, select_of_passes


class PassRows(NamedTuple):
    """The rows over which a worker makes passes.

    Attributes:
        num_rows: their number.
        groups: the group of each row, int [num_rows]; None if the sampler needs no groups.
        seed: of the run.
        worker: number of the worker.
    """

    num_rows: int
    groups: Ints | None
    seed: int
    worker: int


@dataclass(frozen=True)
class PassSampler(Sampler):
    """A sampler that makes passes."""

    makes_passes: ClassVar[bool] = True

    @abstractmethod
    def pass_order(self, rows: PassRows) -> PassOrder:
        """Return the order of some rows in each pass over them."""

    def stream(self, population: Population) -> SelectionStream:
        groups = population.groups(self.grouping) if self.grouping else None
        order = self.pass_order(PassRows(len(population), groups, population.seed, population.worker))
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        return partial(select_of_passes, population, lru_cache(maxsize=2)(order))
