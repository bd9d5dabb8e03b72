"""The pipeline where it is meant to run: real HDFS, Spark standalone and YARN, with nodes and drivers killed under it.

Every shard set is held against one made in this process from local files: the same sha256, file for file.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.runs.request import Request
from pipeline.runs.shard import Outcome, shard
from pipeline.shardset.manifest import ShardSet, missing_file, read_committed
from pipeline.spark.progress import Progress
from pipeline.storage.store import Store
from pipeline.strategies.distribution_aware import DistributionAware
from tests.application import run_application
from tests.clusters import ROOT, Hdfs, Standalone, Yarn, end_tree, spark_submit
from tests.conftest import make_rows, write_binary
from tests.test_commit import commit

JOB = ROOT / "jobs" / "distribution_aware.py"
QUIET = {"SPARK_CONF_DIR": str(ROOT / "conf")}
STORE = Store()
T = TypeVar("T")
SHAPE = (3, 8, 8)
RECORD_BYTES = 193
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
    return {file.path.replace(found.manifest["generation"], "*"): file.sha256 for file in found.files()}


def run_here(spark: Any, source: object, output: object, workers: int, **options: Any) -> Outcome:
    """The job in this process, on the session that other tests share: two local cores."""
    request = Request(str(source), str(output), workers, format="cifar10-binary", shape=SHAPE, **options)
    return shard(spark.sparkContext, request, STRATEGY, Progress(quiet=True))


def strays(output: str) -> list[str]:
    """What lies in a set's folder and belongs neither to the set nor to its report."""
    found = read_committed(STORE, output)
    assert found is not None
    below = {path.removeprefix(f"{output}/") for path in STORE.walk(output)}
    attempts = ["_attempts"] if STORE.exists(f"{output}/_attempts") else []
    return attempts + sorted(below - found.paths() - {"manifest.json", "report.html", "quality.json"})


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
    return [child for child in psutil.Process().children() if child.cmdline()[-len(last) :] == last]


def kill_driver(arguments: tuple[object, ...]) -> None:
    """SIGKILL a spark-submit, JVM and Python alike, and leave it to its parent to notice."""
    for driver in drivers(arguments):
        for process in [driver, *driver.children(recursive=True)]:
            process.kill()


def wait_for(condition: Callable[[], T], job: Future[Any]) -> T:
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
    return STORE.exists(f"{output}/_attempts/lock")


# Data: a small set, and one whose writing takes a second or two


