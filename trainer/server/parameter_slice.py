"""One server's part of the model: a contiguous range of the flat vector, its momentum, and the update rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]

CHUNK = 1 << 15  # floats worked on at a time: parameters, momentum and scratch stay in the second-level cache


@dataclass
class ParameterSlice:
    """values: parameters, then BatchNorm's running statistics, of this range; momentum: one element a parameter.

    Not safe for use by several threads: a server has one."""

    values: Vector
    momentum: Vector
    coefficient: float
    num_workers: int
    statistics: Literal["ema", "last"]

    @property
    def num_parameters(self) -> int:
        return len(self.momentum)

    def apply(self, pushed: Sequence[Vector], rate: float, weights: Sequence[float]) -> None:
        """One update of all protocols: u = rate * sum of weighted gradients, m = coefficient*m + u, w -= m.

        pushed: for every gradient a vector like ``values``: gradients of the parameters, then the worker's running
        statistics. Summed in the given order. One pass over memory, whatever the number of gradients is."""
        for start in range(0, self.num_parameters, CHUNK):
            span = slice(start, min(start + CHUNK, self.num_parameters))
            update = _scaled_sum([vector[span] for vector in pushed], weights, rate)
            self.momentum[span] *= self.coefficient
            self.momentum[span] += update
            self.values[span] -= self.momentum[span]
        self._merge_statistics([vector[self.num_parameters :] for vector in pushed])

    def _merge_statistics(self, pushed: Sequence[Vector]) -> None:
        running = self.values[self.num_parameters :]
        if not len(running):
            return
        for statistics in pushed:
            if self.statistics == "last" or self.num_workers == 1:
                running[:] = statistics
            else:
                running += (statistics - running) / self.num_workers


def _scaled_sum(vectors: Sequence[Vector], weights: Sequence[float], rate: float) -> Vector:
    """rate * sum of weighted vectors; a single one, which is every update of asp and ssp, in one pass."""
    if len(vectors) == 1:
        return vectors[0] * (rate * weights[0])
    total = vectors[0] * weights[0] if weights[0] != 1 else vectors[0].copy()
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total += vector * weight if weight != 1 else vector
    total *= rate
    return total
