"""The experiment from data to results: every configuration on every system, each recorded when it is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from pipeline.core.provenance import provenance
from pipeline.spark.progress import PhaseLog
from trainer.benchmark.configurations import (
    HYPERPARAMETERS,
    MAX_WORKERS,
    Configuration,
    Model,
    System,
    configuration_with_tasks,
    configurations_of_fixed_length,
    configurations_to_converge,
)
from trainer.benchmark.environment import describe_machine, hash_program
from trainer.benchmark.experiment import Experiment
from trainer.benchmark.preparation import (
    Execution,
    StoredRows,
    choose_sizes,
    delete_rows,
    shard_rows,
    store_rows,
)
from trainer.benchmark.problems import PROBLEMS, Problem, check_exists
from trainer.benchmark.records import (
    BenchmarkRecord,
    PlannedRun,
    append_record,
    delete_records,
    read_results,
    resume_records,
    write_results,
)
from trainer.benchmark.systems.executors import find_executors
from trainer.benchmark.systems.measure import measure, set_up
from trainer.benchmark.systems.timing import CpuMeter


def run_experiment(
    context: SparkContext,
    experiment: Experiment,
    output: Path,
    data: str,
    progress: PhaseLog,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Run the experiment and return the content of results.json. Runs that OUTPUT has of the same experiment are kept.

    Results are also written if a later run fails. Raises UsageError if OUTPUT holds another experiment, DataError if a
    real file cannot be read.

    Args:
        context: Spark's context.
        experiment: the extent of the benchmark.
        output: local folder of the results.
        data: folder of the data sets, local or on HDFS.
        progress: prints phases and results.
        overwrite: delete the records of an earlier start, once the real files are known to exist.
    """
    machine = describe_machine(context, data)  # before the benchmark adds to the load
    stable = {name: value for name, value in machine.items() if name != "load_before"}
    for problem in PROBLEMS.values():
        if file := experiment.file(problem):
            check_exists(context, problem, file)  # before hours are spent on the other problem
    if overwrite:
        delete_records(output)
    finished = resume_records(output, {"experiment": asdict(experiment), "machine": stable, "program": hash_program()})
    task_metrics = dict(read_results(output).get("task_metrics", {}))
    records: list[BenchmarkRecord] = []
    hyperparameters = {model: asdict(values) for model, values in HYPERPARAMETERS.items()}
    results: dict[str, Any] = {
        "made": provenance(),
        "machine": machine,
        "experiment": {**asdict(experiment), "hyperparameters": hyperparameters},
        "task_metrics": task_metrics,
    }
    try:
        with CpuMeter() as meter:
            executors = find_executors(context)
            execution = Execution(context, experiment, output, data, progress, meter, finished, task_metrics, executors)
            for problem in PROBLEMS.values():
                if experiment.models_of(problem):
                    records += _run_problem(execution, problem)
    finally:
        results = write_results(output, results, records)
    return results


def _run_problem(execution: Execution, problem: Problem) -> Iterator[BenchmarkRecord]:
    """Yield the records of all runs on a problem.

    For each model: runs to convergence, timed mini-batches on the same rows and, for regressions, timed mini-batches
    with many tasks. Then timed mini-batches on sets of other sizes."""
    experiment = execution.experiment
    folder = f"{execution.data}/{problem.name}"
    stored_rows = store_rows(execution, problem, folder, experiment.rows(problem), experiment.file(problem))
    rows = stored_rows.dataset.rows
    for model in experiment.models_of(problem):
        to_converge = configurations_to_converge(model, rows, experiment.batches, experiment.tolerance)
        # The run to convergence already times gradient descent.
        fixed_length = configurations_of_fixed_length(model, rows, experiment.mini_batches)[1:]
        runs = plan_runs(experiment, to_converge, experiment.repeats) + plan_runs(experiment, fixed_length)
        yield from _run_all(execution, stored_rows, runs)
        if model != "perceptron":
            yield from _run_with_tasks(execution, stored_rows, model)
    yield from _run_sizes(execution, problem, folder)


