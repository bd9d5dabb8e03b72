"""Build samplers and rows in memory for tests, without a shard set."""

from __future__ import annotations

from trainer.data.rows import Rows
from trainer.data.sampling import FixedSampler
from trainer.sampling.base import Population
from trainer.sampling.shuffle import ShuffleSampler


def shuffled(rows: Rows, batch_size: int, *, seed: int, worker: int) -> FixedSampler:
    """The default sampler of some rows."""
    population = Population(rows.labels, None, None, batch_size, 0.0, 1, seed, worker)
    return FixedSampler(rows, ShuffleSampler().stream(population))
