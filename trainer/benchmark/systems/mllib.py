"""Spark MLlib: one job for each mini-batch.

The learners are MLlib's own and run in the JVM on cached rows, so nothing of a mini-batch passes through Python. Rows of
the regressions are read from text by MLlib's own loader, those of the perceptron from Parquet by a Python function, once.
The number of a regression's mini-batches is the number of jobs that the scheduler was given."""

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
from pipeline.spark.jvm import jvm_of, scala_context
from trainer.benchmark import arithmetic
from trainer.benchmark.configurations import BLOCK_ROWS, Configuration
from trainer.benchmark.records import Measurement
from trainer.benchmark.systems.spark_metrics import count_jobs, driver_cpu_s
from trainer.benchmark.systems.timing import CpuMeter, time_call

WARM, WARM_UP_RUNS = 0.05, 6  # relative difference of two runs in a row, and how many there are at most
CACHE_REPORT_S = 5.0  # Spark's status of what is cached comes a little late


@dataclass(frozen=True)
class CachedPoints:
    """A regression's rows, cached in the JVM."""

    context: SparkContext
    features: int
    rdd: Any
    load_s: float  # to read, parse and cache them
    read_s: float  # to read and parse: what each mini-batch would cost uncached, since MLlib samples from all rows


@contextmanager
def cache_points(context: SparkContext, folder: str, features: int, tasks: int) -> Iterator[CachedPoints]:
    """What problems.write_problem wrote as text, in as many parts as a job has tasks; dropped at the end.

    Raises JobError where memory does not hold them."""
    utils = jvm_of(context).org.apache.spark.mllib.util.MLUtils

    def load() -> Any:
        """coalesce, since text alone would be cut by its blocks."""
        return utils.loadLabeledPoints(scala_context(context), f"{folder}/points", tasks).toJavaRDD().coalesce(tasks)

    read_s = _time_warm(load().count)
    cached = load().cache()
    try:
        load_s = time_call(cached.count)
        _check_cached(context, cached.id())
        yield CachedPoints(context, features, cached.rdd(), load_s, read_s)
    finally:
        cached.unpersist(True)


def _time_warm(read: Callable[[], object]) -> float:
    """Seconds that reading takes once compilers and the file system's cache have seen it."""
    read()
    return time_call(read)


def _check_cached(context: SparkContext, rdd: int) -> None:
    """Raise JobError where a part does not fit: every mini-batch would read it again."""
    until = time.monotonic() + CACHE_REPORT_S
    while True:
        infos = scala_context(context).getRDDStorageInfo()
        held, parts = next((i.numCachedPartitions(), i.numPartitions()) for i in infos if i.id() == rdd)
        if held == parts:
            return
        if time.monotonic() > until:
            raise JobError(
                f"{held} of {parts} parts of the rows fit into memory; give more with --driver-memory (or"
                " --executor-memory), or take fewer rows"
            )
        time.sleep(0.1)


def warm_up(run: Callable[[], Measurement]) -> None:
    """Repeat a short run until two in a row take nearly the same time."""
    before = run().compute_s
    for _ in range(WARM_UP_RUNS):
        now = run().compute_s
        if abs(now / before - 1) < WARM:
            return
        before = now


def run_regression(points: CachedPoints, configuration: Configuration, meter: CpuMeter) -> Measurement:
    """One run of a regression, from weights of zero."""
    limit = configuration.max_mini_batches
    learner, start = _build_learner(points, configuration)
    jobs, driver_s, began = count_jobs(points.context), driver_cpu_s(points.context), time.time()
    model = learner.run(points.rdd, start)
    seconds = time.time() - began
    driver_s = driver_cpu_s(points.context) - driver_s
    # Two jobs read the first row and count all. One after the last mini-batch computes a gradient too, for the loss
    # alone, unless the stop rule came before the limit.
    passes = count_jobs(points.context) - jobs - 2
    mini_batches = min(passes, limit)
    return Measurement(
        mini_batches=mini_batches,
        updates=mini_batches,
        examples=round(mini_batches * configuration.rows * configuration.fraction),
        converged=configuration.length is None and passes <= limit,
        seconds=seconds,
        compute_s=seconds / passes,
        read_s=points.read_s,
        cpu=meter.share_between(began, began + seconds),
        load_s=points.load_s,
        start_s=points.load_s,
        driver_s=driver_s / passes,
        weights=tuple(model.weights().toArray()),
    )


def _build_learner(points: CachedPoints, configuration: Configuration) -> tuple[Any, Any]:
    """MLlib's learner, without an intercept, and the weights that it starts from."""
    mllib, given = jvm_of(points.context).org.apache.spark.mllib, configuration.hyperparameters
    parameters = (given.step_size, configuration.max_mini_batches, given.decay, configuration.fraction)
    if configuration.model == "logistic":
        learner = mllib.classification.LogisticRegressionWithSGD(*parameters)
        learner.optimizer().setUpdater(mllib.optimization.SquaredL2Updater())
    else:
        learner = mllib.regression.LinearRegressionWithSGD(*parameters)
        learner.optimizer().setUpdater(mllib.optimization.SimpleUpdater())
    learner.optimizer().setConvergenceTol(configuration.tolerance if configuration.length is None else 0.0)
    learner.setValidateData(False)  # a pass over all labels that no other system makes
    return learner.setIntercept(False), mllib.linalg.Vectors.zeros(points.features)


@dataclass(frozen=True)
class CachedTable:
    """The perceptron's rows, cached: ``label`` and ``features``, a vector. load_s, read_s: as of CachedPoints."""

    features: int
    table: DataFrame
    load_s: float
    read_s: float


@contextmanager
def cache_table(spark: SparkSession, folder: str, features: int) -> Iterator[CachedTable]:
    """What problems.write_problem wrote as Parquet; dropped at the end."""
    stored = spark.read.parquet(f"{folder}/parquet")
    vectors = matrix_to_vector(lambda images: np.ascontiguousarray(images).view(np.float32), stored["image"])
    rows = stored.select(stored["label"].cast("double").alias("label"), vectors.alias("features"))
    read_s = _time_warm(rows.write.format("noop").mode("overwrite").save)
    cached = rows.persist(StorageLevel.MEMORY_ONLY)
    try:
        yield CachedTable(features, cached, time_call(cached.count), read_s)
    finally:
        cached.unpersist(True)


def run_perceptron(
    rows: CachedTable, configuration: Configuration, start: np.ndarray[Any, Any], meter: CpuMeter
) -> Measurement:
    """One run of the perceptron from given weights."""
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
    began = time.time()
    model = learner.fit(rows.table)
    ended = time.time()
    # totalIterations leaves out the last pass, which only takes the loss or ends the run.
    passes = int(model.summary().totalIterations) + 1
    mini_batches = min(passes, limit)
    return Measurement(
        mini_batches=mini_batches,
        updates=mini_batches,
        examples=mini_batches * configuration.rows,
        converged=configuration.length is None and passes <= limit,
        seconds=ended - began,
        compute_s=(ended - began) / passes,
        read_s=rows.read_s,
        cpu=meter.share_between(began, ended),
        load_s=rows.load_s,
        start_s=rows.load_s,
        weights=tuple(model.weights.toArray()),
    )
