"""``make bench-sharding``: the sharding phases beside scikit-learn's, in the same run, on the same files.

    python -m tests.bench_sharding [--data cifar-10-batches-bin] [--repeat 3] [--skip stock,scale,cold]

Without --data (or CIFAR10_DIR) 50,000 generated rows are used. Pairs alternate and medians of ratios are printed: on a
noisy machine ratios hold where seconds do not.

What the work is, for N rows of d = 3072 pixels, k = 50 components, c = 20 clusters:
  read        N * 3,073 bytes, three times (scan, Gram, projection and writing share one cache of the file system)
  Gram        N * d^2 flop (4.7e11 at 50,000: float32, one triangle); state 12 d^2 = 113 MB a task, 19 MB sent to the merge
  eigen       about 200 products with the d x d matrix, 75 MB each, one thread
  projection  2 * N * d * k flop in float64, twice (to fit, and again when the rows are written)
  k-means     2 * N * k * c flop an iteration; state N * k * 4 bytes (10 MB)
  write       N * 3,073 bytes once, hashed (sha256) on the way
The limit printed is that of the Gram: its flop at the rate this machine's ssyrk reaches alone, on the cores in use."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS, CLUSTERS, WORKERS, CORES = 50, 20, 12, 2
PHASES = ("read", "pca", "project", "kmeans", "assign", "write")


def scikit_learn(folder: Path, output: Path) -> dict[str, float]:
    """The same job in one process: read, exact PCA, k-means, assignment, twelve Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    from pipeline.input.records import binary_array

    seconds, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[name], began = now - began, now

    files = sorted(folder.glob("data_batch_*.bin"))
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    labels, images = records[:, 0].astype(np.int32), records[:, 1:]
    values = images.astype(np.float64)
    lap("read")
    pca = PCA(COMPONENTS, svd_solver="covariance_eigh").fit(values)
    lap("pca")
    points = pca.transform(values)
    lap("project")
    clusters = KMeans(CLUSTERS, n_init=1, max_iter=150, random_state=0).fit(points).labels_
    lap("kmeans")
    owner = np.empty(len(labels), np.int64)
    for cluster in range(CLUSTERS):
        rows = np.flatnonzero(clusters == cluster)
        owner[rows] = np.arange(len(rows)) % WORKERS
    lap("assign")
    for worker in range(WORKERS):
        rows = np.flatnonzero(owner == worker)
        table = pa.table({"id": rows, "label": labels[rows], "image": binary_array(images[rows])})
        (output / f"worker={worker:03d}").mkdir(parents=True)
        path = output / f"worker={worker:03d}" / "part.parquet"
        pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=1000)
    lap("write")
    return seconds


def ours(context, folder: Path, output: Path, name: str = "distribution_aware") -> dict[str, float]:
    """The job in a running session, without its report; scikit-learn's names for the phases."""
    from pipeline.runs.request import Request
    from pipeline.runs.shard import shard
    from pipeline.spark.progress import Progress
    from pipeline.strategies import STRATEGIES

    options = {"components": COMPONENTS, "whiten": False, "clusters": CLUSTERS} if name != "stratified" else {}
    progress = Progress(quiet=True)
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


def child(mode: str, folder: Path, output: Path) -> None:
    """What a fresh process runs."""
    if mode == "scikit-learn":
        scikit_learn(folder, output)
    elif mode == "memory":
        from pipeline.spark.session import spark_context

        with spark_context() as context:
            began = time.perf_counter()
            ours(context, folder, output)
            seconds = time.perf_counter() - began
        # Not getrusage: its peak is inherited from the process that started this one.
        status = Path("/proc/self/status").read_text()
        python = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        print(f"{seconds} {python}")


