"""What a mini-batch costs on any number of nodes: a model with few terms, fitted to this machine's measurements.

MLlib, one job a mini-batch (seconds):
    job + task * tasks / driver_cores + (launch * tasks + scan * rows + row * batch) / cores
        + root(tasks) * 8 * weights / bandwidth
the driver spends ``task`` on every task and the core that runs it ``launch``; the task passes over its whole part to sample
it; the driver gets one gradient in float64 of each of treeAggregate's second level, the root of the number of tasks.
Parameter server with n workers, one server:
    synchronous   step * max(1, n / cores) + (row + draw) * batch / cores + n * push + 2 * n * 4 * weights / bandwidth
    asynchronous  max(step + (row + draw) * batch / cores + push, n * push + 2 * n * 4 * weights / bandwidth)
without draw where the mini-batch is all rows, and for n pushes, which are one mini-batch: the server takes pushes one after
the other, and is all that does not scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

BANDWIDTH = 125e6  # bytes a second into one node: a gigabit network, assumed
DOUBLE, FLOAT = 8, 4


@dataclass(frozen=True)
class Cluster:
    """cores: that run tasks or workers; tasks: of a job, or workers; driver_cores: that Spark's driver has, which may be
    the same as those; has_network: whether messages pass one."""

    cores: int
    tasks: int
    driver_cores: int
    has_network: bool = True


@dataclass(frozen=True)
class Sample:
    """A measured mini-batch: rows of the set, batch, tasks or workers, seconds."""

    rows: int
    batch: int
    tasks: int
    seconds: float


@dataclass(frozen=True)
class SparkCosts:
    """job: of a job whatever it does; task: of one task more, in the driver; launch: of it on the core that runs it; scan,
    row: of a row that is passed over, and of one in the mini-batch, on one core. Seconds, of one core where CPU."""

    job: float
    task: float
    launch: float
    scan: float
    row: float

    def parts(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Seconds by what they go to."""
        gathered = math.isqrt(on.tasks) if on.tasks > 4 else on.tasks
        return {
            "scheduling": self.job + self.task * on.tasks / on.driver_cores + self.launch * on.tasks / on.cores,
            "rows": (self.scan * rows + self.row * batch) / on.cores,
            "bytes": gathered * DOUBLE * weights / BANDWIDTH if on.has_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        return sum(self.parts(rows, batch, weights, on).values())


@dataclass(frozen=True)
class ServerCosts:
    """step: of a worker's step and its round trip whatever it computes; push: of the server, a push; row: of a row of the
    mini-batch, on one core; draw: of its being drawn, from anywhere in memory. Seconds."""

    step: float
    push: float
    row: float
    draw: float

    def parts(self, rows: int, batch: int, weights: int, on: Cluster) -> dict[str, float]:
        """Seconds of a synchronous mini-batch by what they go to."""
        row = self.row + (self.draw if batch < rows else 0.0)
        return {
            "workers": self.step * max(1.0, on.tasks / on.cores) + row * batch / on.cores,
            "server": on.tasks * self.push,
            "bytes": on.tasks * 2 * FLOAT * weights / BANDWIDTH if on.has_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        """Synchronous."""
        return sum(self.parts(rows, batch, weights, on).values())

    def asynchronous_s(self, rows: int, batch: int, weights: int, on: Cluster) -> float:
        parts = self.parts(rows, batch, weights, on)
        return max(parts["workers"] + self.push, parts["server"] + parts["bytes"])


def fit_spark(samples: Sequence[Sample], cores: int, task: float) -> SparkCosts:
    """Least squares with no negative cost; relative errors count. Needs samples that differ in batch, rows and tasks, of a
    machine on which the driver shares the cores."""
    terms = [[1.0, s.tasks / cores, s.rows / cores, s.batch / cores] for s in samples]
    job, launch, scan, row = _fit(terms, [s.seconds - task * s.tasks / cores for s in samples])
    return SparkCosts(job, task, launch, scan, row)


def fit_server(samples: Sequence[Sample], cores: int, push: float) -> ServerCosts:
    """The same, for the synchronous protocol with a worker for each core."""
    terms = [[1.0, s.batch / cores, (s.batch < s.rows) * s.batch / cores] for s in samples]
    step, row, draw = _fit(terms, [s.seconds - push * s.tasks for s in samples])
    return ServerCosts(step, push, row, draw)


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    scale = np.maximum(np.array(seconds), 1e-9)
    found, _ = nnls(np.array(terms) / scale[:, None], np.array(seconds) / scale)
    return tuple(float(value) for value in found)
