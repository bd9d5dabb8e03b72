"""The benchmark from data to report: every cell in every arm, each written down as soon as it is measured."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark import SparkContext, StorageLevel
from pyspark.sql import SparkSession

from pipeline.benchmark import averaging, mllib, rows, server
from pipeline.benchmark.cells import SETTINGS, Arm, Cell, Model, Outcome, Plan
from pipeline.benchmark.problems import PROBLEMS, Problem, from_csv, generated, store
from pipeline.benchmark.timing import CpuMeter
from pipeline.dataset import Dataset
from pipeline.errors import UsageError
from pipeline.progress import Progress
from pipeline.request import Request
from pipeline.sharding import shard
from pipeline.strategies.stratified import Stratified

ROWS_FILE, JSON_FILE, CSV_FILE = "rows.jsonl", "results.json", "results.csv"
TASKS_TIMED = 200
LIBRARIES = ("pyspark", "numpy", "pyarrow", "torch", "pyzmq")


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
    error: str = ""
    outcome: dict[str, Any] | None = None
    loss: float | None = None
    gap: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model, self.rows, self.batch, self.length, self.arm, self.repeat


@dataclass(frozen=True)
class Bench:
    """What all cells share. folder: for data, which may lie on HDFS; output: local; shards: URIs of the committed sets;
    data: the rows; optima: least objectives; parts, sizes: what MLlib's mini-batches are made of, and cost on fewer rows."""

    context: SparkContext
    plan: Plan
    output: Path
    folder: str
    progress: Progress
    meter: CpuMeter
    shards: dict[str, str]
    data: dict[str, Dataset]
    optima: dict[str, float]
    parts: dict[str, float]
    sizes: dict[str, list[tuple[int, int, float]]]

    @property
    def workers(self) -> int:
        return self.context.defaultParallelism


def run(context: SparkContext, plan: Plan, output: Path, folder: str, progress: Progress) -> dict[str, Any]:
    """All of it; returns what results.json holds. Rows that OUTPUT already has, of the same plan, are not run again."""
    kept = _kept(output, plan)
    before = json.loads((output / JSON_FILE).read_text()) if (output / JSON_FILE).exists() else {}
    parts, sizes = before.get("parts", {}), before.get("sizes", {})
    with CpuMeter() as meter:
        bench = Bench(context, plan, output, folder, progress, meter, {}, {}, {}, parts, sizes)
        for name in dict.fromkeys(SETTINGS[model].problem for model in plan.models):
            prepare(bench, PROBLEMS[name])
        measured = list(_all_rows(bench, kept))
        result = {
            "machine": machine(context),
            "plan": {**asdict(plan), "settings": {model: asdict(found) for model, found in SETTINGS.items()}},
            "task_s": _task_s(context),
            "parts": bench.parts,
            "sizes": bench.sizes,
            "rows": [asdict(row) for row in measured],
        }
    _write(output / JSON_FILE, json.dumps(result, indent=1))
    _write(output / CSV_FILE, as_csv(measured))
    return result


def prepare(bench: Bench, problem: Problem) -> None:
    """Store a problem both ways and commit its shards, one for each core."""
    place = f"{bench.folder}/{problem.name}"
    spark = SparkSession.builder.getOrCreate()
    with bench.progress.phase(f"data: {problem.name}"):
        if problem.name in bench.plan.csv:
            table = from_csv(spark, problem, bench.plan.csv[problem.name])
        else:
            table = generated(spark, problem, bench.plan.rows[problem.name], bench.plan.seed, bench.workers)
        store(table, problem, place)
        data = rows.stored(bench.context, place)
        bench.progress.report(f"{data.rows:,} rows of {problem.features} features, stored twice in {place}")
    request = Request(f"{place}/parquet", f"{place}/shards", bench.workers, overwrite=True)
    quiet = Progress(bench.context, quiet=True)
    bench.data[problem.name] = data
    bench.shards[problem.name] = shard(bench.context, request, Stratified(), quiet).shards.uri
    for model, settings in SETTINGS.items():
        if settings.problem == problem.name and model in bench.plan.models and model != "perceptron":
            with bench.progress.phase(f"optimum: {model}"):
                real = problem.real
                best = rows.optimum(bench.context, data, model, settings.decay, real)
                cell = Cell(model, data.rows, data.rows)
                bench.optima[model] = rows.objective(bench.context, data, cell, real, best)


def _all_rows(bench: Bench, kept: dict[tuple[Any, ...], Row]) -> Iterator[Row]:
    real_rows = {name: data.rows for name, data in bench.data.items()}
    plan = replace(bench.plan, rows=real_rows)
    for model in plan.models:
        asked = [
            (cell, Row(cell.model, cell.rows, cell.batch, cell.mini_batches, arm, repeat))
            for repeat in range(plan.repeats)
            for cell in plan.cells()
            for arm in plan.arms
            if cell.model == model
        ]
        with _ready(bench, model, any(row.key not in kept for _, row in asked)) as loaded:
            for cell, row in asked:
                if row.key in kept:
                    yield kept[row.key]
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
    """A model's rows in the JVM, warmed up, and the weights that all arms start from."""

    problem: Problem
    start: np.ndarray[Any, Any]
    points: mllib.Points | None = None
    table: Any = None
    read_s: float = 0.0


