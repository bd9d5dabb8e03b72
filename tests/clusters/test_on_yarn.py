"""The pipeline on YARN, in client and in cluster mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clusters import ROOT, Hdfs, Yarn, spark_submit
from tests.clusters.cluster_runs import (
    FIT,
    JOB,
    LAYOUT,
    QUIET,
    Source,
    digests,
    strays,
)
from tests.clusters.cluster_training import hosts_in, job, make_task, training_processes, vector
from tests.clusters.users_jobs import Target, assert_jobs_work
from tests.support.commands import in_demo
from tests.support.trainer_runs import until

pytestmark = pytest.mark.full


def packed(target: Path) -> Path:
    """The packages as `python -m pipeline zip` writes them for YARN's cluster mode, where the driver needs them too."""
    command = [sys.executable, "-m", "pipeline", "zip", "--to", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{target}: written\n"), done.stderr
    return target


def test_yarn_makes_the_same_shards_in_cluster_mode(
    yarn: Yarn, hdfs: Hdfs, small_input: str, small_set: Source, tmp_path: Path
) -> None:
    output = f"{hdfs.uri}/yarn/cluster"
    earlier = set((yarn.folder / "containers").glob("application_*/*"))
    arguments = ["--input", small_input, "--output", output, "--workers", 3, *LAYOUT, *FIT]
    env = {**QUIET, "HADOOP_CONF_DIR": str(yarn.conf_dir)}
    zipped = packed(tmp_path / "build" / "packages.zip")
    done = spark_submit(JOB, *arguments, master="yarn", deploy_mode="cluster", py_files=zipped, env=env)
    printed = done.stdout + done.stderr + yarn.container_logs()
    assert done.returncode == 0, printed
    assert f"{output}: committed" in printed
    assert f"{output}/report.html" in printed
    # the application's master and two executors: nothing ran elsewhere
    assert len(set((yarn.folder / "containers").glob("application_*/*")) - earlier) == 3
    assert digests(output) == small_set.digests
    assert strays(output) == []


@pytest.mark.timeout(900)  # the environment may have to be made
def test_default_flags_on_yarn_in_the_demo_environment(yarn: Yarn, hdfs: Hdfs, tmp_path: Path) -> None:
    submit = in_demo("yarn", HADOOP_CONF_DIR=str(yarn.conf_dir))
    assert_jobs_work(Target(f"{hdfs.uri}/demo-yarn", submit, ("matcha",), slow_start=True), tmp_path)


def test_training_on_yarn_in_cluster_mode_has_the_bits_of_one_host(
    yarn: Yarn, hdfs: Hdfs, spark: Any, tmp_path: Path
) -> None:
    """Kill an executor: its host is replaced, as on a standalone cluster."""
    task = make_task(spark, hdfs, tmp_path / "made", "yarn-training", 900)
    output = f"{hdfs.uri}/yarn-training/run"
    where: dict[str, Any] = {"master": "yarn", "conf": {}, "env": {"HADOOP_CONF_DIR": str(yarn.conf_dir)}}
    where |= {"deploy_mode": "cluster", "py_files": packed(tmp_path / "packages.zip")}
    with job(task, output, tmp_path / "log", logs=yarn.container_logs, **where) as run:
        run.wait_for_checkpoint()
        yarn.kill_executor()
        assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(vector(output), task.vector)
    assert hosts_in(yarn.container_logs(), "was lost, and is started again on")
    until(lambda: not training_processes(yarn), "every process ends")
