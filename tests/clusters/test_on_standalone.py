"""The pipeline and training on a standalone cluster and a real HDFS."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession

from tests.clusters import ROOT, Hdfs, Standalone, end_tree, spark_submit
from tests.clusters.cluster_runs import (
    FIT,
    LAYOUT,
    QUIET,
    STORE,
    Source,
    digests,
    run_here,
    strays,
    whole,
)
from tests.clusters.cluster_training import (
    HOSTS,
    Task,
    checkpoints,
    hosts_in,
    job,
    make_task,
    training_processes,
    vector,
)
from tests.clusters.submit import run_without_submit, start_submit
from tests.support.application import run_application
from tests.support.trainer_runs import until

pytestmark = pytest.mark.full


def test_a_job_without_room_on_the_cluster_says_so(standalone: Standalone, small_set: Source, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    conf = {
        "spark.executor.memory": "60g",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{tmp_path}/events",
    }
    arguments = (ROOT / "jobs/stratified.py", "--input", small_set.folder, "--output", tmp_path / "out", "--workers", 2)
    with (tmp_path / "log").open("wb") as log:
        job = start_submit(*arguments, *LAYOUT, master=standalone.master_url, conf=conf, env=QUIET, output=log)
        try:
            while "no executor has started a task yet" not in (said := (tmp_path / "log").read_text()):
                assert job.poll() is None, said
                time.sleep(0.1)
            (events,) = [path for path in (tmp_path / "events").rglob("*") if path.is_file() and "events_" in path.name]
            started = [json.loads(line) for line in events.read_text().splitlines() if "SparkListenerJobStart" in line]
            asked = {event["Properties"]["spark.job.description"] for event in started}
        finally:
            job.terminate()
            job.wait(30)
            end_tree([job])
    assert asked == {f"discover: stratified to {tmp_path}/out"}  # whether executors see the local paths
    assert not (tmp_path / "out").exists()


def test_standalone_shards_reshards_and_replaces_on_hdfs(
    standalone: Standalone, hdfs: Hdfs, small_input: str, small_set: Source, spark: SparkSession, tmp_path: Path
) -> None:
    output, moved = f"{hdfs.uri}/standalone/out", f"{hdfs.uri}/standalone/moved"
    held_out = f"{small_input}-held-out.bin"
    given = ("--input", small_input, "--output", output, *LAYOUT)
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
    run_here(spark, small_set.folder, tmp_path / "two", 2)
    assert list(digests(moved).values()) == list(digests(str(tmp_path / "two")).values())
    with hdfs.client().read(f"{moved.removeprefix(hdfs.uri)}/report.html", encoding="utf-8") as page:
        assert "</html>" in page.read()
    assert strays(moved) == []

    # replacing: the new set alone, with its evaluation rows
    assert replaced.code == 0, replaced.err
    found = whole(output)
    assert strays(output) == []
    assert (found.manifest.strategy, found.num_workers) == ("stratified", 2)
    assert found.manifest.to_json()["eval"]["rows"] == 667
    assert {path.split("/")[0] for path in found.paths()} == {"worker=000", "worker=001", "_eval", "_assignment"}


def test_files_of_tasks_on_hdfs_belong_to_the_submitting_user(
    standalone: Standalone, hdfs: Hdfs, small_input: str
) -> None:
    """The executors run as another user here, the one who started HDFS, who may write anywhere."""
    client, output = hdfs.client(), "/submitter/set"
    client.makedirs("/submitter")
    client.set_owner("/submitter", owner="alice")
    arguments = ("--input", small_input, "--output", f"{hdfs.uri}{output}", "--workers", 2, *LAYOUT, "--no-report")
    env = {**QUIET, "HADOOP_USER_NAME": "alice"}
    done = spark_submit(ROOT / "jobs" / "stratified.py", *arguments, master=standalone.master_url, env=env)
    assert done.returncode == 0, done.stderr
    files = [path for path in STORE.walk(f"{hdfs.uri}{output}") if path.endswith(".parquet")]
    assert len(files) == 3, "of two workers, and their assignment"
    assert {client.status(path.removeprefix(hdfs.uri))["owner"] for path in files} == {"alice"}


@pytest.fixture(scope="module")
def task(spark: SparkSession, hdfs: Hdfs, tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(spark, hdfs, tmp_path_factory.mktemp("training"), "training", 1200)


def test_training_on_standalone_survives_a_signal_and_kills(
    standalone: Standalone, hdfs: Hdfs, task: Task, tmp_path: Path
) -> None:
    """End a run by a scheduler's signal, its successor by killing the driver, and kill an executor of the third.

    It ends with the bits of one host. Neither a signal nor a kill leaves a process."""
    output = f"{hdfs.uri}/training/killed"
    (tmp_path / "events").mkdir()
    events = {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false"}
    conf = {**events, "spark.eventLog.dir": f"file://{tmp_path}/events"}
    where: dict[str, Any] = {"master": standalone.master_url, "conf": conf, "env": {}}
    with job(task, output, tmp_path / "first", **where) as run:
        run.wait_for_checkpoint()
        run.process.terminate()
        assert run.wait() == 1
    assert re.search(r"error: interrupted at version \d+ .*--resume continues\n", run.said()), run.said()
    until(lambda: not training_processes(standalone), "every process ends")
    left = max(checkpoints(output))
    with job(task, output, tmp_path / "second", "--resume", **where) as run:
        run.wait_for_checkpoint(left + 1)
        assert training_processes(standalone)
        run.kill()
    until(lambda: not training_processes(standalone), "every process on every host ends")
    left = max(checkpoints(output))
    with job(task, output, tmp_path / "third", "--resume", **where) as run:
        run.wait_for_checkpoint(left + 1)
        standalone.kill_executor(0)
        until(lambda: len(standalone.executors()) == HOSTS, "Spark starts another executor")
        assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(vector(output), task.vector)
    said = run.said()
    assert hosts_in(said, "was lost, and is started again on"), said
    for line in ("host 0 has started on", "2 servers, 3 workers of 1 thread each", "finished   1,200 updates"):
        assert line in said
    readable = "".join(path.read_text(errors="replace") for path in (tmp_path / "events").rglob("*") if path.is_file())
    assert "train on 2 hosts" in readable, "the event log has the stage"
    readable += said + "".join(path.read_text() for path in standalone.folder.glob("work*/app-*/*/std*"))
    assert not re.search(r"\b[0-9a-f]{64}\b", readable), "the token is nowhere to be read"
    until(lambda: not training_processes(standalone), "every process ends")


def test_training_leaves_a_host_that_is_to_end(standalone: Standalone, hdfs: Hdfs, task: Task, tmp_path: Path) -> None:
    """Send SIGTERM to every process of the host without servers, as the shutdown of a machine does."""
    output = f"{hdfs.uri}/training/left"
    where: dict[str, Any] = {"master": standalone.master_url, "conf": {}, "env": {}}
    protocol = ("--protocol", "ssp", "--staleness-bound", 3, "--servers", 1, "--steps", 1500)
    with job(task, output, tmp_path / "log", *protocol, **where) as run:
        run.wait_for_checkpoint()
        trees = [[each, *each.children(recursive=True)] for each in standalone.executors()]
        (host,) = (tree for tree in trees if not any(each.name().startswith("server") for each in tree))
        for process in host:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        assert run.wait() == 0, run.said()
    assert "host 1 got SIGTERM: the run continues with 1 workers" in run.said()
    result = json.loads(STORE.read(f"{output}/result.json"))
    assert result["num_workers"] == 1
    assert result["passes"]["whole"] == result["passes"]["true"] > 1
    until(lambda: not training_processes(standalone), "every process ends")


def test_a_cluster_without_room_for_the_hosts_is_told_of(
    standalone: Standalone, hdfs: Hdfs, task: Task, tmp_path: Path
) -> None:
    output = f"{hdfs.uri}/training/none"
    where: dict[str, Any] = {"master": standalone.master_url, "env": {}}
    with job(task, output, tmp_path / "none", "--hosts", 3, conf={}, **where) as run:
        until(lambda: re.search(r"[0-2] of 3 hosts have started after 10 s", run.said()), "the missing host is told of")
        run.process.terminate()
        assert run.wait() == 1
    assert "spark.task.cpus" in run.said()
    assert not STORE.exists(f"{output}/config.json"), "the run never began"


def test_training_needs_no_spark_submit(standalone: Standalone, hdfs: Hdfs, task: Task) -> None:
    output = f"{hdfs.uri}/training/alone"
    flags = ("--shards", task.shards, "--output", output, *task.flags, "--launcher", "spark", "--hosts", 2)
    done = run_without_submit("trainer", *flags, master=standalone.master_url)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(rf"application app-\S+ on {standalone.master_url}", done.stderr), done.stderr[-3000:]
    np.testing.assert_array_equal(vector(output), task.vector)
    until(lambda: not training_processes(standalone), "every process ends")


def test_the_benchmark_runs_its_servers_on_the_executors(standalone: Standalone, hdfs: Hdfs, tmp_path: Path) -> None:
    """Run the command without spark-submit: its process starts Spark itself."""
    chosen = ("--quick", "--models", "linear", "--systems", "ps-sync", "--year-rows", 4000, "--batches", 4000)
    command = (*chosen, "--output", tmp_path, "--data", f"{hdfs.uri}/benchmark")
    homes: set[str] = set()  # of the executors under which a process of training was seen
    with ThreadPoolExecutor(1) as background:
        job = background.submit(run_without_submit, "trainer.benchmark", *command, master=standalone.master_url)
        while not job.done():
            for process in training_processes(standalone):
                with suppress(psutil.NoSuchProcess):
                    homes.add(process.cwd())
            time.sleep(0.1)
    done = job.result()
    assert done.returncode == 0, done.stderr
    assert len(homes) == 2, homes
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["servers_on"] == "executors"
    assert {record["system"] for record in results["records"]} == {"ps-sync"}
    assert not [record["error"] for record in results["records"] if record["error"]]
    assert not STORE.exists(f"{hdfs.uri}/benchmark/training")
