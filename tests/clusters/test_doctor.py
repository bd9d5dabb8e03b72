"""The command doctor on a cluster, and what jobs there find out before they read a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import ROOT, Hdfs, Standalone
from tests.clusters.cluster_runs import LAYOUT, QUIET, STORE
from tests.clusters.submit import submit_environment
from tests.support.application import Ended, run_application

pytestmark = pytest.mark.full
DENIED = "Permission denied: user=alice, access=WRITE"


def doctor(standalone: Standalone, *arguments: object, **env: str) -> Ended:
    """Run the command with the executors of the cluster."""
    command = [sys.executable, "-m", "pipeline", "doctor", "--master", standalone.master_url, *map(str, arguments)]
    environment = submit_environment(standalone.master_url, {**QUIET, **env})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_a_cluster_and_its_hdfs_have_no_failed_check(standalone: Standalone, hdfs: Hdfs, small_input: str) -> None:
    output = f"{hdfs.uri}/doctor/a/o"
    result = doctor(standalone, "--input", small_input, "--output", output)
    assert result.code == 0, result.out + result.err
    assert "2 answer, on " in result.out
    assert f"{output}: executors on " in result.out
    assert "Traceback" not in result.err
    assert not STORE.exists(f"{hdfs.uri}/doctor"), "a trace of it is left"


def test_no_room_for_executors_is_a_failed_check(standalone: Standalone) -> None:
    """The command waits no longer than it was told, and ends."""
    conf = "--conf spark.executor.memory=60g pyspark-shell"
    result = doctor(standalone, "--wait", 30, PYSPARK_SUBMIT_ARGS=conf)
    assert result.code == 1, result.out + result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("FAILED")]
    assert "none has answered in 30 s" in line


def test_a_job_for_another_user_is_refused_or_writes_as_it(
    standalone: Standalone, hdfs: Hdfs, small_input: str, tmp_path: Path
) -> None:
    """Write by the driver and by tasks: the manifest is the driver's, the shards are of tasks.

    Where HDFS refuses that user, the job learns it before its scan."""
    client, output, closed = hdfs.client(), f"{hdfs.uri}/proxied/set", f"{hdfs.uri}/closed/o"
    client.makedirs("/proxied")
    client.set_owner("/proxied", owner="alice")
    flags = ("--input", small_input, "--workers", 2, *LAYOUT, "--no-report")
    plan = [("stratified.py", *flags, "--output", place) for place in (closed, output)]
    submit: dict[str, Any] = {"master": standalone.master_url, "env": QUIET, "proxy_user": "alice"}
    (refused, done), _ = run_application(tmp_path, plan, **submit)
    said = refused.out + refused.err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: --output {closed} may not be written: {DENIED}")
    assert refused.code == 2
    assert " discover " in said
    assert " scan " not in said
    assert done.code == 0, done.out + done.err
    files = STORE.walk(output)
    assert f"{output}/manifest.json" in files
    assert {client.status(path.removeprefix(hdfs.uri))["owner"] for path in files} == {"alice"}
