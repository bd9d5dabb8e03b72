"""The preparation of rows: stored and sharded so that every system can read them."""

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
from trainer.benchmark.records import BenchmarkRecord, Key
from trainer.benchmark.rows import open_rows
from trainer.benchmark.systems.executors import Executors
from trainer.benchmark.systems.timing import CpuMeter

MEMORY_SHARE = 0.75  # of the executors' memory for cached rows, filled by the largest set (thesis, chapter 2)
OBJECT_BYTES = 88  # overhead of a row in the JVM: a LabeledPoint, its vector, an array's header, references
FRACTIONS = (100, 10, 1)  # sizes to time: a hundredth, a tenth and all of the largest set


@dataclass(frozen=True)
class Execution:
    """The state that all runs of one execution of an experiment share.

    Attributes:
        context: Spark's context.
        experiment: the extent of the benchmark.
        output: local folder of figures and report.
        data: folder of the rows, which may be on HDFS.
        progress: prints phases and results.
        meter: measures the CPU use of this machine.
        finished: records of an earlier start, by run.
        task_metrics: metrics of MLlib's mini-batches, by configuration; filled by the runs.
        executors: of a cluster; None on a local master.
    """

    context: SparkContext
    experiment: Experiment
    output: Path
    data: str
    progress: PhaseLog
    meter: CpuMeter
    finished: Mapping[Key, BenchmarkRecord]
    task_metrics: dict[str, dict[str, float]]
    executors: Executors | None

    @property
    def training(self) -> str:
        """Return the folder of the trainer's runs.

        On a cluster it is beside the rows, where all hosts can access it."""
        return f"{self.data}/training" if self.executors else str(self.output / "training")


@dataclass(frozen=True)
class StoredRows:
    """The rows of a problem in a folder: as text, as Parquet (``dataset``), and as shards."""

    problem: Problem
    folder: str
    dataset: Dataset
    shards: str  # URI


def store_rows(execution: Execution, problem: Problem, folder: str, rows: int | None, file: str | None) -> StoredRows:
    """Store rows as text and as Parquet, and shard them for one worker per core.

    Args:
        execution: shared state.
        problem: of the rows.
        folder: for the rows, local or on HDFS.
        rows: number of rows to generate; unused for a file.
        file: a real file to read instead, or None.
    """
    spark = SparkSession.builder.getOrCreate()
    cores = execution.context.defaultParallelism
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
    """Shard stored rows for a number of workers, stratified by class, and return the URI of the set."""
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


def delete_rows(execution: Execution, stored_rows: StoredRows) -> None:
    store = open_store(execution.context)
    store.delete(store.resolve(stored_rows.folder))


def choose_sizes(context: SparkContext, problem: Problem) -> tuple[int, ...]:
    """Return the numbers of rows to time, ascending, two digits each.

    The largest fills MEMORY_SHARE of the executors' memory with MLlib's cached points."""
    executors = scala_context(context).statusStore().executorList(True)
    memory = {executors.apply(at).id(): int(executors.apply(at).maxMemory()) for at in range(executors.size())}
    unused = memory.get("driver", 0) if len(memory) > 1 else 0  # the driver caches nothing beside executors
    largest = MEMORY_SHARE * (sum(memory.values()) - unused) / (8 * problem.features + OBJECT_BYTES)
    return tuple(int(float(f"{largest / fraction:.1e}")) for fraction in FRACTIONS)
