"""Arm 1: Spark MLlib, one job a mini-batch.

The learners are MLlib's own, run in the JVM on cached rows, so nothing of a mini-batch passes through Python. Rows of the
regressions come from text by MLlib's own loader, those of the perceptron from Parquet by a Python function, once. How many
mini-batches of a regression there were is how many jobs the scheduler was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext, StorageLevel
from pyspark.ml.classification import MultilayerPerceptronClassifier
from pyspark.sql import DataFrame, SparkSession

from pipeline.benchmark import arithmetic
from pipeline.benchmark.cells import Cell, Outcome
from pipeline.benchmark.timing import CpuMeter, timed
from pipeline.clustering.columns import matrix_to_vector
from pipeline.errors import JobError

WARM, WARM_UP_RUNS = 0.05, 6
TOLD_S = 5.0  # Spark's status of what is cached comes a little late
LOOKED_AT = 20  # of the last stages: their task metrics tell what a mini-batch is made of
BLOCK_ROWS = 128  # that the perceptron stacks into one matrix: MLlib's default


@dataclass(frozen=True)
class Points:
    """Rows in the JVM, cached. load_s: what it took to read, parse and keep them; read_s: to read and parse them, which is
    what every mini-batch would cost without a cache, since MLlib passes over all rows to sample some."""

    context: SparkContext
    features: int
    cached: Any
    load_s: float
    read_s: float


@contextmanager
def points(context: SparkContext, folder: str, features: int, tasks: int) -> Iterator[Points]:
    """What problems.store wrote as text, parsed and cached in as many parts as a job has tasks; dropped at the end."""
    assert context._jvm is not None
    utils = context._jvm.org.apache.spark.mllib.util.MLUtils

    def load() -> Any:
        """Text alone would be cut by its blocks."""
        return utils.loadLabeledPoints(context._jsc.sc(), f"{folder}/points", tasks).toJavaRDD().coalesce(tasks)

    read_s = _warm(load().count)
    cached = load().cache()
    try:
        load_s = timed(cached.count)
        _check_cached(context, cached.id())
        yield Points(context, features, cached.rdd(), load_s, read_s)
    finally:
        cached.unpersist(True)


def _warm(read: Callable[[], object]) -> float:
    """Seconds that reading takes once what compiles and caches has been through it."""
    read()
    return timed(read)


def _check_cached(context: SparkContext, rdd: int) -> None:
    """Raises JobError where a part did not fit: every mini-batch would read it again."""
    until = time.monotonic() + TOLD_S
    while True:
        infos = context._jsc.sc().getRDDStorageInfo()
        held, parts = next((i.numCachedPartitions(), i.numPartitions()) for i in infos if i.id() == rdd)
        if held == parts:
            return
        if time.monotonic() > until:
            raise JobError(
                f"{held} of {parts} parts of the rows fit into memory; give more with --driver-memory (or"
                " --executor-memory), or take fewer rows"
            )
        time.sleep(0.1)


def warm_up(run: Callable[[], Outcome]) -> None:
    """Short runs until two in a row take the same time, near enough."""
    before = run().compute_s
    for _ in range(WARM_UP_RUNS):
        now = run().compute_s
        if abs(now / before - 1) < WARM:
            return
        before = now


def regression(found: Points, cell: Cell, meter: CpuMeter) -> Outcome:
    """One run of a regression."""
    limit = cell.mini_batches or cell.settings.most
    done = _descend(found, cell, limit, 0.0 if cell.mini_batches else cell.tolerance)
    # Two jobs look at the first row and count all; one after the last mini-batch, which computes a gradient too, only takes
    # the loss, unless the stop rule came before the limit.
    passes = done.jobs - 2
    iterations = min(passes, limit)
    return Outcome(
        mini_batches=iterations,
        updates=iterations,
        examples=round(iterations * cell.rows * cell.fraction),
        converged=not cell.mini_batches and passes <= limit,
        seconds=done.seconds,
        compute_s=done.seconds / passes,
        read_s=found.read_s,
        cpu=meter.between(done.began, done.began + done.seconds),
        load_s=found.load_s,
        start_s=found.load_s,
        driver_s=done.driver_s / passes,
        weights=done.weights,
    )


@dataclass(frozen=True)
class _Descent:
    jobs: int
    began: float
    seconds: float
    driver_s: float
    weights: tuple[float, ...]


def _descend(found: Points, cell: Cell, limit: int, tolerance: float) -> _Descent:
    learner, start = _learner(found, cell, limit, tolerance)
    before, spent, began = jobs_so_far(found.context), driver_cpu_s(found.context), time.time()
    model = learner.run(found.cached, start)
    seconds = time.time() - began
    spent = driver_cpu_s(found.context) - spent
    return _Descent(jobs_so_far(found.context) - before, began, seconds, spent, tuple(model.weights().toArray()))


def _learner(found: Points, cell: Cell, limit: int, tolerance: float) -> tuple[Any, Any]:
    assert found.context._jvm is not None
    mllib, settings = found.context._jvm.org.apache.spark.mllib, cell.settings
    if cell.model == "logistic":
        learner = mllib.classification.LogisticRegressionWithSGD(settings.step, limit, settings.decay, cell.fraction)
        learner.optimizer().setUpdater(mllib.optimization.SquaredL2Updater())
    else:
        learner = mllib.regression.LinearRegressionWithSGD(settings.step, limit, settings.decay, cell.fraction)
        learner.optimizer().setUpdater(mllib.optimization.SimpleUpdater())
    learner.optimizer().setConvergenceTol(tolerance)
    learner.setValidateData(False)  # a pass over all labels that no other arm makes
    return learner.setIntercept(False), mllib.linalg.Vectors.zeros(found.features)


def jobs_so_far(context: SparkContext) -> int:
    """How many jobs the scheduler was ever given."""
    return int(context._jsc.sc().dagScheduler().numTotalJobs())


def driver_cpu_s(context: SparkContext) -> float:
    """CPU seconds of the driver's threads so far, without those that run tasks, which local mode has in the same JVM."""
    assert context._jvm is not None
    threads = context._jvm.java.lang.management.ManagementFactory.getThreadMXBean()
    known = (info for info in threads.getThreadInfo(threads.getAllThreadIds()) if info is not None)
    ids = [info.getThreadId() for info in known if not info.getThreadName().startswith("Executor task")]
    return float(sum(max(0, threads.getThreadCpuTime(number)) for number in ids)) / 1e9  # -1: it has ended


