"""A run whose folder is on HDFS beside the same run in a local folder: images a second, and operations.

``python -m tests.benchmarks.homes`` starts a NameNode and three DataNodes, and lets the two take turns. Operations are those
that the NameNode counted, over minutes that begin after the first checkpoint."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.core.storage.store import Store
from tests.benchmarks.throughput import ROOT, images_per_s
from tests.clusters.hdfs import Hdfs
from tests.clusters.servers import jmx_bean
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.checkpoints.read import whole
from trainer.home.place import Place, place_of
from trainer.run_files import CHECKPOINTS
from trainer.runlog.result import read_result

WORKERS, ROWS, BATCH = 2, 2000, 128
OPERATIONS = ("CreateFileOps", "FilesRenamed", "DeleteFileOps", "GetListingOps", "FileInfoOps", "GetBlockLocations")
EVERYTHING = "TotalFileOps"  # blocks and the ends of files too


def counted(http_port: int) -> dict[str, int]:
    bean = jmx_bean(http_port, "service=NameNode,name=NameNodeActivity")
    return {name: int(bean[name]) for name in (*OPERATIONS, EVERYTHING)}


def run(shards: Path, output: str, steps: int, every_s: float, hdfs: Hdfs | None) -> tuple[float, dict[str, float]]:
    """Images a second, and operations a second of the NameNode."""
    command = [
        sys.executable,
        "-m",
        "trainer",
        "--shards",
        shards,
        "--output",
        output,
        "--model",
        "cnn",
        "--steps",
        steps,
    ]
    command += [
        "--checkpoint-every-s",
        every_s,
        "--no-epoch-checkpoints",
        "--learning-rate",
        0.001,
        "--batch-size",
        BATCH,
    ]
    command += ["--protocol", "asp", "--servers", 2, "--threads", 1, "--no-report", "--quiet"]
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdout=subprocess.DEVNULL)
    rates = operations(process, place_of(output), every_s, hdfs) if hdfs else {}
    assert process.wait() == 0
    return images_per_s(read_result(place_of(output)).pushes()), rates


def operations(process: subprocess.Popen[bytes], home: Place, every_s: float, hdfs: Hdfs) -> dict[str, float]:
    """By name, a second, over whole intervals between checkpoints."""
    while len(whole(home / CHECKPOINTS)) < 2 and process.poll() is None:
        time.sleep(5)
    time.sleep(5)
    begun, first, last, seconds = time.monotonic(), counted(hdfs.http_port), counted(hdfs.http_port), 0.0
    while process.poll() is None:
        time.sleep(every_s)
        if process.poll() is None:
            last, seconds = counted(hdfs.http_port), time.monotonic() - begun
    return {name: (last[name] - first[name]) / seconds for name in last} if seconds else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="mini-batches of each worker")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=60.0, help="between checkpoints")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Hdfs() as hdfs:
        shards = write_shards(Path(scratch), [rows_of(ROWS, at, at * ROWS) for at in range(WORKERS)], EVAL_ROWS)
        speeds = []
        for pair in range(args.pairs):
            local = run(shards, f"{scratch}/run-{pair}", args.steps, args.every_s, None)
            far = run(shards, f"{hdfs.uri}/run-{pair}", args.steps, args.every_s, hdfs)
            speeds.append(far[0] / local[0])
            print(f"images a second: local {local[0]:,.0f}, HDFS {far[0]:,.0f} ({speeds[-1]:.3f} of it)", flush=True)
            rates = far[1]
            if rates:
                asked = sum(rates[name] for name in OPERATIONS)
                shown = ", ".join(f"{name} {rates[name]:.2f}" for name in OPERATIONS)
                print(f"operations a second: {asked:.2f} ({shown}); with blocks {rates[EVERYTHING]:.2f}", flush=True)
            Store().delete(f"{hdfs.uri}/run-{pair}")
        print(f"median of {args.pairs}: images a second {statistics.median(speeds):.3f} of local", flush=True)


if __name__ == "__main__":
    main()
