"""What tests of jobs on clusters share: sets to hold results against, jobs under way, and the moments to kill them at.

Every shard set is held against one made in the test's process from local files: the same sha256, file for file. A pytest
plugin, because of its fixtures.
"""

from __future__ import annotations

import hashlib
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
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
from tests.clusters import QUICK_START, ROOT, Hdfs, end_tree, spark_submit
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


@contextmanager
def submitted(*arguments: object, **submit: Any) -> Iterator[Future[Any]]:
    """A distribution_aware job under way; whatever happens, it has ended afterwards."""
    with ThreadPoolExecutor(1) as background:
        job = background.submit(spark_submit, JOB, *arguments, **{"env": QUIET, **submit})
        try:
            yield job
        except BaseException:
            end_tree(drivers(arguments))
            raise


def drivers(arguments: tuple[object, ...]) -> list[psutil.Process]:
    """The spark-submit that was given these arguments."""
    last = list(map(str, arguments))
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended
            if child.cmdline()[-len(last) :] == last:
                found.append(child)
    return found


def kill_driver(arguments: tuple[object, ...]) -> None:
    """SIGKILL a spark-submit, JVM and Python alike, and leave it to its parent to notice."""
    for driver in drivers(arguments):
        with suppress(psutil.NoSuchProcess):  # it has ended
            family = [driver, *driver.children(recursive=True)]
            for process in family:
                with suppress(psutil.NoSuchProcess):  # Python ends by itself once its JVM is gone
                    process.kill()


def wait_during(condition: Callable[[], T], job: Future[Any]) -> T:
    """What is asked for as soon as it is true. Fails when the job ends before, which is then no moment in its middle."""
    while not (found := condition()):
        assert not job.done(), job.result().stdout[-3000:]
        time.sleep(0.005)
    return found


def fitting(output: str) -> bool:
    """Whether an attempt has begun, in which nothing is written yet."""
    attempts = STORE.list(f"{output}/_attempts")
    return any(entry.name == "beat" and entry.bytes for attempt in attempts for entry in STORE.list(attempt.path))


def writing(output: str) -> list[str]:
    """Shard files that tasks have begun to write."""
    found = []
    for attempt in STORE.list(f"{output}/_attempts"):
        for task in STORE.list(attempt.path):
            found += [file for file in STORE.walk(task.path) if file.endswith(".parquet")] if task.is_dir else []
    return found


def committing(output: str) -> bool:
    """Whether files of a second version are being moved into place."""
    return any("-v2-" in entry.name for entry in STORE.list(f"{output}/worker=000"))


def assert_killed_drivers_leave_a_whole_set(
    spark: SparkSession, origin: str, output: str, master: str, small_set: Source, large_set: Source
) -> None:
    """Kill a driver while it writes and one while it commits, over an older set; then rerun.

    After each kill the old set or the new one is whole. After the rerun nothing else is left.
    """
    run_here(spark, small_set.folder, output, 2)
    old = digests(output)
    arguments = ("--input", origin, "--output", output, "--workers", 3, *LAYOUT, *FIT, "--no-report", "--overwrite")
    delays = random.Random(origin)
    moments: list[Callable[[str], object]] = [writing, committing]
    for moment in moments:
        with submitted(*arguments, master=master) as job:
            wait_during(partial(moment, output), job)
            time.sleep(delays.uniform(0, 0.02))
            kill_driver(arguments)
            assert job.result().returncode == -signal.SIGKILL
        found = digests(output)
        assert found == old or (moment is committing and found == large_set.digests)
    again = run_here(spark, origin, output, 3, overwrite=True)
    assert again.fresh == (found == old)
    assert digests(output) == large_set.digests
    assert strays(output) == []


def source(spark: SparkSession, folder: Path, rows: int) -> Source:
    labels, images = make_rows(rows, seed=7, pixels=192)
    images[[17, 400, rows - 1]] = np.random.default_rng(7).integers(0, 2, (3, 192)) * 255
    write_binary(folder / "cifar", labels, images, files=3)
    outcome = run_here(spark, folder / "cifar", folder / "out", 3)
    return Source(folder / "cifar", outcome.shards.manifest.copies, digests(str(folder / "out")))


# Sets to hold results against: a small one, and one whose writing takes a second or two


@pytest.fixture(scope="session")
def small_set(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """2,000 rows in three files, with isolated images among them, which every worker receives."""
    made = source(spark, tmp_path_factory.mktemp("small"), rows=2000)
    assert made.copies > 0
    return made


@pytest.fixture(scope="session")
def large_set(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """48,000 rows, which three workers receive in 8 chunks each: as many write tasks, 24 files."""
    return source(spark, tmp_path_factory.mktemp("large"), rows=48_000)


@pytest.fixture(scope="session")
def small_input(hdfs: Hdfs, small_set: Source) -> str:
    """The small set on HDFS, put there through WebHDFS, with a file of held-out rows beside it."""
    hdfs.client().upload("/in/small", str(small_set.folder))
    hdfs.client().upload("/in/small-held-out.bin", str(small_set.folder / "data_batch_2.bin"))
    return f"{hdfs.uri}/in/small"


@pytest.fixture(scope="session")
def large_input(hdfs: Hdfs, large_set: Source) -> str:
    """The large set on HDFS, put there through WebHDFS."""
    hdfs.client().upload("/in/large", str(large_set.folder))
    return f"{hdfs.uri}/in/large"
