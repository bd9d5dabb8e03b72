"""``hem``, hard example mining: the examples of the greatest losses."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Ints
from trainer.gossip.losses import RecordedLosses


def hem(losses: RecordedLosses, size: int, epoch: int, rng: np.random.Generator) -> Ints:
    """Select the rows of the greatest most recent losses, the first ones of equals; rows without any are last."""
    # The authors' program sorts NaN, the loss of such a row, before all others.
    rows: Ints = np.argsort(np.where(np.isnan(losses.last), np.inf, -losses.last), kind="stable")[:size]
    return rows
