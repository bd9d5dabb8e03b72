"""What a mini-batch costs on any number of nodes: a model with few terms, fitted to this machine's measurements.

MLlib, one job a mini-batch (seconds):
    job + task * cores + (scan * rows + row * batch) / cores + root(cores) * 8 * weights / bandwidth
a task for each core scans its whole part to sample it; the driver gets one gradient in float64 of each of treeAggregate's
second level, the root of the number of tasks.
Parameter server with n workers of one node each, one server:
    synchronous   step + row * batch / cores + n * push + 2 * n * 4 * weights / bandwidth
    asynchronous  max((step + row * batch / cores + push), n * push + 2 * n * 4 * weights / bandwidth)
for n pushes, which are one mini-batch: the server takes pushes one after the other, and is all that does not scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

BANDWIDTH = 125e6  # bytes a second into one node: a gigabit network, assumed
DOUBLE, FLOAT = 8, 4


@dataclass(frozen=True)
class Sample:
    """A measured mini-batch: rows of the set, batch, seconds."""

    rows: int
    batch: int
    seconds: float


@dataclass(frozen=True)
class SparkCosts:
    """job: of a job whatever it does; task: of one task more, in the driver; scan, row: of a row that is passed over, and
    of one in the mini-batch, on one core. Seconds."""

    job: float
    task: float
    scan: float
    row: float

    def parts(self, rows: int, batch: int, weights: int, cores: int, *, over_network: bool = True) -> dict[str, float]:
        """Seconds by what they go to."""
        gathered = math.isqrt(cores) if cores > 4 else cores
        return {
            "scheduling": self.job + self.task * cores,
            "rows": (self.scan * rows + self.row * batch) / cores,
            "bytes": gathered * DOUBLE * weights / BANDWIDTH if over_network else 0.0,
        }

    def mini_batch_s(self, rows: int, batch: int, weights: int, cores: int, *, over_network: bool = True) -> float:
        return sum(self.parts(rows, batch, weights, cores, over_network=over_network).values())


@dataclass(frozen=True)
class ServerCosts:
    """step: of a worker's step and its round trip whatever it computes; push: of the server, a push; row: of a row of the
    mini-batch, on one core. Seconds."""

    step: float
    push: float
    row: float

    def parts(
        self, batch: int, weights: int, cores: int, workers: int, *, over_network: bool = True
    ) -> dict[str, float]:
        """Seconds of a synchronous mini-batch by what they go to."""
        return {
            "workers": self.step + self.row * batch / cores,
            "server": workers * self.push,
            "bytes": workers * 2 * FLOAT * weights / BANDWIDTH if over_network else 0.0,
        }

    def mini_batch_s(
        self, batch: int, weights: int, cores: int, workers: int, *, synchronous: bool, over_network: bool = True
    ) -> float:
        parts = self.parts(batch, weights, cores, workers, over_network=over_network)
        served = parts["server"] + parts["bytes"]
        return parts["workers"] + served if synchronous else max(parts["workers"] + self.push, served)


def fit_spark(samples: Sequence[Sample], cores: int, task: float) -> SparkCosts:
    """Least squares with no negative cost; relative errors count. Needs three samples that differ in batch and rows."""
    terms = [[1.0, s.rows / cores, s.batch / cores] for s in samples]
    job, scan, row = _fit(terms, [s.seconds - task * cores for s in samples])
    return SparkCosts(job, task, scan, row)


def fit_server(samples: Sequence[Sample], cores: int, push: float) -> ServerCosts:
    """The same, for the synchronous protocol with a worker for each core."""
    terms = [[1.0, s.batch / cores] for s in samples]
    step, row = _fit(terms, [s.seconds - push * cores for s in samples])
    return ServerCosts(step, push, row)


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    scale = np.maximum(np.array(seconds), 1e-9)
    found, _ = nnls(np.array(terms) / scale[:, None], np.array(seconds) / scale)
    return tuple(float(value) for value in found)
