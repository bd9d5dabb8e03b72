"""How long a run on a Spark cluster takes to begin and to end, beside the same run on one host and an empty stage.

A standalone cluster of three workers, one core each, on this machine. Each kind of run takes its turn, several times."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clusters import ROOT, Standalone
from tests.clusters.cluster_runs import QUIET
from tests.clusters.submit import start_submit

TRAIN = ("--model", "cnn", "--protocol", "bsp", "--servers", 2, "--batch-size", 120, "--threads", 1, "--no-report")
EMPTY = """
from pyspark import SparkContext
context = SparkContext()
print(context.parallelize(range(3), 3).mapPartitions(lambda rows: rows).collect())
"""


def seconds(process: subprocess.Popen[str], output: Path) -> tuple[float, float]:
    """From its start to the first update and to the end of a process that trains. Raises SystemExit where it fails."""
    began, first = time.perf_counter(), 0.0
    pushes = output / "pushes.csv"
    while process.poll() is None:
        if not first and pushes.exists() and pushes.read_bytes().count(b"\n") > 1:
            first = time.perf_counter() - began
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"the run in {output} failed with exit code {process.returncode}")
    return first, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="runs of each kind (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, metavar="S", help="of each worker (default %(default)s)")
    args = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Standalone(workers=3) as cluster:
        root = Path(folder)
        _make_shards(root)
        (root / "empty.py").write_text(EMPTY)
        given = ("--shards", root / "shards", *TRAIN, "--steps", args.steps)
        with open(root / "log", "wb") as log:
            for turn in range(args.turns):
                here = [sys.executable, "-m", "trainer", "--output", root / f"here-{turn}", *given]
                process = subprocess.Popen(list(map(str, here)), cwd=ROOT, stdout=log, stderr=log, text=True)
                taken.setdefault("one host, no Spark", []).append(seconds(process, root / f"here-{turn}"))
                for hosts in (1, 3):
                    output = root / f"spark-{hosts}-{turn}"
                    job = start_submit(
                        ROOT / "jobs/train.py", *given, "--output", output, "--hosts", hosts,
                        master=cluster.master_url, env=QUIET, output=log,
                    )  # fmt: skip
                    name = f"Spark, {hosts} {'host' if hosts == 1 else 'hosts'}"
                    taken.setdefault(name, []).append(seconds(job, output))
                job = start_submit(root / "empty.py", master=cluster.master_url, env=QUIET, output=log)
                taken.setdefault("an empty stage of 3 tasks", []).append(seconds(job, root / "none"))
    print(table(taken))


def table(taken: dict[str, list[tuple[float, float]]]) -> str:
    """Medians, and the ratio of each to the first row's. Pure."""
    middle = {name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in taken.items()}
    base = next(iter(middle.values()))[1]
    lines = [f"{'':28}{'first update s':>16}{'end s':>8}{'of one host':>13}"]
    for name, (first, end) in middle.items():
        lines.append(f"{name:28}{f'{first:.1f}' if first else '-':>16}{end:>8.1f}{end / base:>13.2f}")
    return "\n".join(lines)


def _make_shards(root: Path) -> None:
    """Small ones, for three workers."""
    commands = (
        ("sample", "--to", root / "sample", "--rows", 3000, "--test-rows", 300),
        ("shard", "--strategy", "stratified", "--input", root / "sample", "--eval-input", root / "sample",
         "--output", root / "shards", "--workers", 3, "--no-report", "--quiet"),
    )  # fmt: skip
    for command in commands:
        subprocess.run(
            [sys.executable, "-m", "pipeline", *map(str, command)], cwd=ROOT, check=True, capture_output=True
        )


if __name__ == "__main__":
    main()
