"""``ab`` and ``active-bias``: examples whose losses vary most."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Ints
from trainer.gossip.losses import RecordedLosses, draw_by_weight


def ab(losses: RecordedLosses, size: int, epoch: int, rng: np.random.Generator) -> Ints:
    """Select rows in proportion to the variance of their losses, as in the paper, and fill up with random ones."""
    return draw_by_weight(losses.variances(), size, rng)


def active_bias(losses: RecordedLosses, size: int, epoch: int, rng: np.random.Generator) -> Ints:
    """Select rows in proportion to sqrt(v + v^2 / t), with the variance v of t losses, and fill up with random ones.

    It is the weight of the authors' program, after Chang, Learned-Miller and McCallum, "Active Bias", NeurIPS 2017."""
    variances = losses.variances()
    return draw_by_weight(np.sqrt(variances + variances**2 / np.maximum(losses.counts, 1)), size, rng)
