"""One server's part of the model: a contiguous range of the flat vector, its momentum, and the update rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]

CHUNK = 1 << 15  # floats worked on at a time: parameters, momentum and scratch stay in the second-level cache


@dataclass
class ParameterSlice:
    """values: parameters, then BatchNorm's running statistics, of this range; momentum: one element a parameter.

    Gradients may be added to the sum of the next update as they come; ``values`` changes with the update only.
    Not safe for use by several threads: a server has one."""

    values: Vector
    momentum: Vector
    coefficient: float
    num_workers: int
    statistics: Literal["ema", "last"]
    _sum: Vector | None = field(default=None, init=False, repr=False)  # like values; its memory stays for the next one
    _is_begun: bool = field(default=False, init=False, repr=False)

    @property
    def num_parameters(self) -> int:
        return len(self.momentum)

    def accumulate(self, pushed: Sequence[Vector], weights: Sequence[float]) -> None:
        """Add weighted gradients to the sum of the next update, in the given order. They are read once.

        pushed: for every gradient a vector like ``values``: gradients of the parameters, then the worker's running
        statistics."""
        if not pushed:
            return
        if self._sum is None or self._sum.dtype != self.values.dtype:
            self._sum = np.empty_like(self.values)
        total = self._sum
        if not self._is_begun:
            total[self.num_parameters :] = self.values[self.num_parameters :]
        for span in self._spans():
            _add(total[span], [vector[span] for vector in pushed], weights, begun=self._is_begun)
        self._merge_statistics(total, pushed)
        self._is_begun = True

    def apply(self, pushed: Sequence[Vector], rate: float, weights: Sequence[float]) -> None:
        """One update of all protocols: u = rate * sum of weighted gradients, m = coefficient*m + u, w -= m.

        pushed: the gradients that come last, as in ``accumulate``. Where they are all, one pass over memory does it,
        whatever their number; the result is the same bit for bit."""
        if self._is_begun:
            self.accumulate(pushed, weights)
            assert self._sum is not None
            self.values[self.num_parameters :] = self._sum[self.num_parameters :]
            self._is_begun = False
            for span in self._spans():
                self._sum[span] *= rate
                self._step(span, self._sum[span])
            return
        for span in self._spans():
            self._step(span, _scaled_sum([vector[span] for vector in pushed], weights, rate))
        self._merge_statistics(self.values, pushed)

    def _step(self, span: slice, update: Vector) -> None:
        self.momentum[span] *= self.coefficient
        self.momentum[span] += update
        self.values[span] -= self.momentum[span]

    def _spans(self) -> Iterator[slice]:
        for start in range(0, self.num_parameters, CHUNK):
            yield slice(start, min(start + CHUNK, self.num_parameters))

    def _merge_statistics(self, into: Vector, pushed: Sequence[Vector]) -> None:
        running = into[self.num_parameters :]
        if not len(running):
            return
        for statistics in (vector[self.num_parameters :] for vector in pushed):
            if self.statistics == "last" or self.num_workers == 1:
                running[:] = statistics
            else:
                running += (statistics - running) / self.num_workers


def _scaled_sum(vectors: Sequence[Vector], weights: Sequence[float], rate: float) -> Vector:
    """rate * sum of weighted vectors; a single one of weight 1, which is every update of asp and ssp, in one pass."""
    if len(vectors) == 1 and weights[0] == 1:
        return vectors[0] * rate
    total = np.empty_like(vectors[0])
    _add(total, vectors, weights, begun=False)
    total *= rate
    return total


def _add(total: Vector, vectors: Sequence[Vector], weights: Sequence[float], *, begun: bool) -> None:
    """Add weighted vectors to a sum, in order; begun: whether it has any yet."""
    for vector, weight in zip(vectors, weights, strict=True):
        if begun:
            total += vector * weight if weight != 1 else vector
        elif weight != 1:
            np.multiply(vector, weight, out=total)
        else:
            total[:] = vector
        begun = True