@contextmanager
def _ready(bench: Bench, model: Model, wanted: bool) -> Iterator[Loaded]:
    """Caches filled and compilers warm: short runs of MLlib before any is timed. The trainer has no such state."""
    with ExitStack() as stack:
        with bench.progress.phase(f"warming up: {model}"):
            loaded = _load(bench, model, stack) if wanted else Loaded(PROBLEMS[SETTINGS[model].problem], np.zeros(0))
        yield loaded


def _load(bench: Bench, model: Model, stack: ExitStack) -> Loaded:
    problem = PROBLEMS[SETTINGS[model].problem]
    place, data = f"{bench.folder}/{problem.name}", bench.data[problem.name]
    warm = Cell(model, data.rows, data.rows, 5)
    if model != "perceptron":
        found = stack.enter_context(mllib.points(bench.context, place, problem.features))
        mllib.regression(found, warm, 0.0, bench.meter)
        bench.sizes[model] = mllib.over_sizes(found, model)
        return Loaded(problem, np.zeros(problem.features), found, read_s=mllib.reading_s(found, model))
    output = bench.output / "training"
    start = server.initial_weights(warm, bench.shards[problem.name], output, bench.plan.seed, problem.features)
    table = mllib.table_of(SparkSession.builder.getOrCreate(), place).persist(StorageLevel.MEMORY_ONLY)
    stack.callback(table.unpersist, True)
    began = time.perf_counter()
    table.count()
    read_s = time.perf_counter() - began
    mllib.perceptron(table, warm, start, problem.features, read_s, bench.meter)
    return Loaded(problem, start, table=table, read_s=read_s)


def _measure(bench: Bench, cell: Cell, row: Row, loaded: Loaded) -> Row:
    problem = loaded.problem
    try:
        outcome = _run_arm(bench, cell, row.arm, row.repeat, loaded)
        weights = np.array(outcome.weights)
        loss = rows.objective(bench.context, bench.data[problem.name], cell, problem.real, weights)
    except Exception as error:
        return replace(row, error=" ".join(str(error).split())[:300] or type(error).__name__)
    best = bench.optima.get(cell.model)
    figures = {key: value for key, value in asdict(outcome).items() if key != "weights"}
    return replace(row, outcome=figures, loss=loss, gap=None if best is None else loss - best)


def _run_arm(bench: Bench, cell: Cell, arm: Arm, repeat: int, loaded: Loaded) -> Outcome:
    problem, seed = loaded.problem, bench.plan.seed + repeat
    if arm == "mllib":
        if loaded.points:
            outcome = mllib.regression(loaded.points, cell, loaded.read_s, bench.meter)
            if cell.is_stochastic:
                bench.parts.update(mllib.parts_of_a_mini_batch(bench.context))
            return outcome
        return mllib.perceptron(loaded.table, cell, loaded.start, problem.features, loaded.read_s, bench.meter)
    if arm in server.PROTOCOLS:
        output = bench.output / "training"
        # The perceptron starts where MLlib's does, so its seed is that of the weights.
        seed = bench.plan.seed if cell.model == "perceptron" else seed
        return server.run(cell, arm, bench.shards[problem.name], output, seed, problem.features, bench.meter)
    steps = averaging.LOCAL_STEPS if arm == "averaging" else 1
    data = bench.data[problem.name]
    return averaging.run(bench.context, data, cell, problem.real, loaded.start, seed, steps, bench.meter)


def _task_s(context: SparkContext) -> float:
    """What one task more costs a job: median over jobs of many empty tasks, less those of few."""

    def timed(tasks: int) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            assert context._jvm is not None
            context._jsc.parallelize(context._jvm.java.util.ArrayList(), tasks).count()
            times.append(time.perf_counter() - began)
        return float(np.median(times))

    few = context.defaultParallelism
    return max(0.0, timed(few + TASKS_TIMED) - timed(few)) / TASKS_TIMED


def machine(context: SparkContext) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    assert context._jvm is not None
    name = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": context._jvm.System.getProperty("java.version"),
        "master": context.master,
        "load_before": round(psutil.getloadavg()[0], 2),
        **{library: version(library) for library in LIBRARIES},
    }


def as_csv(measured: list[Row]) -> str:
    names = [field.name for field in fields(Outcome) if field.name != "weights"]
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["model", "rows", "batch", "length", "arm", "repeat", "error", "loss", "gap", *names])
    for row in measured:
        found = row.outcome or {}
        table.writerow([*row.key, row.error, row.loss, row.gap, *(found.get(name) for name in names)])
    return text.getvalue()


def _kept(output: Path, plan: Plan) -> dict[tuple[Any, ...], Row]:
    """Rows of an earlier start of the same plan. Raises UsageError where OUTPUT holds those of another."""
    output.mkdir(parents=True, exist_ok=True)
    mark = json.dumps(asdict(plan), sort_keys=True)
    path = output / ROWS_FILE
    if not path.exists():
        _write(path, mark + "\n")
        return {}
    first, *lines = path.read_text().splitlines()
    if first != mark:
        raise UsageError(f"{path} holds rows of another configuration; choose another --output, or --overwrite")
    found = [Row(**json.loads(line)) for line in lines if line.endswith("}")]
    return {row.key: row for row in found if not row.error}


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)


def clean(output: Path) -> None:
    """Remove the rows of an earlier run."""
    for name in (ROWS_FILE, JSON_FILE, CSV_FILE):
        (output / name).unlink(missing_ok=True)
