"""What a mini-batch costs on any number of nodes: a model with few terms, fitted to this machine's measurements.

MLlib, one job for each mini-batch (seconds):
    job + task * tasks / driver_cores + (launch * tasks + scan * rows + row * batch) / cores
        + root(tasks) * 8 * weights / bandwidth
The driver spends ``task`` on each task, and the core that runs it ``launch``. The task passes over its whole part to
sample it. The driver gets one gradient in float64 from each node of treeAggregate's second level, of which there are as
many as the root of the number of tasks.
Parameter server with n workers, one server:
    synchronous   step * max(1, n / cores) + (row + draw) * batch / cores + n * push + 2 * n * 4 * weights / bandwidth
    asynchronous  max(step + (row + draw) * batch / cores + push, n * push + 2 * n * 4 * weights / bandwidth)
Without ``draw`` where the mini-batch is all rows; asynchronous: of n pushes, which are one mini-batch. The server takes one
push after the other, which alone does not scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

BANDWIDTH = 125e6  # bytes a second into one node: a gigabit network, assumed
DOUBLE, FLOAT = 8, 4  # bytes


@dataclass(frozen=True)
class Cluster:
    """Where a mini-batch is computed."""

    cores: int  # that run tasks or workers
    tasks: int  # of a job, or workers
    driver_cores: int  # of Spark's driver, which may be among ``cores``
    has_network: bool = True  # whether messages pass one


@dataclass(frozen=True)
class TimedMiniBatch:
    """A measured mini-batch: rows of the set, rows of the mini-batch, tasks or workers, seconds."""

    rows: int
    batch: int
    tasks: int
    seconds: float


@dataclass(frozen=True)
class SparkCosts:
    """Seconds that MLlib's mini-batches are made of."""

    job: float  # whatever it does
    task: float  # CPU of the driver for one task
    launch: float  # of a task on the core that runs it
    scan: float  # of a row that is passed over, on one core
    row: float  # of a row in the mini-batch, on one core

    def split(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Seconds of a mini-batch by what they go to: scheduling, rows, bytes."""
        gathered = math.isqrt(on.tasks) if on.tasks > 4 else on.tasks
        return {
            "scheduling": self.job + self.task * on.tasks / on.driver_cores + self.launch * on.tasks / on.cores,
            "rows": (self.scan * rows + self.row * batch) / on.cores,
            "bytes": gathered * DOUBLE * weights / BANDWIDTH if on.has_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        return sum(self.split(rows, batch, weights, on).values())


@dataclass(frozen=True)
class ServerCosts:
    """Seconds that the parameter server's mini-batches are made of."""

    step: float  # of a worker's step and its round trip, whatever it computes
    push: float  # of the server, for one push
    row: float  # of a row in the mini-batch, on one core
    draw: float  # of drawing it from anywhere in memory

    def split(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Seconds of a synchronous mini-batch by what they go to: workers, server, bytes."""
        row = self.row + (self.draw if batch < rows else 0.0)
        return {
            "workers": self.step * max(1.0, on.tasks / on.cores) + row * batch / on.cores,
            "server": on.tasks * self.push,
            "bytes": on.tasks * 2 * FLOAT * weights / BANDWIDTH if on.has_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        """Of a synchronous mini-batch."""
        return sum(self.split(rows, batch, weights, on).values())

    def asynchronous_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        """Of as many asynchronous pushes as there are workers."""
        parts = self.split(rows, batch, weights, on)
        return max(parts["workers"] + self.push, parts["server"] + parts["bytes"])


def fit_spark(samples: Sequence[TimedMiniBatch], cores: int, task: float) -> SparkCosts:
    """Least squares of relative errors without negative costs, on a machine whose driver shares the cores.

    The samples must differ in batch, rows and tasks."""
    terms = [[1.0, s.tasks / cores, s.rows / cores, s.batch / cores] for s in samples]
    job, launch, scan, row = _fit(terms, [s.seconds - task * s.tasks / cores for s in samples])
    return SparkCosts(job, task, launch, scan, row)


def fit_server(samples: Sequence[TimedMiniBatch], cores: int, push: float) -> ServerCosts:
    """The same for the synchronous protocol, with a worker for each core."""
    terms = [[1.0, s.batch / cores, (s.batch < s.rows) * s.batch / cores] for s in samples]
    step, row, draw = _fit(terms, [s.seconds - push * s.tasks for s in samples])
    return ServerCosts(step, push, row, draw)


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    scale = np.maximum(np.array(seconds), 1e-9)
    costs, _ = nnls(np.array(terms) / scale[:, None], np.array(seconds) / scale)
    return tuple(float(value) for value in costs)
