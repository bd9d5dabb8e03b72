"""The rule of early stopping: a run ends when the loss of its evaluations no longer falls. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def last_improvement(losses: Sequence[float], min_delta: float = 0.0) -> int | None:
    """Return the index of the last loss that is an improvement; None if there is none.

    The first finite loss is one, and each later loss that is lower than the loss of the last improvement by more than
    ``min_delta``. A loss that is not finite never is.

    losses: of the evaluations, in their order; min_delta: in the unit of the losses, at least 0."""
    best: int | None = None
    for index, loss in enumerate(losses):
        if math.isfinite(loss) and (best is None or loss < losses[best] - min_delta):
            best = index
    return best


def stops_now(losses: Sequence[float], patience: int, min_delta: float = 0.0) -> bool:
    """Return whether a run ends after its last evaluation: ``patience`` evaluations in a row were no improvement."""
    best = last_improvement(losses, min_delta)
    without = len(losses) if best is None else len(losses) - 1 - best
    return without >= patience
