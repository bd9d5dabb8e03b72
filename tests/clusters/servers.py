"""What the three clusters share: server processes, the wait for them, their environment, and the class Cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psutil

from pipeline.core.errors import JobError
from tests.clusters.artifacts import class_archive_of, java_home, spark_home
from tests.clusters.machine import HOST
from tests.clusters.processes import end_tree, watcher
from tests.clusters.settings import QUICK_START, write_logging

START_TIMEOUT = timedelta(seconds=120)

# ----------------------------------------------------------------------------------------------------
# One server


@dataclass
class Server:
    """One server process: the command that starts it, and the running process once it has started.

    A detached server runs on after this process.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    env: Mapping[str, str]
    detached: bool = False
    process: psutil.Popen | None = field(default=None, init=False)

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # In a session of its own the server gets no Ctrl-C from the terminal. This process decides the order of stops.
        with self.log.open("ab") as log:
            self.process = psutil.Popen(
                [str(part) for part in self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.env),
                cwd=self.log.parent,
                start_new_session=True,
            )
        if not self.detached:
            watcher.watch("pid", self.process.pid)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return int(self.process.pid)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """End the server with SIGKILL, as a power failure does: its peers get no notice."""
        if self.process is not None:
            end_tree([self.process])

    def last_error(self) -> str:
        """The last line of the log that reads as an error, else the last line."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if re.search(r"BindException|Exception:|ERROR|FATAL|Error:", line)]
        return (errors or lines or ["nothing was logged"])[-1].strip()[:300]


def wait_until(ready: Callable[[], bool], what: str, servers: Sequence[Server], timeout: timedelta) -> None:
    """Poll until ready() holds. Raises JobError when one of the servers ends, or when the time is up."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not ready():
        for server in servers:
            if not server.running():
                fact = f"{server.name} ended while waiting for {what}"
                raise JobError(f"{fact}: {server.last_error()}; see {server.log}")
        if time.monotonic() > deadline:
            logs = servers[0].log.parent if servers else "the logs"
            raise JobError(f"{what}: not within {timeout.total_seconds():.0f} s; see {logs}")
        time.sleep(0.1)


# ----------------------------------------------------------------------------------------------------
# What a server says of itself


def get_json(url: str) -> dict[str, Any] | None:
    """The JSON at a URL of a local server, or None while the server does not answer with JSON."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError):
        return None


def jmx_bean(port: int, name: str) -> dict[str, Any]:
    """One bean of a Hadoop server's metrics page, empty while the server is not up."""
    page = get_json(f"http://{HOST}:{port}/jmx?qry=Hadoop:{name}") or {}
    return dict((page.get("beans") or [{}])[0])


# ----------------------------------------------------------------------------------------------------
# How a server starts


def hadoop_command(
    java: Path, folder: Path, classpath: Sequence[Path], main: str, options: Sequence[str] = ()
) -> list[str | Path]:
    """The command line of a Hadoop server or client up to its class, with its class archive if there is one.

    It reads its settings from folder/conf and puts temporary files into folder/tmp.

    Args:
        java: the java program.
        folder: of the cluster.
        classpath: jars and folders.
        main: the class.
        options: further options of the JVM.
    """
    scratch = folder / "tmp"
    # Servers of an earlier start that were killed leave files there.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    archive = class_archive_of(main)
    quiet = ("-Xlog:disable", "-Xlog:all=error:stderr")  # about an archive of another Java
    archived = [f"-XX:SharedArchiveFile={archive}", *quiet] if archive.exists() else []
    # Folders come last, and links are followed: a JVM refuses an archive where the class path begins with other names.
    jars = sorted((path.resolve() for path in classpath), key=Path.is_dir)
    path = os.pathsep.join(map(str, [*jars, folder / "conf", write_logging(folder)]))
    return [java, "-Xmx256m", *QUICK_START, *archived, *options, f"-Djava.io.tmpdir={scratch}", "-cp", path, main]


def server_environment(java: Path) -> dict[str, str]:
    """The environment of a server: this process's own without Spark's, Hadoop's, Python's and Amazon's variables.

    HADOOP_USER_NAME would change the superuser. PYTHONPATH would reach the executors, and this project with it. Executors
    are to have the keys of S3 from the driver.
    """
    dropped = ("SPARK_", "HADOOP_", "YARN_", "PYSPARK_", "PYTHONPATH", "AWS_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {
        **inherited,
        "JAVA_HOME": str(java_home(java)),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_HOME": str(spark_home()),
    }


# ----------------------------------------------------------------------------------------------------
# A cluster


class Cluster:
    """A folder and the servers that run in it. As a context manager it starts the servers and ends them.

    Without a folder of the caller's it makes a temporary one and removes it at the end.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="sharding-cluster-"))
        self.servers: list[Server] = []
        if self._temporary:
            watcher.watch("folder", self.folder)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            if self._temporary:
                # The error names a log in this folder, so the folder stays.
                self._temporary = False
                watcher.watch("keep", self.folder)
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """End every server with its descendants, and remove a temporary folder."""
        end_tree([server.process for server in self.servers if server.process is not None])
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """The servers' process ids."""
        return [server.pid for server in self.servers if server.process is not None]


class SparkCluster(Cluster):
    """One that runs executors. Its first server is the master; the others start them."""

    def executors(self) -> list[psutil.Process]:
        """The executor JVMs that run now, by server."""
        found = []
        for server in self.servers[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(server.pid).children(recursive=True)
                found += [child for child in children if _is_executor(child)]
        return found

    def kill_executor(self, index: int = 0) -> None:
        """End one executor and its Python workers with SIGKILL. Spark asks for another."""
        end_tree([self.executors()[index]])


def _is_executor(process: psutil.Process) -> bool:
    # A zombie, such as the script that started a worker may leave behind, has no command line; YARN has a shell in between.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "java" and any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    return False
