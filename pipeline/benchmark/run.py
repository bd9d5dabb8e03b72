"""The benchmark from data to report: every cell in every arm, each written down as soon as it is measured."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import SparkContext
from pyspark.sql import SparkSession

from pipeline.benchmark import averaging, mllib, rows, server
from pipeline.benchmark.cells import (
    MOST_WORKERS,
    SETTINGS,
    Arm,
    Cell,
    Model,
    Outcome,
    Plan,
    of_a_length,
    of_many_tasks,
    to_converge,
)
from pipeline.benchmark.environment import machine, program
from pipeline.benchmark.problems import PROBLEMS, Problem, check, from_csv, generated, store
from pipeline.benchmark.timing import CpuMeter
from pipeline.errors import UsageError
from pipeline.input.dataset import Dataset
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.spark.store import open_store
from pipeline.strategies.stratified import Stratified

ROWS_FILE, JSON_FILE, CSV_FILE = "rows.jsonl", "results.json", "results.csv"
MEMORY_SHARE = 0.75  # of what the executors' memory holds of cached rows, for the largest size (SPEC 9)
OBJECT_BYTES = 88  # of a row in the JVM beside its numbers: a LabeledPoint, its vector, an array's header, references
WARM_UP = 20  # mini-batches at a time; of the perceptron, a quarter
SIZES = (100, 10, 1)  # parts of the largest


@dataclass(frozen=True)
class Row:
    """One arm of one cell, once. error: why there are no figures; loss and gap: the objective where the run ended, and how
    far that is above the least possible, which is known for the regressions."""

    model: str
    rows: int
    batch: int
    length: int | None
    arm: Arm
    repeat: int
    tasks: int | None = None
    error: str = ""
    outcome: dict[str, Any] | None = None
    loss: float | None = None
    gap: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.rows, self.batch, self.length, self.arm, self.repeat, self.tasks


@dataclass(frozen=True)
class Bench:
    """What all cells share. folder: for data, which may lie on HDFS; output: local; kept: rows of an earlier start; parts:
    what MLlib's mini-batches are made of, by cell."""

    context: SparkContext
    plan: Plan
    output: Path
    folder: str
    progress: PhaseLog
    meter: CpuMeter
    kept: dict[tuple[Any, ...], Row]
    parts: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Stored:
    """Rows of a problem where every arm finds them: a folder with both forms, one of them as ``data``, and the URI of the
    shards."""

    problem: Problem
    place: str
    data: Dataset
    shards: str


def run(context: SparkContext, plan: Plan, output: Path, folder: str, progress: PhaseLog) -> dict[str, Any]:
    """All of it; returns what results.json holds. Rows that OUTPUT already has, of the same plan, are not run again."""
    about = machine(context, folder)  # before anything loads it
    kept = _kept(output, plan, about)
    before = json.loads((output / JSON_FILE).read_text()) if (output / JSON_FILE).exists() else {}
    measured: list[Row] = []
    parts = dict(before.get("parts", {}))
    for name, uri in plan.csv.items():
        check(context, PROBLEMS[name], uri)  # before hours are spent on the others
    try:
        with CpuMeter() as meter:
            bench = Bench(context, plan, output, folder, progress, meter, kept, parts)
            for problem in (PROBLEMS[name] for name in PROBLEMS if plan.learners(name)):
                measured += _of_problem(bench, problem)
    finally:  # what there is, also where the rest is not to be had
        result = {
            "machine": about,
            "plan": {**asdict(plan), "settings": {model: asdict(found) for model, found in SETTINGS.items()}},
            "parts": parts,
            "rows": [asdict(row) for row in measured],
        }
        _write(output / JSON_FILE, json.dumps(result, indent=1))
        _write(output / CSV_FILE, as_csv(measured))
    return result


