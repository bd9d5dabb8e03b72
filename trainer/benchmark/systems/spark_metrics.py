"""Spark's own counters: jobs, the driver's CPU time, the metrics of stages."""

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
    """Return the number of jobs submitted to the scheduler so far."""
    return int(scala_context(context).dagScheduler().numTotalJobs())


def driver_cpu_s(context: SparkContext) -> float:
    """Return the CPU seconds of the driver's threads so far.

    Task threads, which share its JVM in local mode, are excluded."""
    threads = jvm_of(context).java.lang.management.ManagementFactory.getThreadMXBean()
    infos = (info for info in threads.getThreadInfo(threads.getAllThreadIds()) if info is not None)
    ids = [info.getThreadId() for info in infos if not info.getThreadName().startswith("Executor task")]
    return float(sum(max(0, threads.getThreadCpuTime(number)) for number in ids)) / 1e9  # -1: the thread has ended


def measure_mini_batch(context: SparkContext) -> dict[str, float]:
    """Return task metrics of MLlib's latest mini-batches, summed over the stages of each: medians, by STAGE_METRICS.

    wall_ms: from the submission of a stage to its end. run_ms, deserialise_ms: of all its tasks. Empty if Spark's
    status store has no such jobs."""
    status = scala_context(context).statusStore()
    stage_sums = []
    for job in range(max(0, count_jobs(context) - LATEST_JOBS), count_jobs(context)):
        with suppress(Py4JJavaError):  # dropped from the store, or its end is not stored yet
            ids = status.job(job).stageIds()
            stages = [status.lastStageAttempt(ids.apply(at)) for at in range(ids.size())]
            if all("GradientDescent" in stage.name() and stage.completionTime().isDefined() for stage in stages):
                stage_sums.append(np.sum([_read_stage(stage) for stage in stages], axis=0))
    if not stage_sums:
        return {}
    return dict(zip(STAGE_METRICS, np.median(stage_sums, axis=0).tolist(), strict=True))


def _read_stage(stage: Any) -> tuple[float, ...]:
    """Return the STAGE_METRICS of a stage."""
    wall = stage.completionTime().get().getTime() - stage.submissionTime().get().getTime()
    times = (stage.executorRunTime(), stage.executorDeserializeTime())
    return 1, wall, *times, stage.resultSize(), stage.numTasks()
