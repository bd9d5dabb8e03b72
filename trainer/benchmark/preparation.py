"""Rows, stored and sharded where every system finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

import pipeline
from pipeline.input.dataset import Dataset
from pipeline.spark.jvm import scala_context
from pipeline.spark.progress import PhaseLog
from pipeline.spark.store import open_store
from pipeline.strategies.stratified import Stratified
from trainer.benchmark.experiment import Experiment
from trainer.benchmark.problems import Problem, generate, read_csv, write_problem
from trainer.benchmark.records import Key, RunRecord
from trainer.benchmark.rows import open_rows
from trainer.benchmark.systems.executors import Executors
from trainer.benchmark.systems.timing import CpuMeter

MEMORY_SHARE = 0.75  # of what the executors' memory holds of cached rows, for the largest set (thesis, chapter 2)
OBJECT_BYTES = 88  # of a row in the JVM beside its numbers: a LabeledPoint, its vector, an array's header, references
FRACTIONS = (100, 10, 1)  # of the largest set that are timed: a hundredth, a tenth, all


@dataclass(frozen=True)
class Execution:
    """One execution of an experiment: what all its runs share."""

    context: SparkContext
    experiment: Experiment
    output: Path  # local
    data: str  # folder of the rows, which may lie on HDFS
    progress: PhaseLog
    meter: CpuMeter
    finished: Mapping[Key, RunRecord]  # of an earlier start
    task_metrics: dict[str, dict[str, float]]  # of MLlib's mini-batches by configuration; grows
    executors: Executors | None  # of a cluster

    @property
    def training(self) -> str:
        """The folder of the trainer's runs, on a cluster beside the rows, where all hosts reach it."""
        return f"{self.data}/training" if self.executors else str(self.output / "training")


@dataclass(frozen=True)
class StoredRows:
    """A problem's rows in a folder: as text and as Parquet, the latter as ``dataset``, and sharded."""

    problem: Problem
    folder: str
    dataset: Dataset
    shards: str  # URI


def store_rows(execution: Execution, problem: Problem, folder: str, rows: int | None, file: str | None) -> StoredRows:
    """Store rows both ways and shard them for as many workers as cores. file: read instead of generating ``rows``."""
    spark, cores = SparkSession.builder.getOrCreate(), execution.context.defaultParallelism
    with execution.progress.phase(f"data: {problem.name}"):
        if file:
            table = read_csv(spark, problem, file)
        else:
            assert rows is not None
            table = generate(spark, problem, rows, execution.experiment.seed, cores)
        write_problem(table, problem, folder)
        dataset = open_rows(execution.context, folder)
        execution.progress.report(f"{dataset.rows:,} rows of {problem.features} features, stored twice in {folder}")
    return StoredRows(problem, folder, dataset, shard_rows(execution, folder, cores))


def shard_rows(execution: Execution, folder: str, workers: int) -> str:
    """The URI of stored rows, sharded for so many workers."""
    result = pipeline.shard(
        SparkSession(execution.context),
        input=f"{folder}/parquet",
        output=f"{folder}/shards-{workers}",
        strategy=Stratified(),
        num_workers=workers,
        overwrite=True,
        report=False,
        quiet=True,
    )
    return result.shards.uri


def delete_rows(execution: Execution, stored: StoredRows) -> None:
    store = open_store(execution.context)
    store.delete(store.resolve(stored.folder))


def choose_sizes(context: SparkContext, problem: Problem) -> tuple[int, ...]:
    """Numbers of rows up to what the executors' memory holds as MLlib's cached points, to two digits, ascending."""
    executors = scala_context(context).statusStore().executorList(True)
    memory = {executors.apply(at).id(): int(executors.apply(at).maxMemory()) for at in range(executors.size())}
    unused = memory.get("driver", 0) if len(memory) > 1 else 0  # the driver caches nothing beside executors
    largest = MEMORY_SHARE * (sum(memory.values()) - unused) / (8 * problem.features + OBJECT_BYTES)
    return tuple(int(float(f"{largest / fraction:.1e}")) for fraction in FRACTIONS)