def _of_problem(bench: Bench, problem: Problem) -> Iterator[Row]:
    """On the rows to converge on: those runs, and mini-batches timed by the count, and with many tasks. Then more of the
    second on every size, whose rows are deleted after it."""
    plan, place = bench.plan, f"{bench.folder}/{problem.name}"
    stored = _prepare(bench, problem, place, plan.rows[problem.name], plan.csv.get(problem.name))
    count = stored.data.rows
    for model in plan.learners(problem.name):
        runs = _asked(bench, to_converge(model, count, plan.batches, plan.tolerance), plan.repeats)
        # Gradient descent is timed by its run to convergence.
        yield from _of_set(bench, stored, runs + _asked(bench, of_a_length(model, count, plan.count)[1:]))
        if model != "perceptron":
            yield from _of_many_tasks(bench, stored, model)
    sizes = _largest_and_parts(bench.context, problem) if plan.sizes is None else plan.sizes
    for size in sizes:
        # The perceptron's layers take several times the memory of its rows.
        learners = [m for m in plan.learners(problem.name) if m != "perceptron" or size < max(sizes) or len(sizes) == 1]
        asked = [_asked(bench, of_a_length(model, size, plan.count)) for model in learners]
        if all(row.key in bench.kept for wanted in asked for _, row in wanted):
            yield from (bench.kept[row.key] for wanted in asked for _, row in wanted)
            continue
        stored = _prepare(bench, problem, f"{place}-{size}", size)
        for wanted in asked:
            yield from _of_set(bench, stored, wanted)
        files = open_store(bench.context)
        files.delete(files.resolve(stored.place))


def _of_many_tasks(bench: Bench, stored: Stored, model: Model) -> Iterator[Row]:
    """Mini-batches of the smallest size by MLlib and, as far as programs for so many workers can be started, by the
    synchronous server."""
    plan, count = bench.plan, stored.data.rows
    for tasks in plan.tasks:
        arms: dict[Arm, float] = {"mllib": math.inf, "ps-sync": MOST_WORKERS}
        for arm, most in arms.items():
            cell = of_many_tasks(model, count, min(*plan.batches, count), plan.count, tasks, arm)
            row = Row(cell.model, cell.rows, cell.batch, cell.mini_batches, arm, 0, tasks)
            if arm not in plan.arms or tasks > most:
                continue
            if arm == "ps-sync" and row.key not in bench.kept:
                stored = replace(stored, shards=_sharded(bench, stored.place, tasks))
            yield from _of_set(bench, stored, [(cell, row)])


def _asked(bench: Bench, cells: Sequence[Cell], repeats: int = 1) -> list[tuple[Cell, Row]]:
    """Every cell in every arm, arms and cells taking turns."""
    return [
        (cell, Row(cell.model, cell.rows, cell.batch, cell.mini_batches, arm, repeat))
        for repeat in range(repeats)
        for cell in cells
        for arm in bench.plan.arms
    ]


def _largest_and_parts(context: SparkContext, problem: Problem) -> list[int]:
    """Numbers of rows up to what the executors' memory holds as MLlib's cached points, to two digits."""
    known = context._jsc.sc().statusStore().executorList(True)
    held = {known.apply(at).id(): int(known.apply(at).maxMemory()) for at in range(known.size())}
    total = sum(held.values()) - (held.get("driver", 0) if len(held) > 1 else 0)  # which holds nothing beside executors
    most = MEMORY_SHARE * total / (8 * problem.features + OBJECT_BYTES)
    return [int(float(f"{most / part:.1e}")) for part in SIZES]


def _prepare(bench: Bench, problem: Problem, place: str, count: int, real: str | None = None) -> Stored:
    """Store a problem both ways and commit its shards, one for each core. real: the file to take instead of generating."""
    spark, cores = SparkSession.builder.getOrCreate(), bench.context.defaultParallelism
    with bench.progress.phase(f"data: {problem.name}"):
        table = from_csv(spark, problem, real) if real else generated(spark, problem, count, bench.plan.seed, cores)
        store(table, problem, place)
        data = rows.stored(bench.context, place)
        bench.progress.report(f"{data.rows:,} rows of {problem.features} features, stored twice in {place}")
    return Stored(problem, place, data, _sharded(bench, place, cores))


