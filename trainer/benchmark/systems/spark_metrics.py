"""What Spark itself counts: jobs, the driver's CPU, the metrics of stages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext

from pipeline.spark.jvm import jvm_of, scala_context

STAGE_METRICS = ("stages", "wall_ms", "run_ms", "deserialise_ms", "result_bytes", "tasks")
LATEST_JOBS = 20


def count_jobs(context: SparkContext) -> int:
    """Jobs that the scheduler has been given so far."""
    return int(scala_context(context).dagScheduler().numTotalJobs())


def driver_cpu_s(context: SparkContext) -> float:
    """CPU seconds of the driver's threads so far, without those that run tasks: local mode has them in the same JVM."""
    threads = jvm_of(context).java.lang.management.ManagementFactory.getThreadMXBean()
    infos = (info for info in threads.getThreadInfo(threads.getAllThreadIds()) if info is not None)
    ids = [info.getThreadId() for info in infos if not info.getThreadName().startswith("Executor task")]
    return float(sum(max(0, threads.getThreadCpuTime(number)) for number in ids)) / 1e9  # -1: it has ended


def measure_mini_batch(context: SparkContext) -> dict[str, float]:
    """Task metrics of MLlib's latest mini-batches, summed over the stages of each: medians, by STAGE_METRICS.

    wall_ms: from the submission of a stage to its end; run_ms, deserialise_ms: of all its tasks. Empty where Spark's
    status store has none."""
    status, found = scala_context(context).statusStore(), []
    for job in range(max(0, count_jobs(context) - LATEST_JOBS), count_jobs(context)):
        with suppress(Py4JJavaError):  # it was dropped from the store, or its end has not arrived there
            ids = status.job(job).stageIds()
            stages = [status.lastStageAttempt(ids.apply(at)) for at in range(ids.size())]
            if all("GradientDescent" in stage.name() and stage.completionTime().isDefined() for stage in stages):
                found.append(np.sum([_read_stage(stage) for stage in stages], axis=0))
    return dict(zip(STAGE_METRICS, map(float, np.median(np.array(found), axis=0)), strict=True)) if found else {}


def _read_stage(stage: Any) -> tuple[float, ...]:
    """A stage's STAGE_METRICS."""
    wall = stage.completionTime().get().getTime() - stage.submissionTime().get().getTime()
    times = (stage.executorRunTime(), stage.executorDeserializeTime())
    return 1, wall, *times, stage.resultSize(), stage.numTasks()
