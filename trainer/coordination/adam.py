"""Adam on one server's range of the model (Kingma and Ba 2015), with the update of torch.optim.Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from trainer.coordination.parameter_slice import ParameterSlice, Vector

SECOND_DECAY = 0.999
EPSILON = 1e-8


@dataclass
class AdamSlice(ParameterSlice):
    """A range of the model that Adam updates by the mean gradient of each update.

    The two moments of a parameter are neighbours in ``momentum``, so that any range of the parameters has its moments in
    one range. The decay of the first one is the coefficient of momentum.
    """

    slots: ClassVar[int] = 2
    _learning_rate: float = field(default=0.0, init=False, repr=False)

    def _begin_update(self, rate: float, count: int, scale: float) -> float:
        """Return the factor of the mean. The rate of an update of k gradients is k times the rate of each of them.

        The scale belongs to the mean alone: such an optimiser hardly depends on the length of the gradient."""
        super()._begin_update(rate, count, scale)
        self._learning_rate = rate * count
        return scale / count

    def _step(self, span: slice, update: Vector) -> None:
        """Apply a mean gradient to a span of the parameters. Overwrites ``update``."""
        first = self.momentum[0 :: self.slots][span]
        second = self.momentum[1 :: self.slots][span]
        first += (update - first) * (1 - self.rule.decay)
        second *= SECOND_DECAY
        update *= update
        update *= 1 - SECOND_DECAY
        second += update
        # Both moments start at 0, which the two corrections make up for.
        step = self._learning_rate / (1 - self.rule.decay**self.updates)
        root = (second**0.5) / math.sqrt(1 - SECOND_DECAY**self.updates)
        root += EPSILON
        self.values[span] -= step * (first / root)