def fresh(*command: object, env: dict[str, str] | None = None) -> tuple[float, str]:
    """Seconds and output of a process, started from nothing."""
    began = time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def submit(folder: Path, output: Path) -> float:
    """A cold spark-submit of the job, set up as `. .venv/env.sh` does."""
    job = ROOT / "jobs" / "distribution_aware.py"
    flags = ["--components", COMPONENTS, "--no-whiten", "--clusters", CLUSTERS, "--workers", WORKERS, "--no-report"]
    env = {"SPARK_LOCAL_IP": "127.0.0.1"}
    master = ["--master", f"local[{CORES}]"]
    return fresh("spark-submit", *master, job, "--input", folder, "--output", output, *flags, env=env)[0]


def ssyrk_rate() -> float:
    """Flop a second of one core's float32 symmetric product, counting one triangle."""
    from scipy.linalg.blas import ssyrk
    from threadpoolctl import threadpool_limits

    block = np.asfortranarray(np.random.default_rng(0).integers(-128, 128, (3072, 2048)).astype(np.float32))
    target = np.zeros((3072, 3072), np.float32, order="F")
    with threadpool_limits(1, "blas"):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            ssyrk(1.0, block, beta=1.0, c=target, overwrite_c=1)
            times.append(time.perf_counter() - began)
    return 3072 * 3072 * 2048 / min(times)


def stock_seconds(context, folder: Path, rows: int) -> dict[str, float]:
    """Stock spark.ml PCA and k-means on the first rows of the set."""
    from pipeline.runs.request import Request
    from pipeline.runs.shard import shard
    from pipeline.spark.progress import Progress
    from pipeline.strategies import STRATEGIES

    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "part"
        part.mkdir()
        data = (folder / "data_batch_1.bin").read_bytes()[: rows * 3073]
        for piece in range(CORES):
            cut = rows // CORES
            (part / f"data_batch_{piece}.bin").write_bytes(data[piece * cut * 3073 : (piece + 1) * cut * 3073])
        progress = Progress(quiet=True)
        options = {"components": COMPONENTS, "whiten": False, "clusters": CLUSTERS, "engine": "spark-ml"}
        request = Request(input=str(part), output=f"{scratch}/out", num_workers=WORKERS)
        shard(context, request, STRATEGIES["distribution_aware"](**options), progress)
        return progress.seconds


def table(title: str, left: list[dict[str, float]], right: list[dict[str, float]]) -> tuple[float, float]:
    """Medians by phase and in all, with the median of the pairs' ratios."""
    print(f"\n{title}")
    print(f"  {'phase':<10}{'ours s':>9}{'sklearn s':>11}{'ratio':>8}")
    totals = [[sum(run.values()) for run in runs] for runs in (left, right)]
    for phase in PHASES:
        mine, theirs = (statistics.median(run[phase] for run in runs) for runs in (left, right))
        ratio = f"{mine / theirs:.2f}" if theirs > 0.005 else "-"
        print(f"  {phase:<10}{mine:>9.2f}{theirs:>11.2f}{ratio:>8}")
    ratios = [a / b for a, b in zip(*totals, strict=True)]
    mine, theirs = (statistics.median(total) for total in totals)
    print(f"  {'total':<10}{mine:>9.2f}{theirs:>11.2f}{statistics.median(ratios):>8.2f}   {spread(ratios)}")
    return mine, statistics.median(ratios)


def spread(values: list[float]) -> str:
    return f"(range {min(values):.2f} to {max(values):.2f}, n={len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("CIFAR10_DIR"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip", default="", help="any of cold, stock, scale")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        mode, folder, output = args.child
        child(mode, Path(folder), Path(output))
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        run_all(args, Path(scratch))