def _sharded(bench: Bench, place: str, workers: int) -> str:
    """The URI of a problem's rows, sharded for so many workers."""
    request = Request(f"{place}/parquet", f"{place}/shards-{workers}", workers, overwrite=True)
    return shard(bench.context, request, Stratified(), PhaseLog(bench.context, quiet=True)).shards.uri


def _of_set(bench: Bench, stored: Stored, asked: Sequence[tuple[Cell, Row]]) -> Iterator[Row]:
    """All these runs of one model on one set of rows; nothing is loaded where all are known."""
    if all(row.key in bench.kept for _, row in asked):
        yield from (bench.kept[row.key] for _, row in asked)
        return
    with ExitStack() as stack:
        loaded = _ready(bench, stored, asked[0][0], {row.arm for _, row in asked}, stack)
        for cell, row in asked:
            if row.key in bench.kept:
                yield bench.kept[row.key]
                continue
            with bench.progress.phase(f"{cell.name}: {row.arm}"):
                done = _measure(bench, cell, row, loaded)
                bench.progress.report(told(done))
            with open(bench.output / ROWS_FILE, "a") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            yield done


def told(row: Row) -> str:
    """A row in a line."""
    if row.error:
        return f"failed: {row.error}"
    found = row.outcome or {}
    ended = "" if row.length else (" to converge" if found["converged"] else " without converging")
    each = f"{1e3 * found['compute_s']:.2f} ms each"
    return f"{found['mini_batches']:,} mini-batches{ended} in {found['seconds']:.2f} s, {each}"


@dataclass(frozen=True)
class Loaded:
    """A set for one model: the weights that all arms start from; the least objective, of a regression to converge; rows in
    the JVM, warmed up, if MLlib takes part, or why there are none."""

    stored: Stored
    start: np.ndarray[Any, Any]
    best: float | None
    mllib: mllib.Points | mllib.Table | Exception | None


def _ready(bench: Bench, stored: Stored, cell: Cell, arms: set[Arm], stack: ExitStack) -> Loaded | Exception:
    """What all runs on a set need, in these arms. What went wrong instead is the error of each of them."""
    with bench.progress.phase(f"warming up: {cell.model}"):
        try:
            start, best = _start(bench, stored, cell)
        except Exception as error:
            return error
        try:
            in_jvm = _in_jvm(bench, stored, cell, start, stack) if "mllib" in arms else None
        except Exception as error:
            return Loaded(stored, start, best, error)
        return Loaded(stored, start, best, in_jvm)


def _start(bench: Bench, stored: Stored, cell: Cell) -> tuple[np.ndarray[Any, Any], float | None]:
    """Weights to start from, and the least objective where it is known and wanted."""
    problem, context = stored.problem, bench.context
    if cell.model == "perceptron":
        idle, one = bench.output / "training", replace(cell, mini_batches=1)
        return server.initial_weights(one, stored.shards, idle, bench.plan.seed, problem.features), None
    best = None
    if cell.mini_batches is None:
        at = rows.optimum(context, stored.data, cell.model, cell.settings.decay, problem.real)
        best = rows.objective(context, stored.data, cell, problem.real, at)
    return np.zeros(problem.features), best


