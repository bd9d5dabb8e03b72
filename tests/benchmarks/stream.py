"""Rows a second of jobs/hash_stream.py beside jobs/hash.py: ``python -m tests.benchmarks.stream --rows 1e6 --batches 10``.

The same rows of 3x8x8, with the same family and number of functions: as a stream in so many batches, each a generation, and
at once. A session that is warm; files on a local disk; without reports. --generations G times single commits of a set that
has up to G generations of a thousand rows: what the growing manifest costs."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from pipeline.core.shardset.manifest import open_committed
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.strategies.hash import Hash
from tests.conftest import make_rows
from tests.support.places import STORE
from tests.support.stream_runs import SHAPE, take

PIECE = 100_000


def write_rows(folder: Path, rows: int, files: int) -> list[Path]:
    """So many rows of 3x8x8 in files of equal length."""
    folder.mkdir(parents=True)
    made = []
    for number in range(files):
        path = folder / f"part-{number:05d}.bin"
        with path.open("wb") as file:
            left, seed = rows // files, number * 1000
            while left:
                count = min(left, PIECE)
                labels, images = make_rows(count, seed=seed, pixels=192)
                file.write(np.concatenate([labels[:, None], images], axis=1).tobytes())
                left, seed = left - count, seed + 1
        made.append(path)
    return made


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stream", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=float, default=1e6)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--family", default="lsh")
    parser.add_argument("--functions", type=int, default=8)
    parser.add_argument("--generations", type=int, default=0, metavar="G")
    args = parser.parse_args(argv)
    strategy = Hash(family=args.family, functions=args.functions)
    with tempfile.TemporaryDirectory() as scratch, spark_context() as context:
        root = Path(scratch)
        if args.generations:
            return grow(context, root, args.generations, args.workers, strategy)
        files = write_rows(root / "in", int(args.rows), args.batches)
        take(context, root / "warm", 0, files[:1], args.workers, strategy=strategy)
        began, spent = time.monotonic(), []
        for batch, file in enumerate(files):
            done = take(context, root / "set", batch, [file], args.workers, strategy=strategy)
            spent.append(done.seconds)
        streamed = time.monotonic() - began
        shards = open_committed(STORE, str(root / "set"))
        sizes = [entry["size"] for entry in shards.manifest.to_json()["neighbourhoods"]]
        began = time.monotonic()
        request = Request(
            str(root / "in"), str(root / "batch"), args.workers, read_options=ReadOptions("cifar10-binary", SHAPE)
        )
        shard(context, request, strategy, PhaseLog(quiet=True))
        at_once = time.monotonic() - began
    rows = int(args.rows)
    print(f"{rows:,} rows of 3x8x8, {args.family}, {args.functions} functions, {args.workers} workers")
    print(f"stream, {args.batches} batches: {streamed:.1f} s, {rows / streamed:,.0f} rows a second")
    print(f"  a generation {min(spent):.2f} to {max(spent):.2f} s; {shards.manifest.copies:,} copies")
    state = shards.manifest.to_json()["stream"]["state_bytes"]
    print(f"  {len(sizes):,} buckets, the largest of {max(sizes):,} rows; state {state:,} bytes")
    print(f"at once (jobs/hash.py): {at_once:.1f} s, {rows / at_once:,.0f} rows a second")
    return 0


def grow(context: object, root: Path, count: int, workers: int, strategy: Hash) -> int:
    files = write_rows(root / "in", 1000 * count, count)
    for batch, file in enumerate(files):
        done = take(context, root / "set", batch, [file], workers, strategy=strategy)  # type: ignore[arg-type]
        if batch + 1 in (2, count // 4, count // 2, count):
            size = (root / "set" / "manifest.json").stat().st_size
            print(f"generation {batch + 1:,}: {done.seconds:.2f} s, manifest of {size / 1e6:.2f} MB", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
