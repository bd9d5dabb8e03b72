"""Build samplers and rows in memory for tests, without a shard set, and read the rows that a run has drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from trainer.data.rows import Rows
from trainer.data.sampling import FixedSampler
from trainer.runlog.read import read_pushes
from trainer.sampling.base import Population
from trainer.sampling.shuffle import ShuffleSampler


def shuffled(rows: Rows, batch_size: int, *, seed: int, worker: int) -> FixedSampler:
    """The default sampler of some rows."""
    population = Population(rows.labels, None, None, batch_size, 0.0, 1, seed, worker)
    return FixedSampler(rows, ShuffleSampler().stream(population))


def ids_in_steps(output: Path) -> np.ndarray:
    """Return the ids of the rows of a run's accepted gradients by step, and in a step by worker: int64.

    They are those of the example ledger, whose rows are in the order of the gradients in the log."""
    files = sorted((output / "examples").glob("*.parquet"))
    ids = np.concatenate([pq.read_table(file, columns=["id"])["id"].to_numpy() for file in files])
    pushes = read_pushes(output / "pushes.csv")
    pushes = pushes[pushes["accepted"] == 1]
    gradients = np.split(ids, np.cumsum(pushes["examples"])[:-1])
    order = np.lexsort((pushes["worker"], pushes["clock"]))
    return np.concatenate([gradients[place] for place in order])
