"""Spark MLlib: one job per mini-batch.

The learners are MLlib's own and run in the JVM on cached rows, so no part of a mini-batch passes through Python. Rows
of the regressions are read from text by MLlib's own loader, rows of the perceptron from Parquet by a Python function,
once. The number of a regression's mini-batches is derived from the number of jobs of the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark import SparkContext, StorageLevel
from pyspark.ml.classification import MultilayerPerceptronClassifier
from pyspark.sql import DataFrame, SparkSession

from pipeline.clustering.columns import matrix_to_vector
from pipeline.core.errors import JobError
from pipeline.core.storage.uri import spark_path
from pipeline.spark.jvm import jvm_of, scala_context
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import BLOCK_ROWS, Configuration
from trainer.benchmark.records import RunTimings
from trainer.benchmark.systems.spark_metrics import count_jobs, driver_cpu_s
from trainer.benchmark.systems.timing import CpuMeter, time_call

# relative difference of two successive runs that ends warming up, and most repeats
WARM = 0.05
WARM_UP_RUNS = 6
CACHE_REPORT_S = 5.0  # time for Spark's delayed report of cached parts


@dataclass(frozen=True)
class CachedPoints:
    """The rows of a regression, cached in the JVM."""

    context: SparkContext
    features: int  # d
    rdd: Any  # RDD of LabeledPoint in the JVM
    load_s: float  # to read, parse and cache them
    read_s: float  # to read and parse: cost per mini-batch without a cache, since MLlib samples from all rows


@contextmanager
def cache_points(context: SparkContext, folder: str, features: int, tasks: int) -> Iterator[CachedPoints]:
    """Cache the text that problems.write_problem wrote. Dropped at the end.

    Raises JobError if the rows do not fit into memory.

    Args:
        context: Spark's context.
        folder: of the problem.
        features: d.
        tasks: number of parts, and so the number of tasks of a job.
    """
    utils = jvm_of(context).org.apache.spark.mllib.util.MLUtils

    def load() -> Any:
        """Load the text as ``tasks`` parts. Without coalesce, the parts would follow the blocks of the file."""
        return (
            utils.loadLabeledPoints(scala_context(context), spark_path(f"{folder}/points"), tasks)
            .toJavaRDD()
            .coalesce(tasks)
        )

    # Timed before the rows are cached, as MLlib would read them without a cache.
    read_s = _time_warm(load().count)
    points = load().cache()
    try:
        load_s = time_call(points.count)
        _check_cached(context, points.id(), points.getNumPartitions())
        yield CachedPoints(context, features, points.rdd(), load_s, read_s)
    finally:
        points.unpersist(True)


def _time_warm(read: Callable[[], object]) -> float:
    """Return the seconds of a second read, after warm-up of compilers and the file system's cache."""
    read()
    return time_call(read)


def _check_cached(context: SparkContext, rdd: int, rdd_parts: int) -> None:
    """Raise JobError if a part does not fit into memory, since every mini-batch would read it again.

    rdd, rdd_parts: id and number of parts of the cached RDD."""
    until = time.monotonic() + CACHE_REPORT_S
    while True:
        infos = scala_context(context).getRDDStorageInfo()
        # Spark lists an RDD some time after its first part is cached.
        counts = [(info.numCachedPartitions(), info.numPartitions()) for info in infos if info.id() == rdd]
        cached_parts, parts = counts[0] if counts else (0, rdd_parts)
        if cached_parts == parts:
            return
        if time.monotonic() > until:
            raise JobError(
                f"{cached_parts} of {parts} parts of the rows fit into memory; give more (spark.driver.memory, on a cluster"
                " spark.executor.memory), or take fewer rows"
            )
        time.sleep(0.1)


def warm_up(run: Callable[[], RunTimings]) -> None:
    """Repeat a short run until two successive ones take nearly the same time, at most WARM_UP_RUNS times."""
    before = run().compute_s
    for _ in range(WARM_UP_RUNS):
        now = run().compute_s
        if abs(now / before - 1) < WARM:
            return
        before = now


