"""The measurement of a run of any system, and the state that all runs on the same rows share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from pyspark.sql import SparkSession

from pipeline.core.arrays import Floats
from trainer.benchmark.configurations import Configuration, System
from trainer.benchmark.preparation import Execution, StoredRows
from trainer.benchmark.records import BenchmarkRecord, PlannedRun, RunTimings
from trainer.benchmark.rows import compute_objective, find_optimum
from trainer.benchmark.systems import mllib, parameter_server
from trainer.benchmark.systems.barrier import run_barrier_job
from trainer.benchmark.systems.spark_metrics import measure_mini_batch

WARM_UP_MINI_BATCHES = 20  # per warm-up run; a quarter for the perceptron
ERROR_LENGTH = 300


@dataclass(frozen=True)
class Setup:
    """The state that all runs of one model on one set of rows share."""

    stored_rows: StoredRows
    start: Floats  # initial weights of all systems
    least: float | None  # smallest possible objective, for runs of a regression to convergence
    mllib_rows: (
        mllib.CachedPoints | mllib.CachedTable | Exception | None
    )  # MLlib's rows, or the reason for their absence


def set_up(
    execution: Execution, stored_rows: StoredRows, configuration: Configuration, systems: set[System], stack: ExitStack
) -> Setup | Exception:
    """Prepare the runs of some systems.

    An error is returned, not raised: it becomes the error of each run that needs the missing part.

    Args:
        execution: shared state.
        stored_rows: the rows.
        configuration: one of the runs; all have the same model.
        systems: of the runs.
        stack: closes caches at the end.
    """
    with execution.progress.phase(f"warming up: {configuration.model}"):
        try:
            start, least = _choose_start(execution, stored_rows, configuration)
        except Exception as error:
            return error
        try:
            cached_rows = (
                _warm_mllib(execution, stored_rows, configuration, start, stack) if "mllib" in systems else None
            )
        except Exception as error:
            return Setup(stored_rows, start, least, error)
        return Setup(stored_rows, start, least, cached_rows)


def _choose_start(
    execution: Execution, stored_rows: StoredRows, configuration: Configuration
) -> tuple[Floats, float | None]:
    """Return the initial weights of all systems, and the smallest objective or None.

    The perceptron starts at weights that the trainer draws, a regression at 0. The smallest objective is computed for a
    regression's run to convergence only."""
    problem = stored_rows.problem
    context = execution.context
    seed = execution.experiment.seed
    if configuration.model == "perceptron":
        # The trainer draws the perceptron's weights, and the other systems start from the same.
        weights = parameter_server.initialise_weights(
            configuration, stored_rows.shards, execution.training, seed, problem.features, execution.executors
        )
        return weights, None
    least = None
    if configuration.length is None:
        decay = configuration.hyperparameters.decay
        best = find_optimum(context, stored_rows.dataset, configuration.model, decay, problem.real)
        least = _objective(execution, stored_rows, configuration, best)
    return np.zeros(problem.features), least


def _objective(execution: Execution, stored_rows: StoredRows, configuration: Configuration, weights: Floats) -> float:
    model = configuration.model
    hyperparameters = configuration.hyperparameters
    return compute_objective(
        execution.context, stored_rows.dataset, model, hyperparameters, stored_rows.problem.real, weights
    )


def _warm_mllib(
    execution: Execution, stored_rows: StoredRows, configuration: Configuration, start: Floats, stack: ExitStack
) -> mllib.CachedPoints | mllib.CachedTable:
    """Cache MLlib's rows and warm up its compilers before any run is timed. The trainer keeps no such state.

    Args:
        execution: shared state.
        stored_rows: the rows.
        configuration: one of the runs; all have the same model.
        start: initial weights.
        stack: drops the cached rows at the end.
    """
    folder = stored_rows.folder
    features = stored_rows.problem.features
    meter = execution.meter
    if configuration.model == "perceptron":
        short = replace(configuration, length=WARM_UP_MINI_BATCHES // 4)
        table = stack.enter_context(mllib.cache_table(SparkSession.builder.getOrCreate(), folder, features))
        mllib.warm_up(partial(mllib.run_perceptron, table, short, start, meter))
        return table
    short = replace(configuration, length=WARM_UP_MINI_BATCHES)
    # The number of cached parts is the number of tasks of a job.
    tasks = configuration.tasks or execution.context.defaultParallelism
    points = stack.enter_context(mllib.cache_points(execution.context, folder, features, tasks))
    mllib.warm_up(partial(mllib.run_regression, points, short, meter))
    return points


def measure(execution: Execution, run: PlannedRun, setup: Setup | Exception) -> BenchmarkRecord:
    """Run once and return the record, with the objective at the end of a run to convergence.

    Errors are recorded, not raised."""
    try:
        # A failed preparation is an error of every run that needed it, so that the report says why each one is missing.
        if isinstance(setup, Exception):
            raise setup
        loss = None
        configuration = run.configuration
        measurement = run_system(execution, run, setup)
        if configuration.length is None:
            loss = _objective(execution, setup.stored_rows, configuration, np.array(measurement.weights))
    except Exception as error:
        return run.record(error=" ".join(str(error).split())[:ERROR_LENGTH] or type(error).__name__)
    # The weights were needed for the objective only, and would make every line of the records long.
    figures = {name: value for name, value in asdict(measurement).items() if name != "weights"}
    if execution.executors:
        figures["cpu"] = None  # the meter sees the driver's host alone, and executors may be elsewhere
    gap = None if loss is None or setup.least is None else loss - setup.least
    return run.record(measurement=figures, loss=loss, gap=gap)


def run_system(execution: Execution, run: PlannedRun, setup: Setup) -> RunTimings:
    """Run once on the system of ``run`` and return its measurements. Raises any error of the system.

    Except on MLlib, every repeat has another seed. The perceptron on the parameter server keeps one, which also draws
    its initial weights."""
    configuration = run.configuration
    system = run.system
    stored_rows = setup.stored_rows
    seed = execution.experiment.seed + run.repeat
    meter = execution.meter
    if system == "mllib":
        return _run_mllib(execution, configuration, setup)
    if system in parameter_server.PROTOCOL_OF:
        # The seed also determines the perceptron's initial weights, which must be the same as MLlib's in every repeat.
        seed = execution.experiment.seed if configuration.model == "perceptron" else seed
        return parameter_server.run_server(
            configuration,
            system,
            stored_rows.shards,
            execution.training,
            seed,
            stored_rows.problem.features,
            meter,
            execution.executors,
        )
    real = stored_rows.problem.real
    return run_barrier_job(
        execution.context, system, stored_rows.dataset, configuration, real, setup.start, seed, meter
    )


def _run_mllib(execution: Execution, configuration: Configuration, setup: Setup) -> RunTimings:
    """Run MLlib once on its cached rows, and keep Spark's task metrics of a regression's mini-batch.

    Raises the error that kept the rows from being cached."""
    if isinstance(setup.mllib_rows, Exception):
        raise setup.mllib_rows
    if isinstance(setup.mllib_rows, mllib.CachedTable):
        return mllib.run_perceptron(setup.mllib_rows, configuration, setup.start, execution.meter)
    assert setup.mllib_rows
    measurement = mllib.run_regression(setup.mllib_rows, configuration, execution.meter)
    execution.task_metrics[configuration.name] = measure_mini_batch(execution.context)
    return measurement
