"""``make bench-sharding``: sharding by neighbourhoods beside scikit-learn, in the same run, on the same files.

    python -m tests.benchmarks.sharding [--data FOLDER] [--repeat 3] [--skip stock,scale]

FOLDER is CIFAR-10 or CIFAR-100, binary or pickle; without it (or CIFAR10_DIR) 50,000 generated rows are used. All sides take
turns and medians of ratios are printed: on a noisy machine ratios hold where seconds do not. Beside scikit-learn's fastest
way that a user would pick, and its exact one (see sklearn_sharding.py).

What the work is, for N rows of d = 3072 pixels, n of them drawn to be fitted to, k = 50 components, c = 20 clusters:
  read        N * 3,073 bytes in each of four passes (scan, Gram, projection, write)
  Gram        n * d^2 flop (9.4e10 at 10,000: float32, one triangle); 12 d^2 = 113 MB a task, 19 MB sent to the merge
  eigen       about 150 products with one triangle of d x d, 38 MB each, one thread
  projection  2 * N * d * k flop in float64, once
  k-means     2 * N * k * c flop an iteration at most, a quarter of it in the end; one core; 10 MB of points
  write       N * 3,073 bytes once, hashed (sha256) on the way
The floor of a cold run is that of an empty spark-submit, which is printed: JVM, context, Python workers, and their end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyspark import SparkConf, SparkContext

from pipeline.clustering.similarity import similarities
from pipeline.core.reporting.tables import table
from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from tests.benchmarks.sklearn_sharding import CLUSTERS, COMPONENTS, PIXELS, WORKERS, read

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
PHASES = ("read", "pca", "project", "kmeans", "assign", "write")
Phases = dict[str, float]
EMPTY = """
from pipeline.spark.session import spark_context
with spark_context() as context:
    context.parallelize([1, 2], 2).map(lambda value: value).collect()
"""


def ours(context: SparkContext, folder: Path, output: Path, name: str = "distribution_aware", **options: Any) -> Phases:
    """The job in a running session, without its report; scikit-learn's names for the phases."""
    from pipeline.runs.request import Request
    from pipeline.runs.shard import shard
    from pipeline.spark.progress import PhaseLog
    from pipeline.strategies import STRATEGIES

    if name != "stratified":
        options = {"components": float(COMPONENTS), "whiten": False, "clusters": CLUSTERS, **options}
    progress = PhaseLog(quiet=True)
    request = Request(input=str(folder), output=str(output), num_workers=WORKERS)
    began = time.perf_counter()
    outcome = shard(context, request, STRATEGIES[name](**options), progress)
    total = time.perf_counter() - began
    assert outcome.fresh
    found = progress.seconds
    seconds = {phase: found.get(phase, 0.0) for phase in PHASES}
    seconds["read"] = found["discover"] + found["scan"]
    seconds["write"] = total - sum(value for phase, value in seconds.items() if phase != "write")
    return seconds


def fresh(*command: object) -> tuple[float, str]:
    """Seconds and output of a process, started from nothing."""
    began = time.perf_counter()
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def submit(folder: Path, output: Path, *more: str) -> float:
    """A cold spark-submit of the job, set up as `. .venv/env.sh` does."""
    job = ROOT / "jobs" / "distribution_aware.py"
    flags = ["--components", COMPONENTS, "--no-whiten", "--clusters", CLUSTERS, "--workers", WORKERS, *more]
    master = ["--master", f"local[{CORES}]"]
    return fresh("spark-submit", *master, job, "--input", folder, "--output", output, *flags)[0]


def scikit_learn(way: str, folder: Path, output: Path) -> tuple[float, Phases]:
    """Seconds of the whole process, and of its phases."""
    seconds, printed = fresh(sys.executable, "-m", "tests.benchmarks.sklearn_sharding", way, folder, output)
    return seconds, json.loads(printed)


def ssyrk_rate() -> float:
    """Flop a second of one core's float32 symmetric product, counting one triangle."""
    from scipy.linalg.blas import ssyrk
    from threadpoolctl import threadpool_limits

    block = np.asfortranarray(np.random.default_rng(0).integers(-128, 128, (PIXELS, 2048)).astype(np.float32))
    target = np.zeros((PIXELS, PIXELS), np.float32, order="F")
    with threadpool_limits(1, "blas"):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            ssyrk(1.0, block, beta=1.0, c=target, overwrite_c=1)
            times.append(time.perf_counter() - began)
    return PIXELS * PIXELS * 2048 / min(times)


def write_binary(folder: Path, images: np.ndarray[Any, Any], files: int = 1) -> Path:
    """Images as CIFAR-10 binary files, without labels."""
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(images, files)):
        records = np.concatenate([np.zeros((len(part), 1), np.uint8), part], axis=1)
        (folder / f"data_batch_{number}.bin").write_bytes(records.tobytes())
    return folder


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the pairs' ratios, and their range."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} (range {min(ratios):.2f} to {max(ratios):.2f}, n={len(ratios)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("CIFAR10_DIR"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip", default="", help="any of stock, scale")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print_memory(*map(Path, args.memory))
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        run_all(args, Path(scratch))


