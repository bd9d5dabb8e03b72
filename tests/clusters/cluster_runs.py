"""What tests of jobs on clusters share: sets to hold results against, jobs under way, and the moments to kill them at.

Every shard set is held against one made in the test's process from local files: the same sha256, file for file. A pytest
plugin, because of its fixtures.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipeline.core.shardset.manifest import ShardSet, missing_file, read_committed
from pipeline.core.storage.store import Store
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.runs.steps.run import ShardingResult
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.distribution_aware import DistributionAware
from tests.clusters import QUICK_START, ROOT, Hdfs
from tests.clusters.settings import class_archive
from tests.conftest import make_rows, write_binary

JOB = ROOT / "jobs" / "distribution_aware.py"
# The job's own log settings. In a SPARK_CONF_DIR they would keep the class archive from being used.
LOG = f"-Dlog4j2.configurationFile={(ROOT / 'conf' / 'log4j2.properties').as_uri()}"
QUIET = {"SPARK_SUBMIT_OPTS": shlex.join([*QUICK_START, *class_archive(), LOG])}
STORE = Store()
T = TypeVar("T")
SHAPE = (3, 8, 8)
LAYOUT = ("--format", "cifar10-binary", "--image-shape", "3x8x8")
FIT = ("--clusters", 40, "--components", 20)
STRATEGY = DistributionAware(clusters=40, components=20.0, whiten=True)


@dataclass(frozen=True)
class Source:
    """A set in a local folder, with what the pipeline makes of it there for some number of workers."""

    folder: Path
    copies: int
    digests: dict[str, str]


def whole(output: str) -> ShardSet:
    """The set at a place, every byte of its shards read back and checked."""
    found = read_committed(STORE, output)
    assert found is not None, f"{output} holds no committed set"
    assert missing_file(found) is None
    for file in found.files():
        assert hashlib.sha256(STORE.read(f"{output}/{file.path}")).hexdigest() == file.sha256, file.path
    return found


def digests(output: str) -> dict[str, str]:
    """The set at a place by (file, sha256), read back and checked; names without the part that tells sets apart."""
    found = whole(output)
    return {file.path.replace(found.manifest.generation, "*"): file.sha256 for file in found.files()}


def run_here(spark: SparkSession, source: object, output: object, workers: int, **options: Any) -> ShardingResult:
    """The job in this process, on the session that other tests share: two local cores."""
    request = Request(str(source), str(output), workers, read_options=ReadOptions("cifar10-binary", SHAPE), **options)
    return shard(spark.sparkContext, request, STRATEGY, PhaseLog(quiet=True))


def strays(output: str) -> list[str]:
    """What lies in a set's folder and belongs neither to the set nor to its report."""
    found = read_committed(STORE, output)
    assert found is not None
    below = {path.removeprefix(f"{output}/") for path in STORE.walk(output)}
    attempts = ["_attempts"] if STORE.exists(f"{output}/_attempts") else []
    numbers = {path for path in below if path.startswith("_manifests/") and not STORE.read(f"{output}/{path}")}
    known = {"manifest.json", f"_manifests/{found.manifest.version:06d}.json", "report.html", "quality.json"}
    return attempts + sorted(below - found.paths() - numbers - known)


def source(spark: SparkSession, folder: Path, rows: int) -> Source:
    labels, images = make_rows(rows, seed=7, pixels=192)
    images[[17, 400, rows - 1]] = np.random.default_rng(7).integers(0, 2, (3, 192)) * 255
    write_binary(folder / "cifar", labels, images, files=3)
    outcome = run_here(spark, folder / "cifar", folder / "out", 3)
    return Source(folder / "cifar", outcome.shards.manifest.copies, digests(str(folder / "out")))


@pytest.fixture(scope="session")
def small_set(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """2,000 rows in three files, with isolated images among them, which every worker receives."""
    made = source(spark, tmp_path_factory.mktemp("small"), rows=2000)
    assert made.copies > 0
    return made


@pytest.fixture(scope="session")
def small_input(hdfs: Hdfs, small_set: Source) -> str:
    """The small set on HDFS, put there through WebHDFS, with a file of held-out rows beside it."""
    hdfs.client().upload("/in/small", str(small_set.folder))
    hdfs.client().upload("/in/small-held-out.bin", str(small_set.folder / "data_batch_2.bin"))
    return f"{hdfs.uri}/in/small"
