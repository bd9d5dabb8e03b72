"""The empirical rule of Strategy-Switch: when a run goes over to asynchronous updates. Pure.

The thesis switches after the first epoch k with s_k below a threshold, where s_k is the mean relative change of the
validation loss over the last epochs: s_k = 100 / w * sum over j < w of |v(k-j) - v(k-j-1)| / v(k-j-1), for w = 5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

WINDOW = 5
THRESHOLD = 1.0


def has_relative_change(losses: Sequence[float]) -> bool:
    """Return whether every loss is a positive finite number, so that its relative change is defined."""
    return all(math.isfinite(loss) and loss > 0 for loss in losses)


def mean_change(losses: Sequence[float], window: int = WINDOW) -> float:
    """Return s_k in percent, the mean relative change of the last ``window`` + 1 losses.

    Infinite if there are fewer, or if one of them is not a positive finite number.

    losses: one per epoch, v(1) to v(k)."""
    recent = losses[-window - 1 :]
    if len(recent) <= window or not has_relative_change(recent):
        return math.inf
    changes = [abs(after - before) / before for before, after in pairwise(recent)]
    return 100 * math.fsum(changes) / window


def switches_now(losses: Sequence[float], epochs: float, window: int = WINDOW, threshold: float = THRESHOLD) -> bool:
    """Return whether a run that has not switched before switches after its last epoch so far.

    It does if the mean change is below the threshold, unless the run ends with that epoch.

    Args:
        losses: one per epoch so far.
        epochs: length of the run.
        window: changes in the mean.
        threshold: in percent.
    """
    return len(losses) < epochs and mean_change(losses, window) < threshold