def run_all(args: argparse.Namespace, scratch: Path) -> None:
    """Every part that is not skipped, each with its goal."""
    skip = args.skip.split(",")
    folder = args.data or generate_rows(scratch)
    numbers = iter(range(10_000))

    def output() -> Path:
        return scratch / f"out{next(numbers)}"

    rows = print_machine(folder)
    context = session()
    try:
        warm = compare(context, folder, output, args.repeat, scratch)
        print_limit(rows, warm)
        stratified = [sum(ours(context, folder, output(), "stratified").values()) for _ in range(args.repeat)]
        print(f"\nstratified, warm: {statistics.median(stratified):.2f} s   goal <= 3 s")
        print_submodular(context, folder, output)
        print_hash(context, folder, output, rows)
        if "stock" not in skip:
            estimate_stock(context, folder, rows, scratch, statistics.median(sum(run.values()) for run in warm))
    finally:
        context.stop()
    if "scale" not in skip:
        compare_sizes(folder, scratch, output)


def session() -> SparkContext:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = SparkConf().setMaster(f"local[{CORES}]").setAppName("bench").set("spark.ui.enabled", "false")
    conf.set("spark.executorEnv.PYTHONPATH", str(ROOT)).set("spark.driver.memory", "4g")
    conf.set("spark.ui.showConsoleProgress", "false")
    context = SparkContext(conf=conf)
    context.setLogLevel("ERROR")
    return context


def generate_rows(scratch: Path) -> Path:
    """A folder of 50,000 generated rows."""
    from pipeline.datasets.synthetic import SampleSpec, files_of, write

    write(files_of(SampleSpec(rows=50_000)), scratch / "sample")
    return next((scratch / "sample").rglob("data_batch_1.bin")).parent


def print_machine(folder: Path) -> int:
    """Returns the number of rows."""
    dataset = discover(Store(), str(folder), run=serial)
    memory = psutil.virtual_memory().total / 2**30
    processor = platform.processor() or platform.machine()
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{processor}, {CORES} of {os.cpu_count()} cores, {memory:.0f} GiB, {versions}")
    print(
        f"{folder}: {dataset.rows:,} rows, {dataset.format}; {COMPONENTS} components, {CLUSTERS} clusters, {WORKERS} workers"
    )
    return dataset.rows


def compare(
    context: SparkContext, folder: Path, output: Callable[[], Path], repeat: int, scratch: Path
) -> list[Phases]:
    """Whole processes and the phases of a warm session, in turns; the first turn warms and is not counted. Returns the
    phases of ours, warm."""
    (scratch / "empty.py").write_text(EMPTY)
    cold, bare, floor, warm, every = [], [], [], [], []
    peers: dict[str, list[tuple[float, Phases]]] = {"fastest": [], "exact": []}
    for _ in range(repeat + 1):
        cold.append(submit(folder, output()))
        bare.append(submit(folder, output(), "--no-report"))
        warm.append(ours(context, folder, output()))
        every.append(sum(ours(context, folder, output(), fit_rows="all").values()))
        for way, runs in peers.items():
            runs.append(scikit_learn(way, folder, output()))
        floor.append(fresh("spark-submit", "--master", f"local[{CORES}]", scratch / "empty.py")[0])
    del cold[0], bare[0], floor[0], warm[0], every[0], peers["fastest"][0], peers["exact"][0]
    whole = {way: [seconds for seconds, _ in runs] for way, runs in peers.items()}
    total = [sum(run.values()) for run in warm]
    print("\nwhole processes, cold")
    cells = [
        ("spark-submit, with its report", cold),
        ("spark-submit --no-report", bare),
        ("an empty spark-submit", floor),
        ("warm session, no report", total),
        ("warm session, --fit-rows all", every),
        ("scikit-learn, fastest", whole["fastest"]),
        ("scikit-learn, exact", whole["exact"]),
    ]
    lines = [
        (name, f"{statistics.median(runs):.1f}", *(ratio(runs, whole[way]) for way in peers)) for name, runs in cells
    ]
    print(table(lines, ("", "s", "beside its fastest", "beside its exact way"), right=(1,), indent="  "))
    print("  goals: 1.3 of its fastest, cold with the report; 0.5, warm")
    print("\nwarm session, by phase; scikit-learn without its start")
    sides = [warm, *([phases for _, phases in runs] for runs in peers.values())]
    medians = [[statistics.median(run[phase] for run in side) for side in sides] for phase in PHASES]
    phases = [(phase, *(f"{value:.2f}" for value in row)) for phase, row in zip(PHASES, medians, strict=True)]
    sums = [[sum(run.values()) for run in side] for side in sides]
    phases.append(("in all", *(f"{statistics.median(side):.2f}" for side in sums)))
    phases.append(("ratio", "", *(ratio(sums[0], side) for side in sums[1:])))
    print(table(phases, ("phase", "ours s", "fastest s", "exact s"), right=(1, 2, 3), indent="  "))
    return warm


