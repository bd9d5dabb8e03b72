"""Stored rows as numpy arrays inside Spark tasks, and sums over all of them: objectives and optima."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pyspark import SparkContext

from pipeline.input.dataset import Dataset, discover, ranges, serial
from pipeline.spark.store import open_store
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import Hyperparameters, Model

Floats = npt.NDArray[np.float64]
T = TypeVar("T")
NEWTON_STEPS = 12


def open_rows(context: SparkContext, folder: str) -> Dataset:
    """The Parquet side of what problems.write_problem wrote."""
    return discover(open_store(context), f"{folder}/parquet", run=serial)


def read_arrays(dataset: Dataset, start: int, stop: int, *, real: bool) -> tuple[Floats, Floats]:
    """Features [rows, d] and, as ``real`` says, targets or classes [rows] of the ids in [start, stop)."""
    blocks = list(dataset.read(start, stop))
    features = np.concatenate([block.numbers(dataset.layout)[:, :, 0] for block in blocks])
    answers = [block.columns.targets if real else block.labels for block in blocks]
    return features.astype(np.float64), np.concatenate([np.asarray(part, np.float64) for part in answers])


@lru_cache(maxsize=2)
def _read_once(dataset: Dataset, start: int, stop: int, real: bool) -> tuple[Floats, Floats]:
    """The next pass reuses a Python worker and the rows that it holds."""
    return read_arrays(dataset, start, stop, real=real)


def sum_over_rows(context: SparkContext, dataset: Dataset, real: bool, fn: Callable[[Floats, Floats], T]) -> T:
    """The sum of fn(features, answers) over the parts of all rows, one part for each core."""
    spans = ranges(0, dataset.rows, context.defaultParallelism)
    values = context.parallelize(spans, len(spans)).map(lambda span: fn(*_read_once(dataset, *span, real)))
    result: T = values.reduce(lambda a, b: a + b)  # type: ignore[operator]
    return result


def compute_objective(
    context: SparkContext, dataset: Dataset, model: Model, given: Hyperparameters, real: bool, weights: Floats
) -> float:
    """What training minimises: the mean loss over all rows and the L2 term."""
    total = sum_over_rows(context, dataset, real, lambda x, y: arithmetic.loss(model, weights, x, y))
    return total / dataset.rows + 0.5 * given.decay * float(weights @ weights)


def find_optimum(context: SparkContext, dataset: Dataset, model: Model, decay: float, real: bool) -> Floats:
    """The weights of a regression at which the objective is least, by Newton's method: a pass over the rows a step."""
    weights = np.zeros(dataset.layout.shape[0])
    for _ in range(NEWTON_STEPS):
        now = weights

        def derivatives(x: Floats, y: Floats, at: Floats = now) -> Floats:
            return np.column_stack([arithmetic.gradient(model, at, x, y), arithmetic.hessian(model, at, x)])

        mean = sum_over_rows(context, dataset, real, derivatives) / dataset.rows
        step = np.linalg.solve(mean[:, 1:] + decay * np.eye(len(now)), mean[:, 0] + decay * now)
        weights = now - step
        if np.linalg.norm(step) <= 1e-12 * max(1.0, float(np.linalg.norm(weights))):
            break
    return weights
