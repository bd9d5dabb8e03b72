"""What tests of training on clusters share: a set on HDFS, where its run ends on one host, and runs under way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tests.clusters import ROOT, Hdfs, end_tree
from tests.clusters.cluster_runs import QUIET, STORE
from tests.clusters.processes import is_alive
from tests.clusters.servers import SparkCluster
from tests.clusters.submit import start_submit
from tests.support.places import put
from tests.support.trainer_runs import train_here, until
from tests.support.trainer_sets import make_sets
from trainer.checkpoints.read import newest, read_vector
from trainer.home.place import place_of

FLAGS = (
    "--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report",
    "--protocol", "bsp", "--servers", 2, "--checkpoint-every-s", 1,
)  # fmt: skip
HOSTS = 2


@dataclass(frozen=True)
class Task:
    """A set on HDFS for three workers, how long its run is, and the vector where that ends on one host."""

    shards: str
    flags: tuple[object, ...]
    vector: npt.NDArray[np.float32]


def make_task(spark: Any, hdfs: Hdfs, folder: Path, name: str, steps: int) -> Task:
    local = make_sets(spark, folder, 3)[3]
    shards = f"{hdfs.uri}/{name}/shards"
    for path in sorted(local.rglob("*")):
        if path.is_file():
            put(f"{shards}/{path.relative_to(local)}", path.read_bytes())
    flags = (*FLAGS, "--steps", steps)
    return Task(shards, flags, train_here(local, folder / "undisturbed", *flags, "--quiet").vector())


def vector(output: str) -> npt.NDArray[np.float32]:
    root = place_of(output) / "checkpoints"
    version = newest(root, verify=True)
    assert version is not None
    return read_vector(root, version)


def checkpoints(output: str) -> list[int]:
    """The versions that are there, whole or not."""
    names = [entry.name for entry in STORE.list(f"{output}/checkpoints") if entry.is_dir]
    return [int(name) for name in names if name.isdecimal()]


class Job:
    """jobs/train.py on a cluster. logs: returns the output of its processes elsewhere, for failures."""

    def __init__(self, process: psutil.Popen, text: Path, output: str, logs: Callable[[], str] = str) -> None:
        self.process, self.text, self.output, self.logs = process, text, output, logs

    def said(self) -> str:
        return self.text.read_text(errors="replace") + self.logs()

    def wait_for_checkpoint(self, version: int = 1) -> None:
        """Until there is one of an update."""
        until(
            lambda: max(checkpoints(self.output), default=0) >= version or self.process.poll() is not None,
            f"a checkpoint of version {version}",
            300,  # a busy machine starts a driver, its executors and their processes in between
            self.said,
        )
        assert self.process.poll() is None, self.said()

    def wait(self, seconds: float = 180) -> int:
        try:
            return int(self.process.wait(seconds))
        except psutil.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.said()}") from None

    def kill(self) -> None:
        """The driver, its Python and its JVM, with SIGKILL."""
        end_tree([self.process])
        self.process.wait(30)


@contextmanager
def job(
    task: Task,
    output: str,
    text: Path,
    *flags: object,
    conf: dict[str, str],
    env: dict[str, str],
    logs: Callable[[], str] = str,
    **where: Any,
) -> Iterator[Job]:
    """logs: see Job. where: the other arguments of start_submit."""
    arguments = ("--shards", task.shards, "--output", output, "--hosts", HOSTS, *task.flags, *flags)
    with open(text, "wb") as log:
        process = start_submit(
            ROOT / "jobs" / "train.py", *arguments, conf=conf, env={**QUIET, **env}, output=log, **where
        )
    try:
        yield Job(process, text, output, logs)
    finally:
        end_tree([process])


def training_processes(cluster: SparkCluster) -> list[psutil.Process]:
    """Those of a run whose package this cluster brought."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            below = os.readlink(f"/proc/{process.pid}/cwd").startswith(f"{cluster.folder}/")
            if below and b"trainer.zip" in Path(f"/proc/{process.pid}/environ").read_bytes() and is_alive(process):
                found.append(process)
    return found


def hosts_in(said: str, words: str) -> Sequence[str]:
    """The lines about hosts that have these words."""
    return [line for line in said.splitlines() if "host " in line and words in line]