@dataclass(frozen=True)
class Table:
    """Rows for the perceptron, cached: ``label`` and ``features``, a vector. load_s, read_s: as of Points."""

    features: int
    cached: DataFrame
    load_s: float
    read_s: float


@contextmanager
def table(spark: SparkSession, folder: str, features: int) -> Iterator[Table]:
    """What problems.store wrote as Parquet; dropped at the end."""
    stored = spark.read.parquet(f"{folder}/parquet")
    vectors = matrix_to_vector(lambda images: np.ascontiguousarray(images).view(np.float32), stored["image"])
    rows = stored.select(stored["label"].cast("double").alias("label"), vectors.alias("features"))
    read_s = _warm(rows.write.format("noop").mode("overwrite").save)
    cached = rows.persist(StorageLevel.MEMORY_ONLY)
    try:
        yield Table(features, cached, timed(cached.count), read_s)
    finally:
        cached.unpersist(True)


def perceptron(found: Table, cell: Cell, weights: np.ndarray[Any, Any], meter: CpuMeter) -> Outcome:
    """One run of the perceptron from given weights."""
    limit = cell.mini_batches or cell.settings.most
    learner = MultilayerPerceptronClassifier(
        layers=list(arithmetic.widths(found.features)),
        solver="gd",
        stepSize=cell.settings.step,
        tol=0.0 if cell.mini_batches else cell.tolerance,
        maxIter=limit,
        blockSize=BLOCK_ROWS,
        initialWeights=weights.tolist(),
    )
    began = time.time()
    model = learner.fit(found.cached)
    ended = time.time()
    # totalIterations leaves out the last, which only took the loss or ended the run
    passes = int(model.summary().totalIterations) + 1
    iterations = min(passes, limit)
    return Outcome(
        mini_batches=iterations,
        updates=iterations,
        examples=iterations * cell.rows,
        converged=not cell.mini_batches and passes <= limit,
        seconds=ended - began,
        compute_s=(ended - began) / passes,
        read_s=found.read_s,
        cpu=meter.between(began, ended),
        load_s=found.load_s,
        start_s=found.load_s,
        weights=tuple(model.weights.toArray()),
    )


def parts_of_a_mini_batch(context: SparkContext) -> dict[str, float]:
    """Task metrics of the latest mini-batches, summed over the stages of each, medians: what one is made of. wall_ms: from
    the submission of a stage to its end; run_ms, deserialise_ms: of all its tasks. Empty where Spark's status store has
    none."""
    status, found = context._jsc.sc().statusStore(), []
    for job in range(max(0, jobs_so_far(context) - LOOKED_AT), jobs_so_far(context)):
        with suppress(Py4JJavaError):  # it was dropped from the store, or its end has not arrived there
            ids = status.job(job).stageIds()
            stages = [status.lastStageAttempt(ids.apply(at)) for at in range(ids.size())]
            if all("GradientDescent" in stage.name() and stage.completionTime().isDefined() for stage in stages):
                found.append(np.sum([_parts(stage) for stage in stages], axis=0))
    return dict(zip(PARTS, map(float, np.median(np.array(found), axis=0)), strict=True)) if found else {}


PARTS = ("stages", "wall_ms", "run_ms", "deserialise_ms", "result_bytes", "tasks")


def _parts(stage: Any) -> tuple[float, ...]:
    wall = stage.completionTime().get().getTime() - stage.submissionTime().get().getTime()
    times = (stage.executorRunTime(), stage.executorDeserializeTime())
    return 1, wall, *times, stage.resultSize(), stage.numTasks()
