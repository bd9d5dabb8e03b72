"""Mini-batches of own rows, an axis of learning curves that depends on no machine. Pure.

A worker that exchanges examples also trains on mini-batches of other workers' rows, which count as steps of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.data import Data


def own_batches(epochs: Sequence[float], rows: int, keys: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the mean number of mini-batches of own rows that a worker has trained on, at some epochs of a run.

    With an exchange of examples, every step of the first epoch has own rows, and F of F + 1 steps afterwards: the first
    examples come when all workers have passed over their rows, or at once if they are also selected at the start. Where
    the speeds of workers differ, this is an approximation, because the ledger does not have the steps of the pools.

    Args:
        epochs: of the run.
        rows: distinct training rows.
        keys: flags of the run without their defaults, with underscores.
    """
    per_epoch = max(1, rows // int(keys.get("batch_size", Data.batch_size)))
    steps = [epoch * per_epoch for epoch in epochs]
    if not keys.get("gossip", Data.gossip):
        return tuple(steps)
    every = int(keys.get("gossip_every", Data.gossip_every))
    first = 0 if keys.get("gossip_signal", Data.gossip_signal) == "start" else per_epoch
    return tuple(min(step, first) + max(0.0, step - first) * every / (every + 1) for step in steps)
