"""Arm 1: Spark MLlib, one job a mini-batch.

The learners are MLlib's own, run in the JVM on rows that the JVM read from text with MLlib's own loader, so nothing of a
mini-batch passes through Python. How many there were is how many jobs the scheduler was given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.ml.classification import MultilayerPerceptronClassifier
from pyspark.sql import DataFrame, SparkSession

from pipeline.benchmark import arithmetic
from pipeline.benchmark.cells import Cell, Model, Outcome
from pipeline.benchmark.timing import CpuMeter
from pipeline.columns import matrix_to_vector

UNCACHED = (1, 4)  # of two runs, whose difference is what a mini-batch costs
SHARES, TIMED = (1 / 64, 1 / 8), 20  # samples of the rows, and mini-batches on each
LOOKED_AT = 20  # of the last stages: their task metrics tell what a mini-batch is made of
BLOCK_ROWS = 128  # that the perceptron stacks into one matrix: MLlib's default


@dataclass(frozen=True)
class Points:
    """Rows in the JVM: ``cached`` for training; load_s: what it took to read and parse them all once."""

    context: SparkContext
    features: int
    rows: int
    uncached: Any
    cached: Any
    load_s: float


@contextmanager
def points(context: SparkContext, folder: str, features: int) -> Iterator[Points]:
    """What problems.store wrote as text, parsed and cached; dropped at the end."""
    assert context._jvm is not None
    utils = context._jvm.org.apache.spark.mllib.util.MLUtils
    began = time.perf_counter()
    cached = utils.loadLabeledPoints(context._jsc.sc(), f"{folder}/points", context.defaultParallelism).cache()
    rows = int(cached.count())
    load_s = time.perf_counter() - began
    uncached = utils.loadLabeledPoints(context._jsc.sc(), f"{folder}/points", context.defaultParallelism)
    try:
        yield Points(context, features, rows, uncached, cached, load_s)
    finally:
        cached.unpersist(True)


def reading_s(found: Points, model: Model) -> float:
    """What a mini-batch costs more where rows are not cached. MLlib passes over all of them to sample some, so that is the
    same for every size: measured on mini-batches of a hundredth."""
    cell = Cell(model, found.rows, max(1, found.rows // 100), UNCACHED[1])
    each = []
    for data in (found.uncached, found.cached):
        few, more = (_descend(found, cell, data, limit, 0.0).seconds for limit in UNCACHED)
        each.append((more - few) / (UNCACHED[1] - UNCACHED[0]))
    return max(0.0, each[0] - each[1])


def regression(found: Points, cell: Cell, read_s: float, meter: CpuMeter) -> Outcome:
    """One run of a regression; read_s: see above."""
    limit = cell.mini_batches or cell.settings.most
    done = _descend(found, cell, found.cached, limit, 0.0 if cell.mini_batches else cell.tolerance)
    # Two jobs look at the first row and count all; one after the last mini-batch only takes the loss, unless the stop
    # rule came before the limit.
    passes = done.jobs - 2
    iterations = min(passes, limit)
    compute_s = done.seconds / iterations
    return Outcome(
        mini_batches=iterations,
        updates=iterations,
        examples=round(iterations * cell.rows * cell.fraction),
        converged=not cell.mini_batches and passes <= limit,
        seconds=done.seconds,
        compute_s=compute_s,
        read_s=read_s,
        cpu=meter.between(done.began, done.began + done.seconds),
        start_s=found.load_s,
        weights=done.weights,
    )


def over_sizes(found: Points, model: Model) -> list[tuple[int, int, float]]:
    """(rows, mini-batch, seconds a mini-batch) on samples of the rows, by gradient descent and by mini-batches of a
    hundredth: what scanning, computing and a job by itself cost cannot be told apart on one size."""
    measured = []
    for share in SHARES:
        sample = found.cached.sample(False, share, 1).cache()
        rows = int(sample.count())
        for batch in (rows, max(1, rows // 100)):
            run = _descend(found, Cell(model, rows, batch, TIMED), sample, TIMED, 0.0)
            measured.append((rows, batch, run.seconds / run.jobs))
        sample.unpersist(True)
    return measured


@dataclass(frozen=True)
class _Descent:
    jobs: int
    began: float
    seconds: float
    weights: tuple[float, ...]


def _descend(found: Points, cell: Cell, rows: Any, limit: int, tolerance: float) -> _Descent:
    learner, start = _learner(found, cell, limit, tolerance)
    before, began = jobs_so_far(found.context), time.time()
    model = learner.run(rows, start)
    seconds = time.time() - began
    return _Descent(jobs_so_far(found.context) - before, began, seconds, tuple(model.weights().toArray()))


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


def table_of(spark: SparkSession, folder: str) -> DataFrame:
    """Rows for the perceptron: ``label`` and ``features``, a vector."""
    stored = spark.read.parquet(f"{folder}/parquet")
    features = matrix_to_vector(lambda images: np.ascontiguousarray(images).view(np.float32), stored["image"])
    return stored.select(stored["label"].cast("double").alias("label"), features.alias("features"))


def perceptron(
    table: DataFrame, cell: Cell, weights: np.ndarray[Any, Any], features: int, read_s: float, meter: CpuMeter
) -> Outcome:
    """One run of the perceptron from given weights; ``table`` is cached."""
    limit = cell.mini_batches or cell.settings.most
    learner = MultilayerPerceptronClassifier(
        layers=list(arithmetic.widths(features)),
        solver="gd",
        stepSize=cell.settings.step,
        tol=0.0 if cell.mini_batches else cell.tolerance,
        maxIter=limit,
        blockSize=BLOCK_ROWS,
        initialWeights=weights.tolist(),
    )
    began = time.time()
    model = learner.fit(table)
    ended = time.time()
    passes = (
        int(model.summary().totalIterations) + 1
    )  # it leaves out the last, which only took the loss or ended the run
    iterations = min(passes, limit)
    return Outcome(
        mini_batches=iterations,
        updates=iterations,
        examples=iterations * cell.rows,
        converged=not cell.mini_batches and passes <= limit,
        seconds=ended - began,
        compute_s=(ended - began) / iterations,
        read_s=read_s,
        cpu=meter.between(began, ended),
        start_s=read_s,
        weights=tuple(model.weights.toArray()),
    )


def parts_of_a_mini_batch(context: SparkContext) -> dict[str, float]:
    """Task metrics of the stages of the latest mini-batches, medians in milliseconds and bytes: what one is made of.
    Empty where Spark's status store has none."""
    status, found = context._jsc.sc().statusStore(), []
    for job in range(max(0, jobs_so_far(context) - LOOKED_AT), jobs_so_far(context)):
        with suppress(Py4JJavaError):  # it was dropped from the store, or its end has not arrived there
            stages = status.job(job).stageIds()
            for at in range(stages.size()):
                data = status.lastStageAttempt(stages.apply(at))
                if "GradientDescent" in data.name() and data.completionTime().isDefined():
                    wall = data.completionTime().get().getTime() - data.submissionTime().get().getTime()
                    unpacking, result = data.executorDeserializeTime(), data.resultSize()
                    found.append((wall, data.executorRunTime(), unpacking, result, data.numTasks()))
    names = ("stage_ms", "tasks_ms", "deserialise_ms", "result_bytes", "tasks")
    return dict(zip(names, map(float, np.median(np.array(found, float), axis=0)), strict=True)) if found else {}
