"""A job on one of the clusters, or on a local Spark: spark_submit()."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil

from tests.clusters.artifacts import find_java, java_home, spark_home
from tests.clusters.interpreter import executor_python
from tests.clusters.machine import HOST, ROOT
from tests.clusters.processes import end_tree, watcher
from tests.clusters.settings import INTERPRETED, LAUNCHER_OPTIONS, QUICK_START, class_archive


def submit_environment(
    master: str, extra: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a spark-submit: this interpreter and its pyspark, and no configuration but `extra`.

    On a cluster the executors' interpreter is one that finds this project only where the job ships it.
    """
    dropped = ("SPARK_", "HADOOP_", "YARN_", "PYSPARK_", "PYTHONPATH")
    inherited = {k: v for k, v in environ.items() if not k.startswith(dropped)}
    # spark-submit and the Python workers find their interpreter by PATH. The link of a virtual environment must stay
    # unresolved, because its target has none of the environment's packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    return {
        **inherited,
        "PATH": path,
        "JAVA_HOME": str(java_home(find_java(environ))),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": HOST,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": sys.executable if master.startswith("local") else str(executor_python()),
        "SPARK_SUBMIT_OPTS": shlex.join([*QUICK_START, *class_archive(environ)]),
        "SPARK_LAUNCHER_OPTS": LAUNCHER_OPTIONS,
        **extra,
    }


def submit_conf(master: str, cores: int = 2) -> dict[str, str]:
    """The settings that these clusters ask of a job. The caller's own settings override them."""
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", **INTERPRETED}
    if master.startswith("local"):
        return quiet
    quiet["spark.executor.extraJavaOptions"] = shlex.join([*QUICK_START, *class_archive()])
    if master != "yarn":
        return quiet
    python = {"PYSPARK_PYTHON": str(executor_python()), "SPARK_LOCAL_IP": HOST}
    return {
        **quiet,
        "spark.yarn.am.extraJavaOptions": " ".join(QUICK_START),
        "spark.yarn.jars": f"local:{spark_home()}/jars/*",
        **{f"spark.yarn.appMasterEnv.{k}": v for k, v in python.items()},
        # In cluster mode the driver runs in a container too.
        "spark.yarn.appMasterEnv.PYSPARK_DRIVER_PYTHON": str(executor_python()),
        **{f"spark.executorEnv.{k}": v for k, v in python.items()},
        "spark.executor.instances": str(cores),
        "spark.executor.memory": "800m",
        # A second attempt would hide why the first one failed.
        "spark.yarn.maxAppAttempts": "1",
        "spark.yarn.am.waitTime": "60s",
    }


def spark_submit(
    script: str | Path, *args: object, timeout: timedelta = timedelta(seconds=280), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script with the running interpreter's own spark-submit. Return its exit code, stdout and stderr.

    options: those of start_submit. Raises subprocess.TimeoutExpired, with the output so far, after it has ended every
    process of the job.
    """
    process = start_submit(script, *args, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout.total_seconds())
    except BaseException:
        end_tree([process])
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_without_submit(module: str, *args: object, master: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE`` with a Spark that its own process starts, on the master of PYSPARK_SUBMIT_ARGS."""
    settings = [part for key, value in submit_conf(master).items() for part in ("--conf", f"{key}={value}")]
    submit = shlex.join(["--master", master, *settings, "pyspark-shell"])
    env = submit_environment(master, {"PYSPARK_SUBMIT_ARGS": submit, "PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)


def start_submit(
    script: str | Path,
    *args: object,
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    deploy_mode: str | None = None,
    proxy_user: str | None = None,
    py_files: Path | None = None,
    output: IO[bytes] | None = None,
) -> psutil.Popen:
    """The process of a spark-submit, which runs on.

    conf: --conf settings. env: environment variables, such as SPARK_CONF_DIR, and HADOOP_CONF_DIR, which YARN needs.
    proxy_user: the user that the job is submitted for. output: where both its streams go; without it, they are pipes.
    """
    settings = {**submit_conf(master), **(conf or {})}
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master]
    command += ["--deploy-mode", deploy_mode] if deploy_mode else []
    command += ["--proxy-user", proxy_user] if proxy_user else []
    command += ["--py-files", str(py_files)] if py_files else []
    command += [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    command += [str(script), *map(str, args)]
    process = psutil.Popen(
        command,
        env=submit_environment(master, env or {}),
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=output or subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watcher.watch("pid", process.pid)
    return process
