"""The plan of a run against the bytes, files and tasks of real ones, and its page."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from pipeline.clustering import kmeans, reduction
from pipeline.input.read_options import ReadOptions
from pipeline.runs import plan as plan_module
from pipeline.runs.plan import Shape, plan
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from tests.conftest import make_rows, write_binary
from tests.support.sharding_runs import make
from tests.support.tiers import only

ROWS, PIXELS = 20_000, 192


class Measured(PhaseLog):
    """What reaches the driver in each phase: the largest and the sum of its collections, pickled as they came."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.name = ""
        self.largest: dict[str, int] = defaultdict(int)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.name = name
        with super().phase(name):
            yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels, images = make_rows(ROWS, seed=5, pixels=PIXELS)
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3)


@pytest.mark.parametrize(
    ("strategy", "workers", "clusters", "one_task"),
    [
        ("stratified", 300, 0, True),
        pytest.param("distribution_aware", 7, 40, True, marks=pytest.mark.full),
        ("distribution_aware", 7, 40, False),
        ("hash", 7, 0, True),
    ],
)
def test_what_reaches_the_driver_is_what_the_plan_says(
    spark: SparkSession,
    source: Path,
    tmp_path: Path,
    strategy: str,
    workers: int,
    clusters: int,
    one_task: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not one_task:
        for module in (kmeans, plan_module):
            monkeypatch.setattr(module, "ONE_TASK_BYTES", 0)
    log, collect = Measured(), RDD.collect

    def measure(self: RDD[Any]) -> list[Any]:
        found = collect(self)
        log.largest[log.name] = max(log.largest[log.name], sum(len(pickle.dumps(each)) for each in found))
        return found

    monkeypatch.setattr(RDD, "collect", measure)
    request = Request(
        str(source),
        str(tmp_path / "out"),
        workers,
        read_options=ReadOptions("cifar10-binary", (3, 8, 8)),
        allow_empty=True,
    )
    made = shard(spark.sparkContext, request, make(strategy), log).shards
    cores = spark.sparkContext.defaultParallelism
    shape = Shape(ROWS, workers, PIXELS, 10, clusters, 20 if clusters else 50, cores)
    if strategy == "hash":
        shape = replace(shape, clusters=len(made.manifest.neighbourhoods or ()), functions=7)
    planned = plan(shape)
    told = {"spill": "write", "gather": "write"}
    expected: dict[str, int] = defaultdict(int)
    for phase in planned.phases:
        name = told.get(phase.name, phase.name)
        expected[name] = max(expected[name], phase.driver_bytes)
    for name in ("scan", "pca", "kmeans", "buckets", "assign", "write"):
        if name in expected and not (name == "kmeans" and one_task):  # whose only result is not collected
            assert 0.6 * expected[name] <= log.largest[name] <= 1.3 * expected[name], (name, expected, log.largest)
    assert planned.files == len(made.files())
    size = (tmp_path / "out" / "manifest.json").stat().st_size
    assert (
        0.6 * planned.manifest_bytes <= size <= 1.4 * planned.manifest_bytes + 3000
    )  # neighbourhoods, versions, seconds


@pytest.mark.parametrize("partitions", only([5], [1, 3, 5, 9, 64]))
def test_as_many_parts_reach_the_driver_as_the_tree_leaves(
    spark: SparkSession, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, collect = [], RDD.collect

    def measure(self: RDD[Any]) -> list[Any]:
        seen.append(found := collect(self))
        return found

    monkeypatch.setattr(RDD, "collect", measure)
    rows = spark.sparkContext.parallelize(range(2 * partitions), partitions)
    assert reduction.tree_reduce(rows, lambda left, right: left + right) == sum(range(2 * partitions))
    assert len(seen[-1]) == reduction.arrivals(partitions) <= 20
