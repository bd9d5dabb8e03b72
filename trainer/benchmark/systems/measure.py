"""One run of any system, from what all runs on the same rows share."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from pyspark.sql import SparkSession

from trainer.benchmark.configurations import Configuration, System
from trainer.benchmark.preparation import Execution, StoredRows
from trainer.benchmark.records import Measurement, PlannedRun, RunRecord
from trainer.benchmark.rows import compute_objective, find_optimum
from trainer.benchmark.systems import mllib, parameter_server
from trainer.benchmark.systems.barrier import run_barrier_job
from trainer.benchmark.systems.descent import Floats
from trainer.benchmark.systems.spark_metrics import measure_mini_batch

WARM_UP_MINI_BATCHES = 20  # at a time; of the perceptron, a quarter
ERROR_LENGTH = 300


@dataclass(frozen=True)
class Setup:
    """What all runs of one model on one set of rows share."""

    stored: StoredRows
    start: Floats  # the weights that all systems start from
    least: float | None  # the least objective, of a regression that is to converge
    cached: mllib.CachedPoints | mllib.CachedTable | Exception | None  # MLlib's rows, warm, or why there are none


def set_up(
    execution: Execution, stored: StoredRows, configuration: Configuration, systems: set[System], stack: ExitStack
) -> Setup | Exception:
    """What runs of these systems need. An error is returned: it is that of each run that needs what could not be had."""
    with execution.progress.phase(f"warming up: {configuration.model}"):
        try:
            start, least = _choose_start(execution, stored, configuration)
        except Exception as error:
            return error
        try:
            cached = _warm_mllib(execution, stored, configuration, start, stack) if "mllib" in systems else None
        except Exception as error:
            return Setup(stored, start, least, error)
        return Setup(stored, start, least, cached)


def _choose_start(
    execution: Execution, stored: StoredRows, configuration: Configuration
) -> tuple[Floats, float | None]:
    """The weights to start from, and the least objective where it is known and wanted."""
    problem, context, seed = stored.problem, execution.context, execution.experiment.seed
    if configuration.model == "perceptron":
        weights = parameter_server.initialise_weights(
            configuration, stored.shards, execution.training, seed, problem.features, execution.executors
        )
        return weights, None
    least = None
    if configuration.length is None:
        decay = configuration.hyperparameters.decay
        best = find_optimum(context, stored.dataset, configuration.model, decay, problem.real)
        least = _objective(execution, stored, configuration, best)
    return np.zeros(problem.features), least


def _objective(execution: Execution, stored: StoredRows, configuration: Configuration, weights: Floats) -> float:
    model, given = configuration.model, configuration.hyperparameters
    return compute_objective(execution.context, stored.dataset, model, given, stored.problem.real, weights)


def _warm_mllib(
    execution: Execution, stored: StoredRows, configuration: Configuration, start: Floats, stack: ExitStack
) -> mllib.CachedPoints | mllib.CachedTable:
    """Caches filled and compilers warm before any run is timed. The trainer keeps no such state."""
    folder, features, meter = stored.folder, stored.problem.features, execution.meter
    if configuration.model == "perceptron":
        short = replace(configuration, length=WARM_UP_MINI_BATCHES // 4)
        table = stack.enter_context(mllib.cache_table(SparkSession.builder.getOrCreate(), folder, features))
        mllib.warm_up(partial(mllib.run_perceptron, table, short, start, meter))
        return table
    short = replace(configuration, length=WARM_UP_MINI_BATCHES)
    tasks = configuration.tasks or execution.context.defaultParallelism
    points = stack.enter_context(mllib.cache_points(execution.context, folder, features, tasks))
    mllib.warm_up(partial(mllib.run_regression, points, short, meter))
    return points


def measure(execution: Execution, planned: PlannedRun, setup: Setup | Exception) -> RunRecord:
    """Run once. The record holds an error instead of raising it, and the objective where a run to convergence ended."""
    try:
        if isinstance(setup, Exception):
            raise setup
        loss, configuration = None, planned.configuration
        measurement = run_system(execution, planned, setup)
        if configuration.length is None:
            loss = _objective(execution, setup.stored, configuration, np.array(measurement.weights))
    except Exception as error:
        return planned.record(error=" ".join(str(error).split())[:ERROR_LENGTH] or type(error).__name__)
    figures = {name: value for name, value in asdict(measurement).items() if name != "weights"}
    gap = None if loss is None or setup.least is None else loss - setup.least
    return planned.record(measurement=figures, loss=loss, gap=gap)


def run_system(execution: Execution, planned: PlannedRun, setup: Setup) -> Measurement:
    """Raises what the system raises."""
    configuration, system, stored = planned.configuration, planned.system, setup.stored
    seed, meter = execution.experiment.seed + planned.repeat, execution.meter
    if system == "mllib":
        return _run_mllib(execution, configuration, setup)
    if system in parameter_server.PROTOCOL_OF:
        # The perceptron starts where MLlib's does, so its seed is that of the weights.
        seed = execution.experiment.seed if configuration.model == "perceptron" else seed
        return parameter_server.run_server(
            configuration,
            system,
            stored.shards,
            execution.training,
            seed,
            stored.problem.features,
            meter,
            execution.executors,
        )
    real = stored.problem.real
    return run_barrier_job(execution.context, system, stored.dataset, configuration, real, setup.start, seed, meter)


def _run_mllib(execution: Execution, configuration: Configuration, setup: Setup) -> Measurement:
    if isinstance(setup.cached, Exception):
        raise setup.cached
    if isinstance(setup.cached, mllib.CachedTable):
        return mllib.run_perceptron(setup.cached, configuration, setup.start, execution.meter)
    assert setup.cached
    measurement = mllib.run_regression(setup.cached, configuration, execution.meter)
    execution.task_metrics[configuration.name] = measure_mini_batch(execution.context)
    return measurement
