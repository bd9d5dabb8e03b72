"""A run of the trainer on this host or on a cluster, with the CPU seconds of its parameter server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from pipeline.core.storage.store import configured_store
from trainer.benchmark.systems.executors import Executors
from trainer.runlog.kinds.run import ConvergedEvent, EndEvent
from trainer.runlog.kinds.training import LoadedEvent

if TYPE_CHECKING:
    from trainer import Config

POLL_S = 0.25


@dataclass(frozen=True)
class TrainingRun:
    """A finished training run.

    Attributes:
        num_workers: n.
        updates: of the model.
        converged: True if the stop rule ended the run.
        start_time: start of the call, in seconds since 1970.
        end_time: end of training, in seconds since 1970.
        seconds: of training.
        load_s: the slowest worker's time to read its rows.
        server_cpu_s: CPU time of the server process since its start; None if it runs on another host.
        pushes: the accepted pushes: worker, seconds, examples, read_s, step_s.
        weights: the model's arrays by name.
    """

    num_workers: int
    updates: int
    converged: bool
    start_time: float
    end_time: float
    seconds: float
    load_s: float
    server_cpu_s: float | None
    pushes: pd.DataFrame
    weights: Mapping[str, Any]


def train_once(config: Config, executors: Executors | None) -> TrainingRun:
    """Train to the end of a run and delete its folder. Raises UsageError, DataError and JobError as trainer.train.

    executors: hosts of the servers and their workers; None for this host."""
    import trainer  # loads no torch; the processes of the run do
    from trainer.data.opening import open_shards

    start_time = time.time()
    with poll_server_cpu() as server_cpu_s:
        options = trainer.Options(overwrite=True, report=False, silent=True)
        if executors:
            workers = open_shards(config.data.shards).num_workers
            hosts = min(executors.count(), workers)
            result = trainer.train(config, options, launcher=executors.launcher(), hosts=hosts)
        else:
            result = trainer.train(config, options)
    assert result is not None, "server 0 runs on this host"
    events = result.events()
    pushes = result.pushes()
    run = TrainingRun(
        num_workers=result.num_workers,
        updates=result.updates,
        converged=result.converged,
        start_time=start_time,
        end_time=next(
            e.time or 0.0 for kind in (ConvergedEvent, EndEvent) for e in reversed(events) if isinstance(e, kind)
        ),
        seconds=float(result.seconds or 0.0),
        load_s=max(event.load_s for event in events if isinstance(event, LoadedEvent)),
        server_cpu_s=None if executors else server_cpu_s[-1],
        pushes=pushes[pushes.accepted == 1],
        weights=result.weights(),
    )
    store = configured_store()
    store.delete(store.resolve(config.run.output))
    return run


@contextmanager
def poll_server_cpu() -> Iterator[list[float]]:
    """Poll the CPU seconds of the server process. Yields a list whose last entry is the latest value.

    The search for the server stops when it is found, because each search reads the status of every process of the
    machine, which slows the run down."""
    seconds = [0.0]
    stop_event = threading.Event()

    def poll() -> None:
        """Append the server's CPU seconds so far, until the block ends: they cannot be read once it has exited."""
        server = None
        while not stop_event.wait(POLL_S):
            # Processes may end while their status is read.
            with suppress(psutil.Error):
                server = server or _find_server(os.getpid())
                if server:
                    seconds.append(sum(server.cpu_times()[:2]))

    thread = threading.Thread(target=poll, name="server-cpu", daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        stop_event.set()
        thread.join()


def _find_server(pid: int) -> psutil.Process | None:
    children = psutil.Process(pid).children(recursive=True)
    return next((child for child in children if child.name().startswith("server")), None)
