"""Stored rows as numpy arrays inside Spark tasks, and sums over all of them: objectives and optima."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import numpy as np
from pyspark import SparkContext

from pipeline.core.arrays import Floats
from pipeline.input.dataset import Dataset, discover, ranges, serial
from pipeline.spark.store import open_store
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import Hyperparameters, Model

T = TypeVar("T")
NEWTON_STEPS = 12


def open_rows(context: SparkContext, folder: str) -> Dataset:
    """Open the Parquet files that problems.write_problem wrote."""
    store = open_store(context)
    return discover(store, store.resolve(f"{folder}/parquet"), run=serial)


def read_arrays(dataset: Dataset, start: int, stop: int, *, real: bool) -> tuple[Floats, Floats]:
    """Read rows as arrays: features [rows, d], and targets or classes [rows].

    Args:
        dataset: the rows.
        start: first id.
        stop: id after the last one.
        real: True to read targets, False to read classes.
    """
    blocks = list(dataset.read(start, stop))
    features = np.concatenate([block.numbers(dataset.layout)[:, :, 0] for block in blocks])
    answers = [block.columns.targets if real else block.labels for block in blocks]
    return features.astype(np.float64), np.concatenate([np.asarray(part, np.float64) for part in answers])


@lru_cache(maxsize=2)
def _read_once(dataset: Dataset, start: int, stop: int, real: bool) -> tuple[Floats, Floats]:
    """Read rows, and keep them for the next pass that reuses this Python worker."""
    return read_arrays(dataset, start, stop, real=real)


def sum_over_rows(context: SparkContext, dataset: Dataset, real: bool, fn: Callable[[Floats, Floats], T]) -> T:
    """Return the sum of fn(features, answers) over parts of all rows, one part per core.

    Args:
        context: Spark's context.
        dataset: the rows.
        real: True for real targets as answers, False for classes.
        fn: computed in the tasks; its results must support addition.
    """
    spans = ranges(0, dataset.rows, context.defaultParallelism)
    values = context.parallelize(spans, len(spans)).map(lambda span: fn(*_read_once(dataset, *span, real)))
    result: T = values.reduce(lambda a, b: a + b)  # type: ignore[operator]
    return result


def compute_objective(
    context: SparkContext, dataset: Dataset, model: Model, hyperparameters: Hyperparameters, real: bool, weights: Floats
) -> float:
    """Return the objective of training: the mean loss over all rows plus the L2 term.

    Args:
        context: Spark's context.
        dataset: the rows.
        model: decides the loss.
        hyperparameters: contains the L2 factor.
        real: True for real targets, False for classes.
        weights: flat.
    """
    total = sum_over_rows(context, dataset, real, lambda x, y: arithmetic.loss(model, weights, x, y))
    return total / dataset.rows + 0.5 * hyperparameters.decay * float(weights @ weights)


def find_optimum(context: SparkContext, dataset: Dataset, model: Model, decay: float, real: bool) -> Floats:
    """Return the weights [d] that minimise a regression's objective, by Newton's method.

    Each step is a pass over the rows.

    Args:
        context: Spark's context.
        dataset: the rows.
        model: a regression.
        decay: the L2 factor.
        real: True for real targets, False for classes.
    """
    weights = np.zeros(dataset.layout.shape[0])
    for _ in range(NEWTON_STEPS):
        now = weights

        def derivatives(x: Floats, y: Floats, at: Floats = now) -> Floats:
            return np.column_stack([arithmetic.gradient(model, at, x, y), arithmetic.hessian(model, at, x)])

        # One pass computes both: column 0 is the gradient, the others are the Hessian.
        mean = sum_over_rows(context, dataset, real, derivatives) / dataset.rows
        step = np.linalg.solve(mean[:, 1:] + decay * np.eye(len(now)), mean[:, 0] + decay * now)
        weights = now - step
        if np.linalg.norm(step) <= 1e-12 * max(1.0, float(np.linalg.norm(weights))):
            break
    return weights