def _in_jvm(
    bench: Bench, stored: Stored, cell: Cell, start: np.ndarray[Any, Any], stack: ExitStack
) -> mllib.Points | mllib.Table:
    """Caches filled and compilers warm, before any run is timed. The trainer has no such state."""
    place, features = stored.place, stored.problem.features
    if cell.model == "perceptron":
        few = replace(cell, mini_batches=WARM_UP // 4)
        table = stack.enter_context(mllib.table(SparkSession.builder.getOrCreate(), place, features))
        mllib.warm_up(partial(mllib.perceptron, table, few, start, bench.meter))
        return table
    tasks = cell.tasks or bench.context.defaultParallelism
    points = stack.enter_context(mllib.points(bench.context, place, features, tasks))
    mllib.warm_up(partial(mllib.regression, points, replace(cell, mini_batches=WARM_UP), bench.meter))
    return points


def _measure(bench: Bench, cell: Cell, row: Row, loaded: Loaded | Exception) -> Row:
    """One run, with the objective where it ended if it was to converge."""
    try:
        if isinstance(loaded, Exception):
            raise loaded
        loss, data, real = None, loaded.stored.data, loaded.stored.problem.real
        outcome = _run_arm(bench, cell, row.arm, row.repeat, loaded)
        if cell.mini_batches is None:
            loss = rows.objective(bench.context, data, cell, real, np.array(outcome.weights))
    except Exception as error:
        return replace(row, error=" ".join(str(error).split())[:300] or type(error).__name__)
    figures = {key: value for key, value in asdict(outcome).items() if key != "weights"}
    gap = None if loss is None or loaded.best is None else loss - loaded.best
    return replace(row, outcome=figures, loss=loss, gap=gap)


def _run_arm(bench: Bench, cell: Cell, arm: Arm, repeat: int, loaded: Loaded) -> Outcome:
    stored, seed, meter = loaded.stored, bench.plan.seed + repeat, bench.meter
    if arm == "mllib":
        if isinstance(loaded.mllib, Exception):
            raise loaded.mllib
        if isinstance(loaded.mllib, mllib.Table):
            return mllib.perceptron(loaded.mllib, cell, loaded.start, meter)
        assert loaded.mllib
        outcome = mllib.regression(loaded.mllib, cell, meter)
        bench.parts[cell.name] = mllib.parts_of_a_mini_batch(bench.context)
        return outcome
    if arm in server.PROTOCOLS:
        output = bench.output / "training"
        # The perceptron starts where MLlib's does, so its seed is that of the weights.
        seed = bench.plan.seed if cell.model == "perceptron" else seed
        return server.run(cell, arm, stored.shards, output, seed, stored.problem.features, meter)
    steps = averaging.LOCAL_STEPS if arm == "averaging" else 1
    return averaging.run(bench.context, stored.data, cell, stored.problem.real, loaded.start, seed, steps, meter)


def as_csv(measured: list[Row]) -> str:
    names = [field.name for field in fields(Outcome) if field.name != "weights"]
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["model", "rows", "batch", "length", "arm", "repeat", "tasks", "error", "loss", "gap", *names])
    for row in measured:
        found = row.outcome or {}
        table.writerow([*row.key, row.error, row.loss, row.gap, *(found.get(name) for name in names)])
    return text.getvalue()


def _kept(output: Path, plan: Plan, about: dict[str, Any]) -> dict[tuple[Any, ...], Row]:
    """Rows of an earlier start of the same plan and program on the same machine. Raises UsageError where OUTPUT holds those
    of another."""
    output.mkdir(parents=True, exist_ok=True)
    same = {key: value for key, value in about.items() if key != "load_before"}
    mark = json.dumps({"plan": asdict(plan), "machine": same, "program": program()}, sort_keys=True)
    path = output / ROWS_FILE
    if not path.exists():
        _write(path, mark + "\n")
        return {}
    first, *lines = path.read_text().splitlines()
    if first != mark:
        raise UsageError(
            f"{path} holds rows of another configuration, machine or version; choose another --output, or --overwrite"
        )
    found = [row for line in lines if (row := _row(line)) and not row.error]
    _write(path, "".join(f"{line}\n" for line in (mark, *(json.dumps(asdict(row)) for row in found))))
    return {row.key: row for row in found}


def _row(line: str) -> Row | None:
    """None for a line that was cut off."""
    with suppress(ValueError, TypeError):
        return Row(**json.loads(line))
    return None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def clean(output: Path) -> None:
    """Remove the rows of an earlier run."""
    for name in (ROWS_FILE, JSON_FILE, CSV_FILE):
        (output / name).unlink(missing_ok=True)