@pytest.fixture(scope="module")
def small(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """2,000 rows in three files, with isolated images among them, which every worker receives."""
    made = source(spark, tmp_path_factory.mktemp("small"), rows=2000)
    assert made.copies > 0
    return made


@pytest.fixture(scope="module")
def large(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """80,000 rows, which three workers receive in 13 chunks each: as many write tasks, 39 files."""
    return source(spark, tmp_path_factory.mktemp("large"), rows=80_000)


def source(spark: Any, folder: Path, rows: int) -> Source:
    labels, images = make_rows(rows, seed=7, pixels=192)
    images[[17, 400, rows - 1]] = np.random.default_rng(7).integers(0, 2, (3, 192)) * 255
    write_binary(folder / "cifar", labels, images, files=3)
    outcome = run_here(spark, folder / "cifar", folder / "out", 3)
    return Source(folder / "cifar", outcome.shards.manifest["copies"], digests(str(folder / "out")))


@pytest.fixture(scope="module")
def uploads(hdfs: Hdfs, small: Source, large: Source) -> dict[str, str]:
    """Both sets on HDFS, put there through WebHDFS."""
    for name, each in (("small", small), ("large", large)):
        hdfs.client().upload(f"/in/{name}", str(each.folder))
    hdfs.client().upload("/in/small-held-out.bin", str(small.folder / "data_batch_2.bin"))
    return {name: f"{hdfs.uri}/in/{name}" for name in ("small", "large")}


# The same shards everywhere


def test_two_local_cores_one_with_threaded_libraries_and_files_make_the_same_shards(
    small: Source, tmp_path: Path
) -> None:
    arguments = ["--input", f"file:{small.folder}", "--output", tmp_path / "out", "--workers", 3, *LAYOUT, *FIT]
    done = spark_submit(
        JOB, *arguments, "--no-report", master="local[1]", conf={"spark.executorEnv.OMP_NUM_THREADS": "2"}, env=QUIET
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(str(tmp_path / "out")) == small.digests


def packed(target: Path) -> Path:
    """The package as `python -m pipeline zip` writes it for YARN's cluster mode, where the driver needs it too."""
    command = [sys.executable, "-m", "pipeline", "zip", "--to", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{target}: written\n"), done.stderr
    return target


@pytest.mark.parametrize("deploy_mode", ["client", "cluster"])
def test_yarn_makes_the_same_shards(
    yarn: Yarn, hdfs: Hdfs, uploads: dict[str, str], small: Source, tmp_path: Path, deploy_mode: str
) -> None:
    output = f"{hdfs.uri}/yarn/{deploy_mode}"
    earlier = set((yarn.folder / "containers").glob("application_*/*"))
    arguments = ["--input", uploads["small"], "--output", output, "--workers", 3, *LAYOUT, *FIT]
    env = {**QUIET, "HADOOP_CONF_DIR": str(yarn.conf_dir)}
    zipped = packed(tmp_path / "build" / "pipeline.zip") if deploy_mode == "cluster" else None
    done = spark_submit(JOB, *arguments, master="yarn", deploy_mode=deploy_mode, py_files=zipped, env=env)
    printed = done.stdout + done.stderr + (yarn.container_logs() if deploy_mode == "cluster" else "")
    assert done.returncode == 0, printed
    assert f"{output}: committed" in printed
    assert f"{output}/report.html" in printed
    # the application's master and two executors: nothing ran elsewhere
    assert len(set((yarn.folder / "containers").glob("application_*/*")) - earlier) == 3
    assert digests(output) == small.digests
    assert strays(output) == []


def test_standalone_shards_reshards_and_replaces_on_hdfs(
    standalone: Standalone, hdfs: Hdfs, uploads: dict[str, str], small: Source, spark: Any, tmp_path: Path
) -> None:
    output, moved = f"{hdfs.uri}/standalone/out", f"{hdfs.uri}/standalone/moved"
    held_out = f"{uploads['small']}-held-out.bin"
    given = ("--input", uploads["small"], "--output", output, *LAYOUT)
    aware = ("distribution_aware.py", *given, "--workers", 3, *FIT)
    other = ("stratified.py", *given, "--workers", 2, "--eval-input", held_out, "--no-report")
    plan = [
        (*aware, "--no-report"),
        (*aware, "--no-report"),
        other,
        ("reshard.py", "--input", output, "--output", moved, "--workers", 2),
        (*other, "--overwrite"),
    ]
    earlier = set(standalone.folder.glob("work*/app-*/*/stderr"))
    (made, again, refused, resharded, replaced), _ = run_application(
        tmp_path, plan, env=QUIET, master=standalone.master_url
    )
    executors = set(standalone.folder.glob("work*/app-*/*/stderr")) - earlier
    assert len(executors) == 2, "one on each worker, and nothing ran elsewhere"

    assert made.code == 0, made.err
    assert f"{output}: committed" in made.out
    assert (again.code, again.out.splitlines()[0]) == (0, f"{output}: already committed, nothing to do")
    assert refused.code == 2
    assert refused.err.splitlines()[-1].startswith(f"error: {output} already holds a committed set")

    # resharding: what the job itself would have written for two workers; the report beside it
    assert resharded.code == 0, resharded.err
    run_here(spark, small.folder, tmp_path / "two", 2)
    assert list(digests(moved).values()) == list(digests(str(tmp_path / "two")).values())
    with hdfs.client().read(f"{moved.removeprefix(hdfs.uri)}/report.html", encoding="utf-8") as page:
        assert "</html>" in page.read()
    assert strays(moved) == []

    # replacing: the new set alone, with its evaluation rows
    assert replaced.code == 0, replaced.err
    found = whole(output)
    assert strays(output) == []
    assert (found.manifest["strategy"], found.num_workers) == ("stratified", 2)
    assert found.manifest["eval"]["rows"] == 667
    assert {path.split("/")[0] for path in found.paths()} == {"worker=000", "worker=001", "_eval"}


def test_the_shards_of_hdfs_read_through_webhdfs_are_the_rows_of_the_input(
    standalone: Standalone, hdfs: Hdfs, uploads: dict[str, str], small: Source, spark: Any
) -> None:
    output = f"{hdfs.uri}/web/out"
    run_here(spark, uploads["small"], output, 3)
    client = hdfs.client()
    with client.read("/web/out/manifest.json", encoding="utf-8") as file:
        manifest = json.load(file)
    records: dict[int, tuple[int, bytes]] = {}
    for worker in manifest["workers"]:
        for listed in worker["files"]:
            with client.read(f"/web/out/{listed['path']}") as file:
                data = file.read()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (listed["bytes"], listed["sha256"])
            for row in pq.read_table(pa.BufferReader(data)).to_pylist():
                if row["copy"] == 0:
                    assert row["id"] not in records
                    records[row["id"]] = (row["label"], row["image"])
    raw = b"".join(path.read_bytes() for path in sorted(small.folder.iterdir()))
    expected = [raw[at : at + RECORD_BYTES] for at in range(0, len(raw), RECORD_BYTES)]
    assert [bytes([label]) + image for _, (label, image) in sorted(records.items())] == expected


# Nodes killed under a run


@pytest.mark.parametrize("victim", ["datanode", "executor"])
def test_a_node_killed_while_shards_are_written_changes_nothing(
    standalone: Standalone, hdfs: Hdfs, uploads: dict[str, str], large: Source, victim: str
) -> None:
    output = f"{hdfs.uri}/killed/{victim}"
    arguments = ("--input", uploads["large"], "--output", output, "--workers", 3, *LAYOUT, *FIT, "--no-report")
    try:
        with submitted(*arguments, master=standalone.master_url) as job:
            executors = wait_for(lambda: standalone.executors() if fitting(output) else [], job)
            wait_for(lambda: writing(output), job)
            if victim == "datanode":
                hdfs.kill_datanode(1)
            else:
                end_tree(executors[:1])
            assert read_committed(STORE, output) is None
            assert len(writing(output)) < len(large.digests)
            done = job.result()
    finally:
        if victim == "datanode":
            hdfs.restart_datanode(1)
            hdfs.wait_live(3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("Lost executor" in done.stdout + done.stderr) == (victim == "executor")
    assert digests(output) == large.digests
    assert strays(output) == []


# Drivers killed


@pytest.mark.parametrize("place", ["hdfs", "file"])
def test_after_a_killed_driver_the_old_set_or_the_new_one_is_whole_and_a_rerun_leaves_nothing_else(
    request: pytest.FixtureRequest, large: Source, small: Source, spark: Any, tmp_path: Path, place: str
) -> None:
    if place == "hdfs":
        output = f"{request.getfixturevalue('hdfs').uri}/killed/driver"
        origin, master = request.getfixturevalue("uploads")["large"], request.getfixturevalue("standalone").master_url
    else:
        output, origin, master = str(tmp_path / "out"), str(large.folder), "local[2]"
    run_here(spark, small.folder, output, 2)
    old = digests(output)
    arguments = ("--input", origin, "--output", output, "--workers", 3, *LAYOUT, *FIT, "--no-report", "--overwrite")
    delays = random.Random(place)
    moments: list[Callable[[str], object]] = [fitting, writing, committing]
    for moment in moments:
        with submitted(*arguments, master=master) as job:
            wait_for(partial(moment, output), job)
            time.sleep(delays.uniform(0, 0.02))
            if moment is fitting:
                assert not writing(output)
            kill_driver(arguments)
            assert job.result().returncode == -signal.SIGKILL
        found = digests(output)
        assert found == old or (moment is committing and found == large.digests)
    again = run_here(spark, origin, output, 3, overwrite=True)
    assert again.fresh == (found == old)
    if not again.fresh:  # a set that was committed in time: the dead attempt is left to the next run that writes
        run_here(spark, origin, output, 2, overwrite=True)
        run_here(spark, origin, output, 3, overwrite=True)
    assert digests(output) == large.digests
    assert strays(output) == []


# What goes wrong on HDFS


def test_what_hdfs_refuses_is_one_line_and_leaves_nothing_behind(
    hdfs: Hdfs, uploads: dict[str, str], small: Source, tmp_path: Path
) -> None:
    boss = hdfs.client()
    batch = (small.folder / "data_batch_1.bin").read_bytes()
    for name in ("locked", "sealed", "cut", "secret"):
        boss.write(f"/wrong/{name}/data_batch_1.bin", data=batch)
    boss.write("/wrong/cut/data_batch_2.bin", data=batch[: 3 * RECORD_BYTES + 5])
    boss.write("/wrong/secret/data_batch_2.bin", data=batch)
    boss.makedirs("/wrong/out", permission="777")
    boss.set_permission("/wrong/locked", "700")
    boss.set_permission("/wrong/sealed", "711")
    boss.set_permission("/wrong/secret/data_batch_2.bin", "600")
    before = STORE.walk(f"{hdfs.uri}/wrong")

    def job(source: str, output: str) -> tuple[object, ...]:
        return ("distribution_aware.py", "--input", source, "--output", output, "--workers", 3, *LAYOUT, *FIT)

    wrong, out = f"{hdfs.uri}/wrong", f"{hdfs.uri}/wrong/out/set"
    cases = [
        (job(f"{wrong}/nowhere", out), 3, f"{wrong}/nowhere does not exist"),
        (job(f"{wrong}/locked/data_batch_1.bin", out), 3, f"{wrong}/locked/data_batch_1.bin cannot be read"),
        (job(f"{wrong}/sealed", out), 3, f"{wrong}/sealed cannot be listed"),
        (job(f"{wrong}/secret", out), 3, f"{wrong}/secret/data_batch_2.bin cannot be read"),
        (job(f"{wrong}/cut", out), 3, f"{wrong}/cut/data_batch_2.bin"),
        (job(uploads["small"], f"{wrong}/set"), 1, f"{wrong}/set"),
        (job(uploads["small"], f"{wrong}/locked/set"), 1, f"{wrong}/locked/set"),
    ]
    # permissions are the NameNode's, so the job must not run as its superuser
    env = {**QUIET, "HADOOP_USER_NAME": "nobody"}
    done, rest = run_application(tmp_path, [command for command, _, _ in cases], env=env)
    for ended, (command, code, fact) in zip(done, cases, strict=True):
        *progress, last = ended.err.splitlines()
        assert (ended.code, last.startswith(f"error: {fact}")) == (code, True), (command, ended)
        assert all(line.startswith("[") for line in progress), ended.err
        assert ended.out == ""
    assert str(3 * RECORD_BYTES) in done[4].err.splitlines()[-1], "the place in the file"
    for sign in ("Traceback", "\tat ", "Exception"):
        assert sign not in rest
    assert STORE.walk(wrong) == before
    assert not STORE.exists(out)
    assert not STORE.exists(f"{wrong}/set")


def test_a_namenode_that_is_not_there_is_one_line_before_spark_starts(tmp_path: Path) -> None:
    nowhere = "hdfs://127.0.0.1:1"
    done = spark_submit(JOB, "--input", f"{nowhere}/in", "--output", tmp_path / "out", "--workers", 3, env=QUIET)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING: Using incub")]
    assert done.returncode == 1
    assert lines == [
        f"error: {nowhere}/in: Connection refused (os error 111); check that HDFS is up and reachable at {nowhere}"
    ]
    assert not (tmp_path / "out").exists()


# The commit on HDFS

# Never creates a client itself: a fork of one would share its connections.
KILL_AT_EVERY_CHANGE = """
import os, sys
from pipeline.storage.store import Store
from tests.test_commit import commit, killed_at
steps, killed = 0, True
while killed:
    output = f"{sys.argv[1]}/{steps}"
    child = os.fork()
    if child == 0:
        commit(Store(), output, "old", 2)
        os._exit(17)
    assert os.waitpid(child, 0)[1] == 17 << 8
    killed = killed_at(output, "new", 1, steps)
    steps += killed
print(steps)
"""


def test_a_writer_killed_before_any_change_on_hdfs_leaves_the_old_set_or_the_new_one_whole(hdfs: Hdfs) -> None:
    command = [sys.executable, "-c", KILL_AT_EVERY_CHANGE, f"{hdfs.uri}/steps"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 15
    seen = []
    for step in range(steps + 1):
        output = f"{hdfs.uri}/steps/{step}"
        seen.append(whole(output).manifest["strategy"])
        commit(STORE, output, "next", 1)
        assert whole(output).manifest["strategy"] == "next"
        assert set(strays(output)) <= {"_attempts"}  # a folder without a heart yet is left for the length of a lease
    # one change is the commit: before it the old set, after it the new
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}
