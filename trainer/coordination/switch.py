"""The momentum at the switch from one stage of a run to the next."""

from __future__ import annotations

import numpy as np

from trainer.coordination.momentum import Momentum
from trainer.coordination.parameter_slice import Vector


def carry_momentum(
    values: Vector, momentum: Vector, before: Momentum, after: Momentum, factor: float
) -> tuple[Vector, Vector]:
    """Return values and momentum for the rule ``after``, of a model that was trained by the rule ``before``.

    The look-ahead rule keeps its parameters shifted to the point to which momentum will move them. The shift belongs to
    the momentum, so it changes with the momentum: otherwise the parameters would stay ahead of a momentum that is gone.

    Args:
        values: parameters, then statistics, which have no momentum and do not change.
        momentum: one element per parameter.
        before, after: the momentum rules.
        factor: of the momentum; 0 discards it.
    """
    carried = momentum * np.asarray(factor, momentum.dtype) if factor else np.zeros_like(momentum)
    shift = before.shift - after.shift * factor
    moved = values.copy()
    if shift:
        moved[: len(momentum)] += momentum * np.asarray(shift, values.dtype)
    return moved, carried
