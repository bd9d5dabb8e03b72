"""Build the population that tests of samplers draw from.

It imports only what samplers import, so that another process can build the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.sampling import SAMPLERS, Sampler
from trainer.sampling.base import Population, Selection, TableSampler

BATCH = 7


def make_sampler(name: str, table: str = "unused", **values: Any) -> Sampler:
    kind = SAMPLERS[name]
    return kind(**({"example_table": table} if kind.column else {}) | values)


def population_of(
    sizes: list[int], batch: int = BATCH, *, seed: int = 3, worker: int = 1, epoch_steps: int = 5
) -> Population:
    """Rows of classes of some sizes, in random order; their values are random, and their neighbourhoods halve classes."""
    rng = np.random.default_rng(sum(sizes))
    labels = rng.permutation(np.repeat(np.arange(len(sizes)) * 2, sizes))
    values = rng.uniform(0, 2, len(labels))
    halves = labels + rng.integers(0, 2, len(labels))
    numbers = np.arange(len(labels)) + 2
    return Population(labels, halves.astype(np.int32), values, batch, 0.2, epoch_steps, seed, worker, numbers)


TABLE = np.random.default_rng(9).uniform(0, 3, 100).astype(np.float32)


def stream_of(sampler: Sampler, population: Population) -> Callable[[int], Selection]:
    """The selections of a worker; always by the same loss table, if the sampler reads one."""
    if isinstance(sampler, TableSampler):
        by_table = sampler.table_stream(population)
        return lambda clock: by_table(clock, TABLE)
    return sampler.stream(population)


def places(sampler: Sampler, population: Population, clocks: range) -> list[list[int]]:
    stream = stream_of(sampler, population)
    every = np.arange(len(population))
    return [every[stream(clock).places].tolist() for clock in clocks]