def _run_sizes(execution: Execution, problem: Problem, folder: str) -> Iterator[BenchmarkRecord]:
    """Time mini-batches on sets of every size, whose rows are deleted afterwards.

    The perceptron leaves out the largest of several sizes.

    folder: prefix of the folders of rows, one per size."""
    experiment = execution.experiment
    sizes = choose_sizes(execution.context, problem) if experiment.sizes is None else experiment.sizes
    for size in sizes:
        # The outputs of the perceptron's layers take several times the memory of its rows.
        fits = len(sizes) == 1 or size < max(sizes)
        models = [model for model in experiment.models_of(problem) if model != "perceptron" or fits]
        runs_by_model = [
            plan_runs(experiment, configurations_of_fixed_length(model, size, experiment.mini_batches))
            for model in models
        ]
        if _are_finished(execution, [run for runs in runs_by_model for run in runs]):
            yield from (execution.finished[run.key] for runs in runs_by_model for run in runs)
            continue
        stored_rows = store_rows(execution, problem, f"{folder}-{size}", size, file=None)
        try:
            for runs in runs_by_model:
                yield from _run_all(execution, stored_rows, runs)
        finally:
            delete_rows(execution, stored_rows)


def _run_with_tasks(execution: Execution, stored_rows: StoredRows, model: Model) -> Iterator[BenchmarkRecord]:
    """Time the smallest mini-batches with many tasks: on MLlib and, with up to MAX_WORKERS workers, on ps-sync."""
    experiment = execution.experiment
    rows = stored_rows.dataset.rows
    most: dict[System, float] = {"mllib": math.inf, "ps-sync": MAX_WORKERS}
    batch = min(*experiment.batches, rows)
    for tasks in experiment.tasks:
        for system in most:
            if system not in experiment.systems or tasks > most[system]:
                continue
            run = PlannedRun(
                configuration_with_tasks(model, rows, batch, experiment.mini_batches, tasks, system), system
            )
            # The number of shards must be the number of workers.
            if system == "ps-sync" and run.key not in execution.finished:
                stored_rows = replace(stored_rows, shards=shard_rows(execution, stored_rows.folder, tasks))
            yield from _run_all(execution, stored_rows, [run])


def plan_runs(experiment: Experiment, configurations: Sequence[Configuration], repeats: int = 1) -> list[PlannedRun]:
    """Return every configuration on every system.

    A repeat starts after all of them, so that a slow period of the machine affects all alike."""
    return [
        PlannedRun(configuration, system, repeat)
        for repeat in range(repeats)
        for configuration in configurations
        for system in experiment.systems
    ]


def _are_finished(execution: Execution, runs: Sequence[PlannedRun]) -> bool:
    return all(run.key in execution.finished for run in runs)


def _run_all(execution: Execution, stored_rows: StoredRows, runs: Sequence[PlannedRun]) -> Iterator[BenchmarkRecord]:
    """Run one model on one set of rows. Nothing is loaded if an earlier start measured all of the runs."""
    if _are_finished(execution, runs):
        yield from (execution.finished[run.key] for run in runs)
        return
    with ExitStack() as stack:
        setup = set_up(execution, stored_rows, runs[0].configuration, {run.system for run in runs}, stack)
        for run in runs:
            if run.key in execution.finished:
                yield execution.finished[run.key]
                continue
            with execution.progress.phase(f"{run.configuration.name}: {run.system}"):
                record = measure(execution, run, setup)
                execution.progress.report(describe_record(record))
            # Written at once, so that an interruption does not lose the measurement.
            append_record(execution.output, record)
            yield record


def describe_record(record: BenchmarkRecord) -> str:
    """Return one line about the result of a run."""
    if record.error:
        return f"failed: {record.error}"
    measured = record.measurement or {}
    ending = "" if record.length else (" to converge" if measured["converged"] else " without converging")
    each = f"{1e3 * measured['compute_s']:.2f} ms each"
    return f"{measured['mini_batches']:,} mini-batches{ending} in {measured['seconds']:.2f} s, {each}"
