"""A launcher that runs parts as tasks of a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pipeline
import trainer
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from trainer.cluster.launcher import LaunchArguments, Part
from trainer.cluster.watched import WatchingLauncher


class RayLauncher(WatchingLauncher[Any]):
    """A launcher with one task per part, spread over the nodes of the cluster at RAY_ADDRESS, or of this machine's.

    cores, gpus: resources per part. Ray sets CUDA_VISIBLE_DEVICES in a task itself."""

    def __init__(self, cores: int = 1, gpus: float = 0) -> None:
        super().__init__()
        self.cores = cores
        self.gpus = gpus
        self._has_connected = False

    def check(self, parts: Sequence[Part]) -> None:
        ray = self._connect()
        reason = problem(ray.cluster_resources(), len(parts), self.cores, self.gpus)
        if reason:
            raise UsageError(reason)

    def host(self) -> str:
        return str(self._connect().util.get_node_ip_address())

    def threads(self, parts: Sequence[Part]) -> int:
        return max(1, self.cores // max(part.count("worker") for part in parts))

    def waiting_for(self) -> str:
        return f"each takes {self.cores} CPUs and {self.gpus:g} GPUs of a node (--host-cores, --host-gpus)"

    def begin(self, arguments: LaunchArguments, attempt: int) -> Any:
        options = {"num_cpus": self.cores, "num_gpus": self.gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        task = self._connect().remote(_task()).options(name=f"host {arguments.part.index} of a training run", **options)
        return task.remote(arguments.to_json(), attempt, os.getcwd())

    def outcome(self, handle: Any) -> str | None:
        """Return None while a task runs, "" if it has ended by itself, otherwise the last line of its error."""
        ray = self._connect()
        if not ray.wait([handle], timeout=0)[0]:
            return None
        try:
            ray.get(handle)
        except Exception as error:
            return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]
        return ""

    def end(self, handle: Any) -> None:
        self._connect().cancel(handle, force=True)

    def stop(self) -> None:
        super().stop()
        if self._has_connected:
            self._connect().shutdown()
            self._has_connected = False

    def _connect(self) -> Any:
        """Return the module ray, connected to the cluster. Uses the program's connection if it has one."""
        require("ray", "--launcher ray")
        import ray

        if not ray.is_initialized():
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, runtime_env=_packages())
            except ConnectionError:
                raise UsageError("no Ray cluster is found: start one (ray start --head), or set RAY_ADDRESS") from None
            finally:
                # Ray's own handler of SIGTERM would end the program without a checkpoint.
                if threading.current_thread() is threading.main_thread():
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
            self._has_connected = True
        return ray


def _task() -> Callable[[dict[str, Any], int, str], None]:
    """Return the function of a task, which runs one part.

    Ray puts the driver's working folder first on the path of its tasks, where a user's file pipeline.py would hide our
    package. The function is local, so that Ray pickles it by value. It moves that folder to the end of the path, where
    the user's own models are still found, before it imports this package."""

    def run(arguments: dict[str, Any], attempt: int, folder: str) -> None:
        import sys

        if folder in sys.path:
            sys.path[:] = [*(entry for entry in sys.path if entry != folder), folder]
        from trainer.cluster.launcher import PartExecution
        from trainer.cluster.part import run_part

        run_part(arguments, PartExecution(attempt))

    return run


def _packages() -> dict[str, Any]:
    """Return the packages of a checkout for the nodes; an installed package must be installed there, too."""
    folders = [Path(package.__path__[0]).resolve() for package in (pipeline, trainer)]
    if any(folder.parent.name == "site-packages" for folder in folders):
        return {}
    return {"py_modules": [str(folder) for folder in folders]}


def problem(resources: dict[str, float], hosts: int, cores: int, gpus: float) -> str | None:
    """Return why the whole cluster has too few resources for all parts at once, or None. Pure.

    Args:
        resources: the cluster's resources by name, as Ray counts them.
        hosts: number of parts.
        cores, gpus: resources per part.
    """
    for name, each, flag in (("CPU", cores, "--host-cores"), ("GPU", gpus, "--host-gpus")):
        if each * hosts > resources.get(name, 0):
            return (
                f"--hosts {hosts} with {flag} {each:g} takes {each * hosts:g} {name}s, and the Ray cluster has"
                f" {resources.get(name, 0):g}: give fewer, or add nodes"
            )
    return None
