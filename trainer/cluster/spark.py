"""A launcher that runs parts as the tasks of one plain Spark stage. Spark restarts a lost task itself, on any executor.

A barrier stage is not used, because there a lost task ends all tasks, and slots are checked before executors have
registered."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from pipeline.core.errors import UsageError
from pipeline.core.storage.hadoop_conf import is_true
from trainer.cluster.attempts import Attempts
from trainer.cluster.launcher import LaunchArguments, Part, PartExecution
from trainer.cluster.part import run_part
from trainer.cluster.rendezvous import AttemptLostError

Open = Callable[[], tuple[Any, str]]
STOP_S = 10.0  # how long a cancelled stage may take to end
TRIES = 1000  # attempt numbers per stage, more than spark.task.maxFailures, so that they grow from stage to stage


class SparkLauncher:
    """A launcher with one Spark task per part.

    open_context: called when there is something to train, again after a change of workers; returns a SparkContext whose
    executors can import this package, and file system settings for hosts without a Hadoop configuration (see
    Launcher.store)."""

    def __init__(self, open_context: Open) -> None:
        self.open_context = open_context
        self.context: Any = None
        self.settings = ""
        self._conf: dict[str, str] = {}
        self._attempts = Attempts()  # of the stage, which counts as part 0
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._group = ""

    def check(self, parts: Sequence[Part]) -> None:
        """Open the Spark context. Raises UsageError if a setting prevents that all parts run at once."""
        self.context, self.settings = self.open_context()
        self._conf = dict(self.context.getConf().getAll())
        reason = problem(self._conf, len(parts), int(self.context.defaultParallelism))
        if reason:
            raise UsageError(reason)

    def host(self) -> str:
        return self._conf["spark.driver.host"]

    def threads(self, parts: Sequence[Part]) -> int:
        """Return the cores per task divided by the workers of the largest part, at least 1."""
        return max(1, _number(self._conf, "spark.task.cpus", 1) // max(part.count("worker") for part in parts))

    def store(self) -> str:
        return self.settings

    def start(self, arguments: Sequence[LaunchArguments]) -> None:
        """Start a thread that runs the stage, with the properties of this thread's Spark jobs."""
        from pyspark import InheritableThread

        self._attempts = Attempts()
        self._failure = None
        self._group = f"trainer-{uuid4().hex[:8]}"
        self._stopping.clear()
        arguments_json = [each.to_json() for each in arguments]
        self._thread = InheritableThread(target=self._run, args=(arguments_json,), name="launcher", daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        return self._failure

    def waiting_for(self) -> str:
        cores = _number(self._conf, "spark.task.cpus", 1)
        cores_per_task = f"{cores} {'core' if cores == 1 else 'cores'} of an executor (spark.task.cpus)"
        return f"each takes {cores_per_task}, and the cluster has too few that are free, or {_room(self._conf)}"

    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """Cancel the stage and wait up to STOP_S for its end."""
        self._stopping.set()
        end = time.monotonic() + STOP_S
        while not self.is_over() and not self._has_stopped() and time.monotonic() < end:
            self.context.cancelJobGroup(self._group)  # repeated, because the stage may not have been submitted yet
            self._thread.join(0.5)  # type: ignore[union-attr]

    def _has_stopped(self) -> bool:
        try:
            return bool(self.context._jsc.sc().isStopped())
        except Exception:  # the JVM has gone
            return True

    def _run(self, arguments: list[dict[str, Any]]) -> None:
        """Run the stage. If Spark gives it up because a task was lost too often, start another one."""
        while not self._stopping.is_set():
            submission = self._attempts.begin(0, time.monotonic())
            try:
                self.context.setJobGroup(self._group, f"train on {len(arguments)} hosts", interruptOnCancel=True)
                tasks = self.context.parallelize(range(len(arguments)), len(arguments))
                tasks.mapPartitionsWithIndex(partial(_task, arguments, submission * TRIES)).collect()
                return
            except Exception as error:
                # A Python error would come again, so only a stage whose tasks were lost is repeated.
                cause = cause_of(str(error))
                due = self._attempts.lost(0, time.monotonic())
                if self._has_stopped():
                    self._failure = "the Spark application was ended; the same command with --resume continues"
                elif cause or due is None:
                    self._failure = f"a host's part cannot run: {cause or 'it is lost as soon as it is started'}"
                if self._failure or due is None:
                    return
                self._stopping.wait(due - time.monotonic())


def _task(arguments: list[dict[str, Any]], first: int, index: int, rows: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Run one part in a Spark task, and yield its exit code and error message.

    Raises only if another attempt may succeed, because Spark then starts one.

    Args:
        arguments: the launch arguments of all parts.
        first: number of the first attempt of this stage.
        index: number of the part.
        rows: the rows of the partition, which are not used.
    """
    from pyspark import SparkFiles, TaskContext

    context = TaskContext.get()
    assert context
    gpus = context.resources().get("gpu")
    devices = tuple(gpus.addresses) if gpus else None
    scratch = os.path.abspath(SparkFiles.getRootDirectory())  # the cluster deletes it, even after a SIGKILL
    yield run_part(arguments[index], PartExecution(first + context.attemptNumber(), devices, scratch))


def cause_of(error: str) -> str | None:
    """Return the Python error of a failed task from the text of a job's error; None if the task was lost. Pure."""
    lines: list[str] = re.findall(r"^([A-Za-z_][\w.]*(?:[Ee]rror|Exception)\b[^\n]*)", error, re.MULTILINE)
    python = [line for line in lines if not line.startswith(("org.apache", "py4j", "java"))]
    if not python or AttemptLostError.__name__ in python[-1].split(":")[0]:
        return None
    return python[-1][:500]


def problem(conf: Mapping[str, str], hosts: int, cores: int) -> str | None:
    """Return which setting prevents all parts from running at once, or None if no setting does. Pure.

    Args:
        conf: the settings of the application.
        hosts: number of parts, that is of tasks.
        cores: cores of a ``local[*]`` master, whose name does not contain their number.
    """
    master = conf.get("spark.master", "")
    cpus = _number(conf, "spark.task.cpus", 1)
    if is_true(conf.get("spark.speculation", "")):
        return "spark.speculation is true: a second copy of a host's part would take the first one's place; set it to false"
    executors = re.match(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,", master)
    if executors:
        room = int(executors[1]) * (int(executors[2]) // cpus)
        where = f"--master {master}"
    elif master.startswith("local"):
        match = re.match(r"local(?:\[(\d+))?", master)
        cores = int(match[1]) if match and match[1] else 1 if master == "local" else cores
        room = cores // cpus
        where = f"--master {master}"
    elif "spark.executor.cores" in conf and _number(conf, "spark.executor.cores", 1) < cpus:
        return (
            f"spark.task.cpus is {cpus} and spark.executor.cores {conf['spark.executor.cores']}: no host could start; give"
            f" executors {cpus} cores or more"
        )
    elif master.startswith("spark:"):
        if "spark.cores.max" not in conf:
            return None  # the application gets all cores of the cluster, whose number is unknown here
        room = _number(conf, "spark.cores.max", 0) // cpus
        where = "spark.cores.max"
    else:
        name = "spark.executor.instances"
        if is_true(conf.get("spark.dynamicAllocation.enabled", "")):
            name = "spark.dynamicAllocation.maxExecutors"
            if name not in conf:
                return None
        each = _number(conf, "spark.executor.cores", 1) // cpus
        room = _number(conf, name, 2) * each
        where = f"{name} {_number(conf, name, 2)}, of {each} each"
    if room >= hosts:
        return None
    return f"--hosts {hosts}: {where} has room for {room}, with spark.task.cpus {cpus}; give more, or fewer hosts"


def _room(conf: Mapping[str, str]) -> str:
    """Return text about the settings that limit the number of executors."""
    if conf.get("spark.master", "").startswith("spark:"):
        return "spark.cores.max and spark.executor.cores allow too few"
    return "spark.executor.instances and spark.executor.cores ask for too few"


def _number(conf: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(conf.get(name, default))
    except ValueError:
        return default
