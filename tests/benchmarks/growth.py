"""Time and driver memory of a whole sharding job as its rows, workers or clusters grow.

    python -m tests.benchmarks.growth [--axis rows,workers,clusters] [--rows 1e5,1e6,1e7] [--output hdfs://HOST/FOLDER]

Each job is a spark-submit of distribution_aware in a new process, with its report, on rows of 3 x 8 x 8 pixels. The other
two numbers keep the first value of their list. A slope of 1 means that twice the number takes twice the time; n log n has
1.1 between 10^5 and 10^7. Memory is the peak of resident memory of the driver's Python and of its JVM, in MB. After the
last number of workers, the same command runs again, which finds the committed set, and one shard is read."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.core.reporting.tables import table
from pipeline.core.storage.store import Store
from tests.benchmarks.machine import print_machine
from tests.benchmarks.sparse import generate
from tests.clusters.machine import ROOT

AXES = {"rows": "1e5,1e6,1e7", "workers": "12,100,1000,10000", "clusters": "20,100,1000,10000"}
PHASES = ("scan", "pca", "project", "kmeans", "assign", "write", "commit", "report")
LOOK_EVERY_S = 0.1


class Job(NamedTuple):
    """The measurement of a job: seconds of its process, seconds by phase, and peak memory in MB."""

    seconds: float
    phases: dict[str, float]
    python_mb: float
    jvm_mb: float


def peaks_mb(pid: int) -> dict[str, float]:
    """Return the peaks of resident memory of a driver's JVM and of its Python, as far as they run.

    pid: of spark-submit, which becomes the JVM. Python is its child; Python workers are children of a daemon."""
    found = {"java": peak_mb(pid)}
    with suppress(psutil.Error):  # a process may end meanwhile
        for child in psutil.Process(pid).children():
            # Helpers that the JVM has started and not waited for are zombies, without a command line.
            if child.status() != psutil.STATUS_ZOMBIE and "distribution_aware.py" in " ".join(child.cmdline()):
                found["python"] = max(found.get("python", 0.0), peak_mb(child.pid))
    return found


def peak_mb(pid: int) -> float:
    """Return the peak of the resident memory of a process, 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int(status.partition("VmHWM:")[2].partition("kB")[0] or 0) / 1024


def run(source: Path, output: str, workers: int, clusters: int) -> Job:
    """Run a job to its end. Raises SystemExit with its error line if it fails."""
    flags: list[object] = ["--input", source, "--image-shape", "3x8x8", "--output", output, "--workers", workers]
    flags += ["--clusters", clusters, "--components", 40, "--sparse-if", "never", "--start", "carry"]
    command = ["spark-submit", str(ROOT / "jobs" / "distribution_aware.py"), *map(str, flags)]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"PYTHONPATH": str(ROOT)})
        peaks = {"java": 0.0, "python": 0.0}
        while job.poll() is None:
            for name, peak in peaks_mb(job.pid).items():
                peaks[name] = max(peaks[name], peak)
            time.sleep(LOOK_EVERY_S)
        seconds = time.perf_counter() - began
        said.seek(0)
        text = said.read()
    if job.returncode:
        raise SystemExit(f"the job failed:\n{text[-2000:]}")
    phases: dict[str, float] = {}
    for line in text.splitlines():
        words = line.partition("] ")[2].split()
        if len(words) > 2 and words[0] in PHASES and words[2] == "s":
            phases[words[0]] = float(words[1])
    return Job(seconds, phases, peaks["python"], peaks["java"])


def slope(before: tuple[int, float], after: tuple[int, float]) -> str:
    """Return the exponent b of seconds = a * number^b through two points (number, seconds)."""
    return f"{math.log(after[1] / before[1]) / math.log(after[0] / before[0]):.2f}"


def measure(axis: str, numbers: dict[str, list[int]], scratch: Path, output: str) -> None:
    """Run a job for each value of an axis, and print a line for each, with the slopes from the line before."""
    lines = []
    earlier: tuple[int, Job] | None = None
    for value in numbers[axis]:
        now = {name: values[0] for name, values in numbers.items()} | {axis: value}
        source = scratch / f"rows{now['rows']}"
        if not source.exists():
            generate(source, now["rows"], groups=20, away=1.0)
        place = f"{output}/{axis}-{value}"
        try:
            job = run(source, place, now["workers"], now["clusters"])
            if axis == "workers" and value == numbers[axis][-1]:
                print_again(source, place, now["workers"], now["clusters"])
        finally:
            if Store().exists(place):
                Store().delete(place)
        slopes = ["", ""]
        if earlier:
            slopes = [slope((earlier[0], earlier[1].seconds), (value, job.seconds))]
            mine, its = (sum(each.phases.values()) for each in (job, earlier[1]))
            slopes.append(slope((earlier[0], its), (value, mine)))
        phases = [f"{job.phases.get(phase, 0):.1f}" for phase in PHASES]
        lines.append(
            (f"{value:,}", f"{job.seconds:.1f}", *slopes, *phases, f"{job.python_mb:.0f}", f"{job.jvm_mb:.0f}")
        )
        print(f"{axis} {value:,}: {job.seconds:.1f} s", flush=True)
        earlier = value, job
    fixed = ", ".join(f"{values[0]:,} {name}" for name, values in numbers.items() if name != axis)
    heads = (axis, "seconds", "slope", "of phases", *PHASES, "Python MB", "JVM MB")
    print(f"\n{axis}, with {fixed}")
    print(table(lines, heads, right=range(len(heads)), indent="  "), end="\n\n", flush=True)


def print_again(source: Path, place: str, workers: int, clusters: int) -> None:
    """Print how long the same command takes on the committed set, and how many files a reader of one shard opens."""
    from trainer import torch_dataset
    from trainer.data.opening import open_shards

    again = run(source, place, workers, clusters)
    opened: list[str] = []
    sys.addaudithook(lambda event, of: opened.append(str(of[0])) if event == "open" else None)
    began = time.perf_counter()
    shards = open_shards(place)
    seconds = time.perf_counter() - began
    opened.clear()
    torch_dataset(place, worker=0)[0]
    files = sum(path.startswith(place) for path in opened)
    print(
        f"the same command again: {again.seconds:.1f} s; {shards.num_workers:,} workers open in {seconds:.1f} s;",
        end=" ",
    )
    print(
        f"a reader of one shard opens {files} files"
        if files
        else "files that a reader opens are counted on a local disk"
    )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", default=",".join(AXES), help="numbers that grow (default %(default)s)")
    for name, values in AXES.items():
        parser.add_argument(f"--{name}", default=values, help=f"values of {name}, ascending (default %(default)s)")
    parser.add_argument("--output", help="folder of the sets, local, hdfs:// or s3:// (default: a temporary one)")
    args = parser.parse_args()
    numbers = {name: [int(float(value)) for value in getattr(args, name).split(",")] for name in AXES}
    print_machine()
    scratch = Path(tempfile.mkdtemp(prefix="bench-growth-"))
    try:
        for axis in args.axis.split(","):
            measure(axis, numbers, scratch, args.output or str(scratch / "sets"))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
