"""Mixing: which workers average their models with which neighbours in a round, and with which weights.

Pure functions of the seed and the round, so that all workers know the edges of a round without a message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from trainer.exchange.link_weights import constant_weight, extremes
from trainer.exchange.matchings import Matching, find_matchings
from trainer.exchange.topologies import EXPONENTIAL, RANDOM_PAIR, Link, build_links

Edge = tuple[int, int, float]
Vector = npt.NDArray[np.float32]

PAIR_WEIGHT = 0.5  # a pair's models meet in their mean


class MixingPlan(Protocol):
    """The edges of every round."""

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        ...

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the edges in use in a round, ascending; none means that no worker sends a byte.

        An edge (i, j, weight), i < j, moves both models towards each other: x_i by weight * (x_j - x_i), and x_j by
        weight * (x_i - x_j), both with the values from before the round. A pure function of the seed and the round."""
        ...


def mix(own: Vector, others: Iterable[tuple[float, Vector]], out: Vector | None = None) -> Vector:
    """Return own + sum of weight * (other - own), added in the given order.

    Element by element in float32 and without BLAS, so that every host computes the same bits. Both ends of an edge
    add the same numbers with opposite signs, which keeps the mean up to rounding.

    Args:
        own: a worker's model, float32 [elements].
        others: weight and model of each neighbour, in the order of their indices.
        out: receives the result; must not be ``own`` or a model of ``others``. A new array by default.
    """
    mixed = np.empty_like(own) if out is None else out
    np.copyto(mixed, own)
    change = np.empty_like(own)
    for weight, other in others:
        np.subtract(other, own, out=change)
        np.multiply(change, np.float32(weight), out=change)
        np.add(mixed, change, out=mixed)
    return mixed


@dataclass(frozen=True)
class FullMixing:
    """D-PSGD (Lian et al. 2017): every link in each round that is a multiple of ``every``.

    Attributes:
        num_workers: number of workers.
        links: the links of the topology.
        weight: weight of each link.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    links: tuple[Link, ...]
    weight: float
    every: int

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return all edges if the round is one with an exchange."""
        return () if round % self.every else self._all

    @cached_property
    def _all(self) -> tuple[Edge, ...]:
        return tuple((i, j, self.weight) for i, j in self.links)


@dataclass(frozen=True)
class MatchingCycle:
    """The one-peer exponential graph (Ying et al. 2021): one matching per exchange, in turn, with weight 1/2.

    Attributes:
        num_workers: number of workers.
        matchings: the matchings of the topology.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    matchings: tuple[Matching, ...]
    every: int

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the edges of the matching whose turn it is."""
        if round % self.every or not self.matchings:
            return ()
        # Counted in exchanges: counted in rounds, an even ``every`` would leave out every second matching for good.
        matching = self.matchings[round // self.every % len(self.matchings)]
        return tuple((i, j, PAIR_WEIGHT) for i, j in matching)


@dataclass(frozen=True)
class RandomPairs:
    """Random pairs of workers, drawn anew for each exchange (NoLoCo, Kolehmainen et al. 2025), with weight 1/2.

    Attributes:
        num_workers: number of workers; one pauses in each exchange if it is odd.
        seed: the run's seed.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    seed: int
    every: int

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the pairs of a round."""
        if round % self.every:
            return ()
        order = generator(self.seed, Purpose.LINKS, number=round).permutation(self.num_workers).tolist()
        pairs = zip(order[::2], order[1::2], strict=False)
        return tuple(sorted((min(pair), max(pair), PAIR_WEIGHT) for pair in pairs))


def build_plan(
    topology: str, num_workers: int, seed: int, *, budget: float | None = None, every: int = 1
) -> MixingPlan:
    """Return the plan of a topology.

    Without a budget, W = I - alpha * Laplacian with alpha = 2 / (lambda_2 + lambda_max). On a ring this is not D-PSGD's
    1/3 but the constant weight with which averaging converges fastest (8 workers: 0.436, the second largest absolute
    eigenvalue of W 0.745 instead of 0.805). It is one rule for all topologies, and MATCHA with budget 1 equals it.

    Args:
        topology: a name of GRAPHS, or the path of a file of links.
        num_workers: number of workers.
        seed: the run's seed.
        budget: MATCHA's share of the links to use, above 0 and up to 1; None uses all links.
        every: rounds from one exchange to the next; round 0 has one.

    Raises UsageError for values that do not fit together.
    """
    if every < 1:
        raise UsageError(f"--every must be at least 1, got {every}")
    links = build_links(topology, num_workers)
    if budget is not None:
        raise UsageError("--budget has no plan yet")
    if topology == RANDOM_PAIR:
        return RandomPairs(num_workers, seed, every)
    if topology == EXPONENTIAL:
        return MatchingCycle(num_workers, find_matchings(topology, num_workers, links), every)
    weight = constant_weight(*extremes(links, num_workers)) if links else 0.0
    return FullMixing(num_workers, links, weight, every)
