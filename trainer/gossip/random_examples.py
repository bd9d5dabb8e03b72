"""``random``: examples whatever their losses."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Ints
from trainer.gossip.losses import RecordedLosses


def random_examples(losses: RecordedLosses, size: int, epoch: int, rng: np.random.Generator) -> Ints:
    """Select rows at random, each set of ``size`` rows with the same probability."""
    rows: Ints = rng.permutation(len(losses))[:size]
    return rows