def print_submodular(context: SparkContext, folder: Path, output: Callable[[], Path]) -> None:
    """Both functions over 8 workers, warm; a class by plain greedy, beside other packages'."""
    from pipeline.runs.request import Request
    from pipeline.runs.shard import shard
    from pipeline.spark.progress import PhaseLog
    from pipeline.strategies.submodular import Submodular
    from tests.benchmarks.submodular import print_peers
    from tests.unit.test_submodular import class_points

    print("\nsubmodular, 8 workers, warm")
    for function, goal in (("graph-cut", 20), ("facility-location", 90)):
        progress, request = PhaseLog(quiet=True), Request(str(folder), str(output()), 8)
        began = time.perf_counter()
        shard(context, request, Submodular(function=function), progress)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        print(f"  {function}: {seconds:.1f} s, blocks {progress.seconds['blocks']:.1f} s   goal <= {goal} s")
    labels, images = read(folder)
    print_peers(similarities(class_points(images[labels == np.bincount(labels).argmax()][:5000])))


def print_hash(context: SparkContext, folder: Path, output: Callable[[], Path], rows: int) -> None:
    """Every family, warm."""
    from pipeline.runs.request import Request
    from pipeline.runs.shard import shard
    from pipeline.spark.progress import PhaseLog
    from pipeline.strategies.hash import Hash

    print(f"\nhash, {WORKERS} workers, warm")
    for family in ("lsh", "sign", "dsh"):
        progress, request = PhaseLog(quiet=True), Request(str(folder), str(output()), WORKERS)
        began = time.perf_counter()
        found = shard(context, request, Hash(family=family, sparse_if="never"), progress)
        seconds, taken = time.perf_counter() - began, progress.seconds
        hashed = taken["hash"] + taken["buckets"] + taken["assign"]
        buckets = f"{len(found.shards.manifest.neighbourhoods or ()):,} buckets"
        print(
            f"  {family}: {seconds:.1f} s, functions {taken['functions']:.1f} s, {rows / hashed:,.0f} rows/s; {buckets}"
        )


def print_limit(rows: int, warm: list[Phases]) -> None:
    from pipeline.clustering.gram import rows_to_fit

    fitted = rows_to_fit("auto", rows, PIXELS)
    limit = fitted * PIXELS**2 / (CORES * ssyrk_rate())
    pca = statistics.median(run["pca"] for run in warm)
    print(
        f"  Gram of {fitted:,} rows at ssyrk speed on {CORES} cores: {limit:.2f} s; pca phase is {pca / limit:.1f}x that"
    )


def estimate_stock(context: SparkContext, folder: Path, rows: int, scratch: Path, total: float) -> None:
    """Stock spark.ml on all rows, by a straight line through two small numbers of them, beside ours in all."""
    images = read(folder)[1]

    def seconds(few: int) -> Phases:
        part = write_binary(scratch / f"stock{few}", images[:few], CORES)
        return ours(context, part, scratch / f"stock{few}-out", engine="spark-ml")

    small, large = seconds(1000), seconds(3000)
    estimate = sum(large[phase] + (large[phase] - small[phase]) / 2000 * (rows - 3000) for phase in ("pca", "kmeans"))
    print("\nstock spark.ml PCA and k-means, from 1,000 and 3,000 rows by a straight line in the rows")
    for name, found in (("1,000", small), ("3,000", large)):
        print(f"  {name} rows: pca {found['pca']:.1f} s, kmeans {found['kmeans']:.1f} s")
    print(f"  {rows:,} rows: {estimate:.0f} s; ours in all {total:.1f} s: {estimate / total:.0f}x   goal >= 20x")


def print_memory(folder: Path, output: Path) -> None:
    """What a fresh process of ``compare_sizes`` runs."""
    from pipeline.spark.session import spark_context

    with spark_context() as context:
        began = time.perf_counter()
        ours(context, folder, output)
        seconds = time.perf_counter() - began
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    python = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(f"{seconds} {python}")


def compare_sizes(folder: Path, scratch: Path, output: Callable[[], Path]) -> None:
    """Seconds and the driver's peak memory on the rows and on ten copies of them, each in a process of its own."""
    images = read(folder)[1]
    once, tenfold = write_binary(scratch / "once", images), scratch / "tenfold"
    tenfold.mkdir()
    for copy in range(10):
        shutil.copy(once / "data_batch_0.bin", tenfold / f"data_batch_{copy}.bin")
    measured: list[list[float]] = []
    for data in (once, tenfold):
        printed = fresh(sys.executable, "-m", "tests.benchmarks.sharding", "--memory", data, output())[1]
        measured.append([float(value) for value in printed.split()[-2:]])
    (seconds, memory), (seconds10, memory10) = measured
    print("\nten times the rows, each in a fresh session")
    print(f"  seconds {seconds:.1f} -> {seconds10:.1f}: {seconds10 / seconds:.1f}x   goal <= 10x")
    print(f"  peak driver process {memory:.0f} -> {memory10:.0f} MB: {memory10 / memory:.2f}x   goal <= 1.3x")


if __name__ == "__main__":
    main()
