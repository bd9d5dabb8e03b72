"""The engines of distribution_aware side by side on the same rows.

    python -m tests.benchmarks.engines --data FOLDER [--components 50] [--clusters 20] [--whiten] [--engines block,spark-ml]

FOLDER is CIFAR-10 or CIFAR-100 in any layout (or CIFAR10_DIR). One warm local session of two cores. Per engine: seconds of
the whole job without its report and of its fit; the inertia per row; the smallest and the largest neighbourhood, and the
sparse ones for 12 workers; how well the neighbourhoods agree with those of scikit-learn (adjusted Rand index)."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from sklearn.metrics import adjusted_rand_score

from pipeline.core.arrays import Ints
from pipeline.core.reporting.tables import table
from pipeline.core.shardset.manifest import ShardSet
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.engines import ENGINES

WORKERS = 12
FIT = ("pca", "project", "kmeans", "scikit-learn")


def groups_of(shards: ShardSet) -> Ints:
    """The neighbourhood of each row, by id."""
    parts = [pq.read_table(f"{shards.uri}/{file.path}").to_pandas() for file in shards.assignment_files()]
    groups = np.empty(shards.manifest.rows, np.int64)
    for part in parts:
        groups[part["id"]] = part["group"]
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("CIFAR10_DIR"), required="CIFAR10_DIR" not in os.environ)
    parser.add_argument("--components", type=float, default=50.0)
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--whiten", action="store_true")
    parser.add_argument("--engines", default=",".join(ENGINES))
    args = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").config("spark.driver.memory", "6g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.range(10).count()
    found: dict[str, tuple[ShardSet, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in args.engines.split(","):
            strategy = DistributionAware(
                clusters=args.clusters,
                components=args.components,
                whiten=args.whiten,
                fit_rows="all",
                engine=engine,
            )
            began = time.perf_counter()
            request = Request(str(args.data), str(Path(folder) / engine), WORKERS)
            done = shard(spark.sparkContext, request, strategy, PhaseLog(quiet=True))
            found[engine] = (done.shards, time.perf_counter() - began)
            print(f"{engine}: {found[engine][1]:.1f} s, {dict(done.shards.manifest.seconds)}", flush=True)
        groups = {engine: groups_of(shards) for engine, (shards, _) in found.items()}
    rows = []
    for engine, (shards, seconds) in found.items():
        manifest = shards.manifest
        sizes = [each.size for each in manifest.neighbourhoods or []]
        fit = sum(manifest.seconds.get(phase, 0.0) for phase in FIT)
        agree = (
            adjusted_rand_score(groups[engine], groups["scikit-learn"]) if "scikit-learn" in groups else float("nan")
        )
        sparse = sum(each.sparse for each in manifest.neighbourhoods or [])
        inertia = manifest.params["inertia"] / manifest.rows
        share = manifest.params["explained_variance"]
        numbers = (f"{seconds:.1f}", f"{fit:.1f}", f"{inertia:,.6g}", f"{share:.4f}", f"{agree:.3f}")
        rows.append((engine, *numbers, f"{min(sizes):,}", f"{max(sizes):,}", str(sparse)))
    heads = ("engine", "seconds", "fit", "inertia a row", "variance", "ARI", "smallest", "largest", "sparse")
    print(table(rows, heads, right=range(1, len(heads))))


if __name__ == "__main__":
    main()
