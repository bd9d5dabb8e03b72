"""Arms 3 and 4: Spark without a job a mini-batch. One barrier job holds all tasks for the whole run; each computes on the
rows of its own part, and they meet over connections of their own.

averaging: MLlib* (Zhang et al. 2019): every task takes LOCAL_STEPS steps on a model of its own, then the models are
averaged. all-reduce: they meet after every step, so the result is that of MLlib's own gradient descent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark import SparkContext

from pipeline.benchmark import arithmetic
from pipeline.benchmark.cells import Cell, Outcome
from pipeline.benchmark.meeting import hub
from pipeline.benchmark.rows import arrays
from pipeline.benchmark.timing import CpuMeter
from pipeline.input.dataset import Dataset, ranges

LOCAL_STEPS = 10
Floats = npt.NDArray[np.float64]
Gather = Callable[[Floats], Floats]


def descend(
    cell: Cell, x: Floats, y: Floats, start: Floats, rng: np.random.Generator, gather: Gather, local_steps: int
) -> tuple[Floats, int, int, bool]:
    """One task's run: (weights, mini-batches, examples drawn here, converged). Pure but for ``gather``, which takes every
    task's row [k] and returns all of them [tasks, k].

    The stop rule is MLlib's, on the common model after each meeting; a meeting after K steps is held to K tolerances,
    since the sum of K mini-batches' moves is what it sees."""
    settings, weights = cell.settings, start.copy()
    before: Floats | None = None
    limit = cell.mini_batches or settings.most
    done = examples = drawn = 0
    for done in range(1, limit + 1):
        xs, ys = _drawn(cell, x, y, rng)
        examples += len(ys)
        rate = settings.step if settings.constant else settings.step / np.sqrt(done)
        slope = arithmetic.gradient(cell.model, weights, xs, ys)
        if local_steps == 1:
            everybody = gather(np.append(slope, len(ys)))
            total = everybody.sum(axis=0)
            weights = weights - rate * (total[:-1] / max(1.0, total[-1]) + settings.decay * weights)
        else:
            drawn += len(ys)
            weights = weights - rate * (slope / max(1, len(ys)) + settings.decay * weights)
            if done % local_steps and done < limit:
                continue
            everybody = gather(np.append(weights * drawn, drawn))
            total = everybody.sum(axis=0)
            weights, drawn = total[:-1] / max(1.0, total[-1]), 0
        if before is not None and not cell.mini_batches:
            moved = float(np.linalg.norm(weights - before))
            if moved < local_steps * cell.tolerance * max(float(np.linalg.norm(weights)), 1.0):
                return weights, done, examples, True
        before = weights
    return weights, done, examples, False


def _drawn(cell: Cell, x: Floats, y: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    if not cell.is_stochastic:
        return x, y
    chosen = rng.choice(len(y), rng.binomial(len(y), cell.fraction), replace=False, shuffle=False)
    return x[chosen], y[chosen]


def run(
    context: SparkContext,
    dataset: Dataset,
    cell: Cell,
    real: bool,
    start: Floats,
    seed: int,
    local_steps: int,
    meter: CpuMeter,
) -> Outcome:
    """One run of one barrier job, a task a core."""
    pieces = ranges(0, dataset.rows, context.defaultParallelism)
    place = hub(str(context.getConf().get("spark.driver.host")), len(pieces))

    def task(index: int, spans: Iterable[tuple[int, int]]) -> Iterable[Any]:
        began = time.perf_counter()
        [span] = spans  # to the end, or Spark replaces the Python worker, which takes a second
        x, y = arrays(dataset, *span, real=real)
        read_s = time.perf_counter() - began
        with place.join(index) as seat:
            seat.gather(np.zeros(1))  # all are here
            begun = time.time()
            result = descend(cell, x, y, start, np.random.default_rng([seed, index]), seat.gather, local_steps)
        yield (*result, begun, time.time(), read_s)

    parts = context.parallelize(pieces, len(pieces)).barrier().mapPartitionsWithIndex(task).collect()
    weights, mini_batches, _, converged, began, ended, _ = parts[0]
    read_s = max(part[6] for part in parts)
    return Outcome(
        mini_batches=mini_batches,
        updates=mini_batches if local_steps == 1 else -(-mini_batches // local_steps),
        examples=sum(part[2] for part in parts),
        converged=converged,
        seconds=ended - began,
        compute_s=(ended - began) / mini_batches,
        read_s=None,
        cpu=meter.between(began, ended),
        load_s=read_s,
        start_s=read_s,
        weights=tuple(weights),
    )
