"""The steps that a worker makes on a copy of the parameters of its own between two pushes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from trainer.coordination.parameter_slice import Vector


class LocalPlan(NamedTuple):
    """The mini-batches whose gradients a worker sums for its next push.

    Attributes:
        rates: factor by which the gradient of each of them moves the worker's copy; the last one is not used.
        statistics: see ParameterSlice.
    """

    rates: tuple[float, ...]
    statistics: Literal["changes", "whole"]


ONE_STEP = LocalPlan((0.0,), "changes")


class LocalCopy:
    """A worker's copy of the parameters, and the sum of the gradients since its last push.

    Args:
        values: float32 [P + Q], the parameters and statistics that it has pulled; copied.
        num_parameters: P.
        statistics: see ParameterSlice.
        owned: range of entries whose changes are pushed as multiples, because the servers divide them, and the multiple;
            None for none.

    Attributes:
        values: the copy.
        total: float32 [P + Q], the sum of the gradients. BatchNorm's statistics in it are the sum of their changes, or
            the last ones.
    """

    def __init__(
        self,
        values: Vector,
        num_parameters: int,
        statistics: Literal["changes", "whole"],
        owned: tuple[slice, int] | None = None,
    ) -> None:
        self.values = values.copy()
        self.total = np.zeros_like(values)
        self._parameters = slice(0, num_parameters)
        self._statistics = slice(num_parameters, len(values))
        self._is_whole = statistics == "whole"
        self._owned = owned

    def add(self, pushed: Vector, rate: float) -> None:
        """Add a gradient, and move the copy by it. pushed: float32 [P + Q]; rate: its factor."""
        self.total[self._parameters] += pushed[self._parameters]
        self.values[self._parameters] -= pushed[self._parameters] * rate
        if self._is_whole:
            self.total[self._statistics] = self.values[self._statistics] = pushed[self._statistics]
            return
        self.total[self._statistics] += pushed[self._statistics]
        if self._owned:
            span, multiple = self._owned
            pushed = pushed.copy()
            pushed[span] /= multiple
        self.values[self._statistics] += pushed[self._statistics]
