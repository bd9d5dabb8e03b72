"""What the campaign of make chaos-shards does: runs and acts, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

ACTS = {
    "kill driver": 0.34,
    "kill python": 0.18,
    "kill executor": 0.12,
    "freeze driver": 0.12,
    "kill datanode": 0.14,
    "kill namenode": 0.1,
}
WAYS = (("file", "local"), ("hdfs", "local"), ("hdfs", "standalone"), ("s3", "local"))
MORE = 0.75  # the chance that a run meets another act


class Act(NamedTuple):
    """What is done next; when, as a share of an undisturbed run's time; to whom, as a share of all that are there."""

    kind: str
    moment: float
    whom: float


class Plan(NamedTuple):
    """One run: where its set is, what computes it, whether it is on a host of its own, whether clean is run after a kill."""

    store: str
    spark: str
    alone: bool
    tidied: bool
    acts: tuple[Act, ...]


def plans(seed: int) -> Iterator[Plan]:
    """An endless sequence, the same for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        store, spark = WAYS[int(rng.integers(len(WAYS)))]
        alone, tidied = rng.random(2) < 0.5
        kinds = {
            kind: share
            for kind, share in ACTS.items()
            if (store == "hdfs" or "node" not in kind)
            and (spark == "standalone" or "executor" not in kind)
            and (alone or "freeze" not in kind)  # on its own host a driver is known to live
        }
        chances = np.array(list(kinds.values())) / sum(kinds.values())
        acts: list[Act] = []
        while not acts or rng.random() < MORE:
            acts.append(Act(str(rng.choice(list(kinds), p=chances)), float(rng.beta(2, 1.4)), float(rng.random())))
        yield Plan(store, spark, bool(alone), bool(tidied), tuple(acts))
