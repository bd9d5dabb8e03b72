"""The exchange of examples among workers: which examples a worker gives, and when it trains on foreign ones. Pure.

A worker has examples of its own. Once per pass over them it selects K, by its losses, and gives them to all others. The
examples of all others are its pool, of which it trains on a mini-batch after every F mini-batches of its own. Wenig and
Papenbrock, "DataGossip: A Data Exchange Extension for Distributed Machine Learning Algorithms", EDBT 2022."""

from __future__ import annotations

from trainer.gossip.active_bias import ab, active_bias
from trainer.gossip.hard_examples import hem
from trainer.gossip.losses import ExampleSelector
from trainer.gossip.random_examples import random_examples
from trainer.gossip.self_paced import spl

STATIC = "static"  # the random draw of epoch 0 in every epoch
SELECTORS: dict[str, ExampleSelector] = {
    "random": random_examples,
    STATIC: random_examples,
    "hem": hem,
    "spl": spl,
    "ab": ab,
    "active-bias": active_bias,
}

__all__ = ["SELECTORS", "STATIC"]