def run_all(args: argparse.Namespace, scratch: Path) -> None:
    from pyspark import SparkConf, SparkContext

    skip = args.skip.split(",")
    folder = args.data
    if folder is None:
        from pipeline.__main__ import main as command

        folder = scratch / "sample"
        command(["sample", "--to", str(folder), "--rows", "50000"])
        folder = next(folder.rglob("data_batch_1.bin")).parent
    numbers = iter(range(10_000))

    def output() -> Path:
        return scratch / f"out{next(numbers)}"

    memory = psutil.virtual_memory().total / 2**30
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(
        f"{platform.processor() or platform.machine()}, {CORES} of {os.cpu_count()} cores, {memory:.0f} GiB, {versions}"
    )
    print(f"{folder}: {COMPONENTS} components, {CLUSTERS} clusters, {WORKERS} workers")

    if "cold" not in skip:
        pairs = []
        for _ in range(args.repeat + 1):
            mine = submit(folder, output())
            theirs = fresh(sys.executable, "-m", "tests.bench_sharding", "--child", "scikit-learn", folder, output())[0]
            pairs.append((mine, theirs))
        pairs = pairs[1:]
        ratios = [a / b for a, b in pairs]
        print("\nwhole processes, cold: spark-submit beside python with scikit-learn")
        mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"  {mine:.1f} s / {theirs:.1f} s = {statistics.median(ratios):.2f} {spread(ratios)}   goal <= 1.2")

    os.environ["PYSPARK_PYTHON"] = sys.executable
    conf = SparkConf().setMaster(f"local[{CORES}]").setAppName("bench").set("spark.ui.enabled", "false")
    conf.set("spark.executorEnv.PYTHONPATH", str(ROOT)).set("spark.driver.memory", "4g")
    context = SparkContext(conf=conf)
    context.setLogLevel("ERROR")
    try:
        left: list[dict[str, float]] = []
        right: list[dict[str, float]] = []
        ours(context, folder, output())  # warms the session; not counted
        for _ in range(args.repeat):
            left.append(ours(context, folder, output()))
            right.append(scikit_learn(folder, output()))
        total, _ = table("warm session, by phase   goal <= 0.6 of scikit-learn's total", left, right)
        rows = sum(path.stat().st_size for path in folder.glob("data_batch_*.bin")) // 3073
        limit = rows * 3072**2 / (CORES * ssyrk_rate())
        pca = statistics.median(run["pca"] for run in left)
        print(f"  Gram alone at ssyrk speed on {CORES} cores: {limit:.2f} s; pca phase is {pca / limit:.1f}x that")

        stratified = [sum(ours(context, folder, output(), "stratified").values()) for _ in range(args.repeat)]
        print(f"\nstratified, warm: {statistics.median(stratified):.2f} s {spread(stratified)}   goal <= 3 s")

        if "stock" not in skip:
            small, large = stock_seconds(context, folder, 1000), stock_seconds(context, folder, 3000)
            estimate = sum(
                large[phase] + (large[phase] - small[phase]) / 2000 * (rows - 3000) for phase in ("pca", "kmeans")
            )
            print("\nstock spark.ml PCA and k-means, from 1,000 and 3,000 rows by a straight line in the rows")
            for name, found in (("1,000", small), ("3,000", large)):
                print(f"  {name} rows: pca {found['pca']:.1f} s, kmeans {found['kmeans']:.1f} s")
            print(
                f"  {rows:,} rows: {estimate:.0f} s; ours in all {total:.1f} s: {estimate / total:.0f}x   goal >= 20x"
            )
    finally:
        context.stop()

    if "scale" not in skip:
        tenfold = scratch / "tenfold"
        tenfold.mkdir()
        for copy in range(10):
            for path in sorted(folder.glob("data_batch_*.bin")):
                shutil.copy(path, tenfold / f"data_batch_{copy}_{path.name}")
        found = []
        for data in (folder, tenfold):
            run = fresh(sys.executable, "-m", "tests.bench_sharding", "--child", "memory", data, output())[1]
            found.append([float(value) for value in run.split()[-2:]])
        (seconds, memory_mb), (seconds10, memory10) = found
        print("\nten times the rows, each in a fresh session")
        print(f"  seconds {seconds:.1f} -> {seconds10:.1f}: {seconds10 / seconds:.1f}x   goal <= 10x")
        print(f"  peak driver process {memory_mb:.0f} -> {memory10:.0f} MB: {memory10 / memory_mb:.2f}x   goal <= 1.3x")


if __name__ == "__main__":
    main()
