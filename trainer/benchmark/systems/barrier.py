"""Averaging and all-reduce: Spark without one job per mini-batch.

A single barrier job holds all tasks for the whole run. Each task computes on its own part of the rows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pyspark import SparkContext

from pipeline.core.arrays import Floats
from pipeline.input.dataset import Dataset, ranges
from trainer.benchmark.configurations import Configuration, System
from trainer.benchmark.records import RunTimings
from trainer.benchmark.rows import read_arrays
from trainer.benchmark.systems.all_gather import start_all_gather
from trainer.benchmark.systems.descent import Descent, TaskRows, descend
from trainer.benchmark.systems.timing import CpuMeter


@dataclass(frozen=True)
class TaskResult:
    """The result of one task.

    start_time, end_time: of its descent, in seconds since 1970. read_s: reading its rows."""

    descent: Descent
    start_time: float
    end_time: float
    read_s: float


def run_barrier_job(
    context: SparkContext,
    system: System,
    dataset: Dataset,
    configuration: Configuration,
    real: bool,
    start: Floats,
    seed: int,
    meter: CpuMeter,
) -> RunTimings:
    """Run one configuration with one task per core.

    Args:
        context: Spark's context.
        system: "averaging" or "all-reduce".
        dataset: the rows.
        configuration: of the run.
        real: True for real targets, False for classes.
        start: initial weights.
        seed: of the sampling.
        meter: measures the CPU use.
    """
    spans = ranges(0, dataset.rows, context.defaultParallelism)
    exchange = start_all_gather(str(context.getConf().get("spark.driver.host")), len(spans))

    def run_task(index: int, own: Iterable[tuple[int, int]]) -> Iterable[TaskResult]:
        """Read the rows of one task, wait until all tasks have read theirs, and run the descent."""
        read_start = time.perf_counter()
        [span] = own  # read to the end, otherwise Spark replaces the Python worker, which takes a second
        x, y = read_arrays(dataset, *span, real=real)
        read_s = time.perf_counter() - read_start
        part = TaskRows(configuration, x, y, np.random.default_rng([seed, index]))
        with exchange.connect(index) as rank:
            rank.all_gather(np.zeros(1))  # wait until all tasks have read their rows
            start_time = time.time()
            descent = descend(system, part, start, rank.all_gather)
        yield TaskResult(descent, start_time, time.time(), read_s)

    results = context.parallelize(spans, len(spans)).barrier().mapPartitionsWithIndex(run_task).collect()
    first = results[0]
    descent = first.descent
    seconds = first.end_time - first.start_time
    read_s = max(result.read_s for result in results)
    return RunTimings(
        mini_batches=descent.mini_batches,
        updates=descent.updates,
        examples=sum(result.descent.examples for result in results),
        converged=descent.converged,
        seconds=seconds,
        compute_s=seconds / descent.mini_batches,
        read_s=None,
        cpu=meter.share_between(first.start_time, first.end_time),
        load_s=read_s,
        start_s=read_s,
        weights=tuple(descent.weights),
    )
