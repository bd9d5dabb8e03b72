"""The stored rows as numpy arrays inside Spark tasks, and sums over all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pyspark import SparkContext

from pipeline.benchmark import arithmetic
from pipeline.benchmark.cells import Cell, Model
from pipeline.input.dataset import Dataset, discover, ranges, serial
from pipeline.spark.store import open_store

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
NEWTON_STEPS = 12


def stored(context: SparkContext, folder: str) -> Dataset:
    """The Parquet side of what problems.store wrote."""
    return discover(open_store(context), f"{folder}/parquet", run=serial)


def arrays(dataset: Dataset, start: int, stop: int, *, real: bool) -> tuple[Floats, Floats]:
    """(features [rows, d], classes or targets [rows]) of an id range, as float64."""
    blocks = list(dataset.read(start, stop))
    features = np.concatenate([block.numbers(dataset.layout)[:, :, 0] for block in blocks])
    answers = [block.columns.targets if real else block.labels for block in blocks]
    return features.astype(np.float64), np.concatenate([np.asarray(part, np.float64) for part in answers])


@lru_cache(maxsize=2)
def _kept(dataset: Dataset, start: int, stop: int, real: bool) -> tuple[Floats, Floats]:
    """A Python worker is used again by the next pass; what it has read stays with it."""
    return arrays(dataset, start, stop, real=real)


def total(context: SparkContext, dataset: Dataset, real: bool, fn: Callable[[Floats, Floats], T]) -> T:
    """The sum of fn(features, answers) over the parts of all rows, one part a core."""
    pieces = ranges(0, dataset.rows, context.defaultParallelism)
    found = context.parallelize(pieces, len(pieces)).map(lambda piece: fn(*_kept(dataset, *piece, real)))
    result: T = found.reduce(lambda a, b: a + b)  # type: ignore[operator]
    return result


def objective(context: SparkContext, dataset: Dataset, cell: Cell, real: bool, weights: Floats) -> float:
    """What training minimises: mean loss over all rows and the L2 term."""
    model = cell.model
    mean = total(context, dataset, real, lambda x, y: arithmetic.loss(model, weights, x, y)) / dataset.rows
    return mean + 0.5 * cell.settings.decay * float(weights @ weights)


def optimum(context: SparkContext, dataset: Dataset, model: Model, decay: float, real: bool) -> Floats:
    """The weights of a regression at which the objective is least: Newton's method, one pass over the rows a step."""
    weights = np.zeros(dataset.layout.shape[0])
    for _ in range(NEWTON_STEPS):
        now = weights

        def parts(x: Floats, y: Floats, at: Floats = now) -> Floats:
            slope = arithmetic.gradient(model, at, x, y)
            return np.column_stack([slope, arithmetic.curvature(model, at, x)])

        found = total(context, dataset, real, parts) / dataset.rows
        step = np.linalg.solve(found[:, 1:] + decay * np.eye(len(now)), found[:, 0] + decay * now)
        weights = now - step
        if np.linalg.norm(step) <= 1e-12 * max(1.0, float(np.linalg.norm(weights))):
            break
    return weights
