"""The cost of a mini-batch on any number of nodes: a model with few terms, fitted to this machine's measurements.

MLlib, one job per mini-batch (seconds):
    job + task * tasks / driver_cores + (launch * tasks + scan * rows + row * batch) / cores
        + root(tasks) * 8 * weights / bandwidth
The driver spends ``task`` on each task, and the core that runs it ``launch``. A task passes over its whole part of the
rows to sample it. The driver receives one float64 gradient from each node of treeAggregate's second level; their number
is the square root of the number of tasks, or all tasks if there are at most 4.

Parameter server with n workers, one server:
    synchronous   step * max(1, n / cores) + (row + draw) * batch / cores + n * push + 2 * n * 4 * weights / bandwidth
    asynchronous  max(step + (row + draw) * batch / cores + push, n * push + 2 * n * 4 * weights / bandwidth)
``draw`` is 0 if the mini-batch is all rows. The asynchronous cost is the cost of n pushes, which are one mini-batch.
The server handles one push after the other, so that its terms grow with n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

BANDWIDTH = 125e6  # bytes per second into one node: an assumed gigabit network
# bytes
DOUBLE = 8
FLOAT = 4


@dataclass(frozen=True)
class Cluster:
    """The cluster that computes a mini-batch."""

    cores: int  # for tasks or workers
    tasks: int  # of a job, or workers
    driver_cores: int  # of Spark's driver; may be part of ``cores``
    has_network: bool = True  # False if all messages stay on one machine


@dataclass(frozen=True)
class TimedMiniBatch:
    """A measured mini-batch: rows of the set, rows of the mini-batch, tasks or workers, seconds."""

    rows: int
    batch: int
    tasks: int
    seconds: float


@dataclass(frozen=True)
class SparkCosts:
    """The coefficients of the cost of MLlib's mini-batches, in seconds."""

    job: float  # fixed cost of a job
    task: float  # CPU time of the driver per task
    launch: float  # per task, on the core that runs it
    scan: float  # per row of the set, on one core
    row: float  # per row of the mini-batch, on one core

    def split(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Return the seconds of a mini-batch by their cause: scheduling, rows, bytes.

        Args:
            rows: of the set.
            batch: rows of the mini-batch.
            weights: number of the model's weights.
            on: the cluster.
        """
        # From five tasks on MLlib sums gradients in a tree, so that the driver gets about sqrt(tasks) of them.
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
    """The coefficients of the cost of the parameter server's mini-batches, in seconds."""

    step: float  # fixed cost of a worker's step and its round trip
    push: float  # CPU time of the server per push
    row: float  # per row of the mini-batch, on one core
    draw: float  # per row, for its random access in memory

    def split(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Return the seconds of a synchronous mini-batch by their cause: workers, server, bytes.

        Args:
            rows: of the set.
            batch: rows of the mini-batch.
            weights: number of the model's weights.
            on: the cluster.
        """
        row = self.row + (self.draw if batch < rows else 0.0)
        return {
            "workers": self.step * max(1.0, on.tasks / on.cores) + row * batch / on.cores,
            "server": on.tasks * self.push,
            "bytes": on.tasks * 2 * FLOAT * weights / BANDWIDTH if on.has_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        """Return the seconds of a synchronous mini-batch."""
        return sum(self.split(rows, batch, weights, on).values())

    def asynchronous_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        """Return the seconds of as many asynchronous pushes as there are workers."""
        parts = self.split(rows, batch, weights, on)
        return max(parts["workers"] + self.push, parts["server"] + parts["bytes"])


def fit_spark(samples: Sequence[TimedMiniBatch], cores: int, task: float) -> SparkCosts:
    """Fit the costs by least squares of relative errors, without negative costs.

    Args:
        samples: must differ in batch, rows and tasks.
        cores: of the measured machine, whose driver shares them.
        task: measured CPU seconds of the driver per task.
    """
    terms = [[1.0, s.tasks / cores, s.rows / cores, s.batch / cores] for s in samples]
    job, launch, scan, row = _fit(terms, [s.seconds - task * s.tasks / cores for s in samples])
    return SparkCosts(job, task, launch, scan, row)


def fit_server(samples: Sequence[TimedMiniBatch], cores: int, push: float) -> ServerCosts:
    """Fit the costs of the synchronous protocol by least squares of relative errors, without negative costs.

    Args:
        samples: with one worker per core; they must differ in batch.
        cores: of the measured machine.
        push: measured CPU seconds of the server per push.
    """
    terms = [[1.0, s.batch / cores, (s.batch < s.rows) * s.batch / cores] for s in samples]
    step, row, draw = _fit(terms, [s.seconds - push * s.tasks for s in samples])
    return ServerCosts(step, push, row, draw)


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return non-negative costs that minimise the squared relative errors of the seconds.

    terms: a row per sample with the factors of the costs, so that their product should be the sample's seconds."""
    scale = np.maximum(np.array(seconds), 1e-9)
    costs, _ = nnls(np.array(terms) / scale[:, None], np.array(seconds) / scale)
    return tuple(float(value) for value in costs)
