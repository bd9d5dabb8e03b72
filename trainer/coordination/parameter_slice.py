"""The part of the model on one server: a contiguous range of the flat vector, its momentum, and the update rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from trainer.coordination.momentum import Momentum

Vector = npt.NDArray[np.floating[Any]]

CHUNK = 1 << 15  # floats per step, so that parameters, momentum and scratch fit into the second-level cache


@dataclass
class ParameterSlice:
    """A range of the model with its update rule. Not thread-safe: a server has one thread.

    Gradients may be added to the sum of the next update as they arrive; ``values`` only changes with the update.

    Attributes:
        values: parameters of the range, then BatchNorm's running statistics.
        momentum: the state of the update rule, ``slots`` neighbouring elements per parameter.
        rule: the momentum rule.
        num_workers: n.
        statistics: the form in which workers push BatchNorm's running statistics. "changes": their change by one step,
            which is added with the factor 1/n, so that all workers together move them like one process. "whole": the
            statistics themselves, whose mean over the gradients of an update replaces the old ones.
        updates: number of updates that made ``values``.
        slots: elements of ``momentum`` per parameter.
    """

    slots: ClassVar[int] = 1

    values: Vector
    momentum: Vector
    rule: Momentum
    num_workers: int
    statistics: Literal["changes", "whole"]
    updates: int = 0
    _sum: Vector | None = field(default=None, init=False, repr=False)  # like values; reused by the next update
    _summed: int = field(default=0, init=False, repr=False)  # gradients in it

    @property
    def num_parameters(self) -> int:
        return len(self.momentum) // self.slots

    def restart(self, updates: int) -> None:
        """Continue with values and momentum that were replaced in place. updates: number of updates that made them."""
        self.updates = updates

    def accumulate(self, gradients: Sequence[Vector], weights: Sequence[float]) -> None:
        """Add weighted gradients to the sum of the next update, in the given order. Reads each gradient once.

        Args:
            gradients: a vector like ``values`` per gradient: the gradient of the parameters, then the pushed statistics.
            weights: one factor per gradient, which does not apply to statistics.
        """
        if not gradients:
            return
        if self._sum is None or self._sum.dtype != self.values.dtype:
            self._sum = np.empty_like(self.values)
        total = self._sum
        add_pushed(total, gradients, weights, self.num_parameters, is_begun=self._summed > 0)
        self._summed += len(gradients)

    def apply_sum(self, sums: Sequence[Vector], rate: float, count: int, scale: float = 1.0) -> None:
        """Make an update from a sum of weighted gradients that ``add_pushed`` made elsewhere.

        The result has the bits of ``apply`` with the same gradients.

        Args:
            sums: the sum, a vector like ``values``, as the vectors of its ranges in order. They are not changed.
            rate: the learning rate per gradient, a/n.
            count: gradients in the sum.
            scale: the factor of the sum that undoes the size of its weights (see Weights.correction).
        """
        factor = self._begin_update(rate, count, scale)
        total = _Ranges(sums)
        for span in self._spans():
            self._step(span, total[span] * factor)
        self._merge_statistics(total[self._statistics], count)

    def apply(self, gradients: Sequence[Vector], rate: float, weights: Sequence[float], scale: float = 1.0) -> None:
        """Make an update: u = rate * scale * sum of weighted gradients, applied by the momentum rule.

        Gradients of earlier calls of ``accumulate`` are part of the sum. If there are none, the update takes one pass
        over memory, with bit-identical results.

        Args:
            gradients, weights: the last gradients of the update, as in ``accumulate``.
            rate, scale: as in ``apply_sum``.
        """
        # Earlier orders have begun a sum, which costs a pass over memory of its own. Otherwise each chunk is summed,
        # scaled and applied while it is in the cache.
        if self._summed:
            self.accumulate(gradients, weights)
            assert self._sum is not None
            self.apply_sum([self._sum], rate, self._summed, scale)
            self._summed = 0
            return
        factor = self._begin_update(rate, len(gradients), scale)
        for span in self._spans():
            self._step(span, _scaled_sum([vector[span] for vector in gradients], weights, factor))
        # Neither the rate nor the factors apply to statistics, which are no gradients.
        if gradients and self.num_parameters < len(self.values):
            parts = [vector[self._statistics] for vector in gradients]
            self._merge_statistics(_scaled_sum(parts, [1.0] * len(parts), 1.0), len(parts))

    def _begin_update(self, rate: float, count: int, scale: float) -> float:
        """Count an update, and return the factor of the sum of its gradients that ``_step`` gets.

        rate, count, scale: as in ``apply_sum``."""
        self.updates += 1
        return rate * scale

    def _step(self, span: slice, update: Vector) -> None:
        """Apply an update to a span of the parameters, as Momentum says. Rules with ``at_once`` overwrite ``update``."""
        momentum = self.momentum[span]
        values = self.values[span]
        momentum *= self.rule.decay
        momentum += update
        if not self.rule.at_once:
            values -= momentum
        else:
            update *= self.rule.at_once
            update += momentum * self.rule.share
            values -= update

    def _spans(self) -> Iterator[slice]:
        return _chunks(self.num_parameters)

    @property
    def _statistics(self) -> slice:
        return slice(self.num_parameters, len(self.values))

    def _merge_statistics(self, total: Vector, count: int) -> None:
        """Merge statistics into ``values``. total: their sum over ``count`` gradients."""
        if self.statistics == "whole":
            self.values[self._statistics] = total / count
        else:
            self.values[self._statistics] += total / self.num_workers


def add_pushed(
    total: Vector, pushed: Sequence[Vector], weights: Sequence[float], num_parameters: int, *, is_begun: bool = False
) -> None:
    """Add weighted gradients to ``total``, in the given order. Reads each gradient once.

    Args:
        total: any range of the flat vector.
        pushed: the same range of each gradient: of the parameters, then the pushed statistics.
        weights: one factor per gradient, which does not apply to statistics.
        num_parameters: elements of the range that are parameters.
        is_begun: whether ``total`` holds a sum already, or else is overwritten.
    """
    for span in _chunks(num_parameters):
        _add(total[span], [vector[span] for vector in pushed], weights, is_begun=is_begun)
    rest = slice(num_parameters, len(total))
    _add(total[rest], [vector[rest] for vector in pushed], [1.0] * len(pushed), is_begun=is_begun)


class _Ranges:
    """Several vectors, read as if they were one behind another.

    A span inside of one of them is a view of it, because a vector of all would cost a copy of the whole model."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self._vectors = vectors
        self._ends = list(accumulate(map(len, vectors)))

    def __getitem__(self, span: slice) -> Vector:
        parts = []
        begin = span.start
        for number in range(bisect_right(self._ends, begin), len(self._vectors)):
            start = self._ends[number] - len(self._vectors[number])
            parts.append(self._vectors[number][begin - start : span.stop - start])
            begin = self._ends[number]
            if begin >= span.stop:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.float32)])


def _chunks(length: int) -> Iterator[slice]:
    for start in range(0, length, CHUNK):
        yield slice(start, min(start + CHUNK, length))


def _scaled_sum(vectors: Sequence[Vector], weights: Sequence[float], rate: float) -> Vector:
    """Return rate * sum of weighted vectors. A single vector of weight 1, as under asp, takes one pass over memory."""
    if len(vectors) == 1 and weights[0] == 1:
        return vectors[0] * rate
    total = np.empty_like(vectors[0])
    _add(total, vectors, weights, is_begun=False)
    total *= rate
    return total


def _add(total: Vector, vectors: Sequence[Vector], weights: Sequence[float], *, is_begun: bool) -> None:
    """Add weighted vectors to ``total``, in order.

    Args:
        total: the sum, float32 [elements].
        vectors: float32 [elements] each.
        weights: the weight of each vector.
        is_begun: whether ``total`` holds a sum already; otherwise it is overwritten.
    """
    for vector, weight in zip(vectors, weights, strict=True):
        if is_begun:
            total += vector * weight if weight != 1 else vector
        elif weight != 1:
            np.multiply(vector, weight, out=total)
        else:
            total[:] = vector
        is_begun = True
