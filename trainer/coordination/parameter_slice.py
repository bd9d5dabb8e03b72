"""One server's part of the model: a contiguous range of the flat vector, its momentum, and the update rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.coordination.momentum import Momentum

Vector = npt.NDArray[np.floating[Any]]

CHUNK = 1 << 15  # floats worked on at a time: parameters, momentum and scratch stay in the second-level cache


@dataclass
class ParameterSlice:
    """values: parameters, then BatchNorm's running statistics, of this range; momentum: one element a parameter.

    statistics: what workers push of theirs. changes: what a step made of those it began with, of which each of num_workers
    counts for 1/n, so that together they move them as one process would; whole: the statistics themselves, whose mean over
    an update's gradients replaces those from before.

    Gradients may be added to the sum of the next update as they come; ``values`` changes with the update only.
    Not safe for use by several threads: a server has one."""

    values: Vector
    momentum: Vector
    rule: Momentum
    num_workers: int
    statistics: Literal["changes", "whole"]
    _sum: Vector | None = field(default=None, init=False, repr=False)  # like values; its memory stays for the next one
    _summed: int = field(default=0, init=False, repr=False)  # gradients in it

    @property
    def num_parameters(self) -> int:
        return len(self.momentum)

    def accumulate(self, pushed: Sequence[Vector], weights: Sequence[float]) -> None:
        """Add weighted gradients to the sum of the next update, in the given order. They are read once.

        pushed: for every gradient a vector like ``values``: gradients of the parameters, then ``statistics``."""
        if not pushed:
            return
        if self._sum is None or self._sum.dtype != self.values.dtype:
            self._sum = np.empty_like(self.values)
        total, begun = self._sum, self._summed > 0
        for span in self._spans():
            _add(total[span], [vector[span] for vector in pushed], weights, begun=begun)
        _add(total[self._statistics], [vector[self._statistics] for vector in pushed], [1.0] * len(pushed), begun=begun)
        self._summed += len(pushed)

    def apply(self, pushed: Sequence[Vector], rate: float, weights: Sequence[float]) -> None:
        """One update of all protocols: u = rate * sum of weighted gradients, which goes through momentum by its rule.

        pushed: the gradients that come last, as in ``accumulate``. Where they are all, one pass over memory does it,
        whatever their number; the result is the same bit for bit."""
        if self._summed:
            self.accumulate(pushed, weights)
            assert self._sum is not None
            for span in self._spans():
                self._sum[span] *= rate
                self._step(span, self._sum[span])
            self._merge_statistics(self._sum[self._statistics], self._summed)
            self._summed = 0
            return
        for span in self._spans():
            self._step(span, _scaled_sum([vector[span] for vector in pushed], weights, rate))
        if pushed and self.num_parameters < len(self.values):
            parts = [vector[self._statistics] for vector in pushed]
            self._merge_statistics(_scaled_sum(parts, [1.0] * len(parts), 1.0), len(parts))

    def _step(self, span: slice, update: Vector) -> None:
        """update is overwritten where momentum looks ahead."""
        self.momentum[span] *= self.rule.decay
        self.momentum[span] += update
        if not self.rule.at_once:
            self.values[span] -= self.momentum[span]
        else:
            update *= self.rule.at_once
            update += self.momentum[span] * self.rule.share
            self.values[span] -= update

    def _spans(self) -> Iterator[slice]:
        for start in range(0, self.num_parameters, CHUNK):
            yield slice(start, min(start + CHUNK, self.num_parameters))

    @property
    def _statistics(self) -> slice:
        return slice(self.num_parameters, len(self.values))

    def _merge_statistics(self, total: Vector, count: int) -> None:
        """total: the sum of what so many gradients brought."""
        if self.statistics == "whole":
            self.values[self._statistics] = total / count
        else:
            self.values[self._statistics] += total / self.num_workers


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
