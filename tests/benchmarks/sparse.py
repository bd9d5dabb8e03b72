"""Tiny groups of images far from all others, among more and more rows: how many does distribution_aware find and copy?

    python -m tests.benchmarks.sparse [--rows 20000,1000000] [--groups 20] [--away 1.0]

Rows of 3 x 8 x 8 pixels: smooth images of a dozen kinds with noise, and groups of 1 to 12 rows around one random pattern of
light and dark each. --away: the contrast of the patterns. The whole job runs, from CIFAR binary to committed shards, with 60
clusters, 40 components and 12 workers. A group is found if all of its rows are in sparse neighbourhoods."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas
from pyspark.sql import SparkSession

import pipeline
from pipeline.core.arrays import Ints
from pipeline.core.reporting.tables import table
from pipeline.strategies.distribution_aware import DistributionAware

SIDE, PIXELS, KINDS, WORKERS = 8, 192, 12, 12
BLOCK_ROWS = 100_000


def ordinary(rng: np.random.Generator, rows: int, bases: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Images of the kinds: each a smooth pattern, varied along a few smooth directions, with noise."""
    kinds, directions = bases[:KINDS], bases[KINDS:]
    amounts = rng.normal(0, 8, (rows, len(directions))).astype(np.float32) / np.sqrt(1 + np.arange(len(directions)))
    images = 128 + 60 * kinds[rng.integers(0, KINDS, rows)] + amounts.astype(np.float32) @ directions
    images += rng.normal(0, 6, images.shape).astype(np.float32)
    return np.asarray(np.clip(images, 0, 255), np.uint8)


def smooth_patterns(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """Low frequencies, scaled to a standard deviation of 1: float32 [count, pixels]."""
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    waves = [np.cos(np.pi * (x * i + y * j) / SIDE) for i in range(3) for j in range(3)]
    mixed = rng.normal(size=(count, 3, len(waves))) @ np.array(waves).reshape(len(waves), -1)
    flat = mixed.reshape(count, PIXELS)
    return np.asarray(flat / flat.std(axis=1, keepdims=True), np.float32)


def generate(folder: Path, rows: int, groups: int, away: float, seed: int = 0) -> list[Ints]:
    """Write CIFAR binary; the ids of each group."""
    rng = np.random.default_rng(seed)
    bases = smooth_patterns(rng, KINDS + 16)
    sizes = 1 + rng.permutation(np.arange(groups) % 12)
    places = rng.choice(rows, sizes.sum(), replace=False)
    ids = np.split(places, np.cumsum(sizes)[:-1])
    patterns = 128 + away * 127 * (2 * rng.integers(0, 2, (groups, PIXELS)) - 1)
    of = np.repeat(np.arange(groups), sizes)
    folder.mkdir(parents=True)
    with open(folder / "data_batch_1.bin", "wb") as file:
        for low in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - low)
            records = np.empty((count, 1 + PIXELS), np.uint8)
            records[:, 0] = rng.integers(0, 10, count)
            records[:, 1:] = ordinary(rng, count, bases)
            here = np.flatnonzero((places >= low) & (places < low + count))
            noisy = patterns[of[here]] + rng.normal(0, 4, (len(here), PIXELS))
            records[places[here] - low, 1:] = np.clip(noisy, 0, 255)
            file.write(records.tobytes())
    return ids


def measure(spark: SparkSession, folder: Path, rows: int, groups: int, away: float) -> tuple[str, ...]:
    planted = generate(folder / "in", rows, groups, away)
    strategy = DistributionAware(preset="plain", components=40.0, clusters=60)
    began = time.perf_counter()
    result = pipeline.shard(
        spark,
        input=str(folder / "in"),
        output=str(folder / "out"),
        strategy=strategy,
        num_workers=WORKERS,
        format="cifar10-binary",
        image_shape=(3, SIDE, SIDE),
        report=False,
        quiet=True,
    )
    seconds = time.perf_counter() - began
    manifest = result.shards.manifest.to_json()
    sparse = [index for index, near in enumerate(manifest["neighbourhoods"]) if near["sparse"]]
    first = pandas.read_parquet(folder / "out" / "worker=000", columns=["id", "neighbourhood"])
    copied = set(first[first.neighbourhood.isin(sparse)].id)
    found = sum(copied.issuperset(ids) for ids in planted)
    wanted = set(np.concatenate(planted))
    shutil.rmtree(folder)
    cells = (f"{rows:,}", f"{found} of {groups}", f"{len(copied & wanted)} of {len(wanted)}", len(copied - wanted))
    return (*map(str, cells), str(manifest["params"].get("far_groups", "")), f"{seconds:.1f}")


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="20000,1000000", help="numbers of rows (default %(default)s)")
    parser.add_argument("--groups", type=int, default=20, help="planted groups (default %(default)s)")
    parser.add_argument("--away", type=float, default=1.0, help="contrast of their patterns (default %(default)s)")
    args = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    scratch = Path(tempfile.mkdtemp(prefix="bench-sparse-"))
    lines = []
    for rows in map(int, map(float, args.rows.split(","))):
        lines.append(measure(spark, scratch / str(rows), rows, args.groups, args.away))
    header = ("rows", "groups found", "of their rows copied", "ordinary rows copied", "far groups", "seconds")
    print(table(lines, header, right=range(len(header))))
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