def run_regression(points: CachedPoints, configuration: Configuration, meter: CpuMeter) -> RunTimings:
    """Run a regression from zero weights, to its length or convergence, and return its measurements.

    Args:
        points: cached rows.
        configuration: of the run.
        meter: measures the CPU use.
    """
    limit = configuration.max_mini_batches
    learner, start = _build_learner(points, configuration)
    jobs = count_jobs(points.context)
    driver_s = driver_cpu_s(points.context)
    start_time = time.time()
    model = learner.run(points.rdd, start)
    seconds = time.time() - start_time
    driver_s = driver_cpu_s(points.context) - driver_s
    # Two jobs read the first row and count all rows. One more pass after the last mini-batch computes a gradient only
    # for the loss, unless the stop rule ended the run before the limit.
    passes = count_jobs(points.context) - jobs - 2
    mini_batches = min(passes, limit)
    return RunTimings(
        mini_batches=mini_batches,
        updates=mini_batches,
        examples=round(mini_batches * configuration.rows * configuration.fraction),
        converged=configuration.length is None and passes <= limit,
        seconds=seconds,
        compute_s=seconds / passes,
        read_s=points.read_s,
        cpu=meter.share_between(start_time, start_time + seconds),
        load_s=points.load_s,
        start_s=points.load_s,
        driver_s=driver_s / passes,
        weights=tuple(model.weights().toArray()),
    )


def _build_learner(points: CachedPoints, configuration: Configuration) -> tuple[Any, Any]:
    """Return MLlib's learner, without an intercept, and its initial weights."""
    mllib = jvm_of(points.context).org.apache.spark.mllib
    hyperparameters = configuration.hyperparameters
    parameters = (
        hyperparameters.step_size,
        configuration.max_mini_batches,
        hyperparameters.decay,
        configuration.fraction,
    )
    if configuration.model == "logistic":
        learner = mllib.classification.LogisticRegressionWithSGD(*parameters)
        learner.optimizer().setUpdater(mllib.optimization.SquaredL2Updater())
    else:
        learner = mllib.regression.LinearRegressionWithSGD(*parameters)
        learner.optimizer().setUpdater(mllib.optimization.SimpleUpdater())
    learner.optimizer().setConvergenceTol(configuration.tolerance if configuration.length is None else 0.0)
    learner.setValidateData(False)  # saves a pass over all labels that no other system makes
    return learner.setIntercept(False), mllib.linalg.Vectors.zeros(points.features)


@dataclass(frozen=True)
class CachedTable:
    """The rows of the perceptron, cached as ``label`` and the vector ``features``.

    load_s, read_s: as in CachedPoints."""

    features: int
    table: DataFrame
    load_s: float
    read_s: float


@contextmanager
def cache_table(spark: SparkSession, folder: str, features: int) -> Iterator[CachedTable]:
    """Cache the Parquet rows that problems.write_problem wrote. Dropped at the end."""
    table = spark.read.parquet(spark_path(f"{folder}/parquet"))
    vectors = matrix_to_vector(lambda images: np.ascontiguousarray(images).view(np.float32), table["image"])
    rows = table.select(table["label"].cast("double").alias("label"), vectors.alias("features"))
    read_s = _time_warm(rows.write.format("noop").mode("overwrite").save)
    persisted = rows.persist(StorageLevel.MEMORY_ONLY)
    try:
        yield CachedTable(features, persisted, time_call(persisted.count), read_s)
    finally:
        persisted.unpersist(True)


def run_perceptron(
    rows: CachedTable, configuration: Configuration, start: np.ndarray[Any, Any], meter: CpuMeter
) -> RunTimings:
    """Run the perceptron, to its length or convergence, and return its measurements.

    Args:
        rows: cached rows.
        configuration: of the run.
        start: initial weights, flat.
        meter: measures the CPU use.
    """
    limit = configuration.max_mini_batches
    learner = MultilayerPerceptronClassifier(
        layers=list(arithmetic.layer_widths(rows.features)),
        solver="gd",
        stepSize=configuration.hyperparameters.step_size,
        tol=configuration.tolerance if configuration.length is None else 0.0,
        maxIter=limit,
        blockSize=BLOCK_ROWS,
        initialWeights=start.tolist(),
    )
    start_time = time.time()
    model = learner.fit(rows.table)
    end_time = time.time()
    # totalIterations excludes the last pass, which only computes the loss or ends the run.
    passes = int(model.summary().totalIterations) + 1
    mini_batches = min(passes, limit)
    return RunTimings(
        mini_batches=mini_batches,
        updates=mini_batches,
        examples=mini_batches * configuration.rows,
        converged=configuration.length is None and passes <= limit,
        seconds=end_time - start_time,
        compute_s=(end_time - start_time) / passes,
        read_s=rows.read_s,
        cpu=meter.share_between(start_time, end_time),
        load_s=rows.load_s,
        start_s=rows.load_s,
        weights=tuple(model.weights.toArray()),
    )
