"""``spl``, self-paced learning: examples that are not too hard yet, the harder the more often."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Floats, Ints
from trainer.gossip.losses import RecordedLosses, draw_by_weight

FIRST_THRESHOLD = 0.1
GROWTH = 1.2  # of the threshold, per epoch
MOST_GROWTH = 500  # epochs, after which every loss is below the threshold
LEAST_WEIGHT = 1e-300  # of an eligible row without any loss, so large that no draw by weights overflows


def spl(losses: RecordedLosses, size: int, epoch: int, rng: np.random.Generator) -> Ints:
    """Select rows below a threshold in proportion to their losses, and fill up with random ones.

    The authors' program takes a position among the rows below the threshold for a position among all rows, and fails with
    fewer than ``size`` such rows."""
    return draw_by_weight(spl_weights(losses.last, epoch), size, rng)


def spl_weights(last: Floats, epoch: int) -> Floats:
    """Return the weight of each row: its loss if that is below the threshold, else 0. last: float64 [N], may be NaN."""
    is_eligible = last < FIRST_THRESHOLD * GROWTH ** min(epoch, MOST_GROWTH)
    # An eligible row without any loss comes before those that are not eligible.
    return np.where(is_eligible, np.maximum(last, LEAST_WEIGHT), 0.0)
