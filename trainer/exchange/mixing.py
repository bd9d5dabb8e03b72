"""Mixing: which workers average their models with which neighbours in a round, and with which weights.

Pure functions of the seed and the round, so that all workers know the edges of a round without a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Floats
from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from trainer.exchange.link_weights import (
    SampledGraph,
    constant_weight,
    contraction,
    eigenvalues,
    equal_weight,
    extremes,
)
from trainer.exchange.matchings import Matching, are_interchangeable, find_matchings
from trainer.exchange.topologies import EXPONENTIAL, ONE_PEER, RANDOM_PAIR, Link, build_links, check_workers, complete

Edge = tuple[int, int, float]
Neighbours = Mapping[int, tuple[tuple[int, float], ...]]
Vector = npt.NDArray[np.float32]

PAIR_WEIGHT = 0.5  # both models of a pair become their mean
ROUNDING = 1e-12  # smaller eigenvalues are 0
CHUNK = 1 << 16  # elements that mix() computes at once, so that they stay in the cache


class TopologyPlan(Protocol):
    """The edges of every round, and how often each link is used."""

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        ...

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the edges in use in a round, ascending; none means that no worker sends a byte.

        An edge (i, j, weight), i < j, moves both models towards each other: x_i by weight * (x_j - x_i), and x_j by
        weight * (x_i - x_j), both with the values from before the round. A pure function of the seed and the round."""
        ...

    @property
    def every(self) -> int:
        """Return the rounds from one exchange to the next; round 0 has an exchange."""
        ...

    def shares(self) -> tuple[Edge, ...]:
        """Return each link (i, j) with the mean share of exchanges that use it, as (i, j, share)."""
        ...

    def contraction(self) -> float:
        """Return s: an exchange multiplies the squared distance of the models from their mean by at most s, on average.

        s is the largest eigenvalue of the mean of W'W - J; for a plan that repeats a cycle, its mean per exchange."""
        ...


def mix(own: Vector, others: Iterable[tuple[float, Vector]], out: Vector | None = None) -> Vector:
    """Return own + sum of weight * (other - own), added in the given order.

    Element by element in float32 and without BLAS, so that every host computes the same bits. Both ends of an edge
    compute the same change with opposite signs, which keeps the mean up to rounding.

    Args:
        own: a worker's model, float32 [elements].
        others: weight and model of each neighbour, in the order of their indices.
        out: receives the result; must not be ``own`` or a model of ``others``. A new array by default.
    """
    mixed = np.empty_like(own) if out is None else out
    weighted = [(np.float32(weight), other) for weight, other in others]
    change = np.empty(min(CHUNK, len(own)), np.float32)
    for begin in range(0, len(own), CHUNK):
        part = slice(begin, min(begin + CHUNK, len(own)))
        start = own[part]
        moved = mixed[part]
        step = change[: len(start)]
        np.copyto(moved, start)
        # Separate operations: a fused multiply-add would round once instead of twice, and only on some processors.
        for weight, other in weighted:
            np.subtract(other[part], start, out=step)
            np.multiply(step, weight, out=step)
            np.add(moved, step, out=moved)
    return mixed


def mix_parameters(own: Vector, others: Iterable[tuple[float, Vector]], num_parameters: int) -> Vector:
    """Return a worker's model, float32 [P + Q], with its parameters mixed and its own BatchNorm statistics.

    others: see ``mix``; elements beyond the parameters are ignored. num_parameters: P."""
    mixed = np.empty_like(own)
    mix(own[:num_parameters], others, out=mixed[:num_parameters])
    mixed[num_parameters:] = own[num_parameters:]
    return mixed


@lru_cache(maxsize=64)
def links_by_worker(edges: tuple[Edge, ...]) -> Neighbours:
    """Return the neighbours of each worker that has any, in ascending order, with the weights of their links."""
    neighbours: dict[int, list[tuple[int, float]]] = {}
    for i, j, weight in edges:
        neighbours.setdefault(i, []).append((j, weight))
        neighbours.setdefault(j, []).append((i, weight))
    return {worker: tuple(sorted(links)) for worker, links in neighbours.items()}


@dataclass(frozen=True)
class FullMixing:
    """D-PSGD (Lian et al. 2017): every link in each exchange.

    Attributes:
        num_workers: number of workers.
        links: the links of the topology.
        weight: weight of each link.
        s: see ``TopologyPlan.contraction``.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    links: tuple[Link, ...]
    weight: float
    s: float
    every: int = 1

    def edges(self, round: int) -> tuple[Edge, ...]:
        return () if round % self.every else self._edges

    def shares(self) -> tuple[Edge, ...]:
        return tuple((i, j, 1.0) for i, j in self.links)

    def contraction(self) -> float:
        """Return the square of the second largest absolute eigenvalue of W."""
        return self.s

    @cached_property
    def _edges(self) -> tuple[Edge, ...]:
        return tuple((i, j, self.weight) for i, j in self.links)


@dataclass(frozen=True)
class SampledMatchings:
    """MATCHA (Wang et al. 2019): in each exchange, each matching is in use with its own probability.

    Where lambda_2 is a multiple eigenvalue, other processors and libraries can find probabilities that differ in the
    third digit and are as good. The workers of a run must have the same: one host computes them, and
    ``dataclasses.replace`` makes the plan of another host equal to it.

    Attributes:
        num_workers: number of workers.
        matchings: the matchings of the topology, M of them.
        probabilities: of the matchings.
        weight: weight of each link in use.
        s: see ``TopologyPlan.contraction``.
        seed: the run's seed.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    matchings: tuple[Matching, ...]
    probabilities: tuple[float, ...]
    weight: float
    s: float
    seed: int
    every: int = 1

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the edges of the matchings that are drawn for a round with an exchange."""
        if round % self.every:
            return ()
        is_used = generator(self.seed, Purpose.LINKS, number=round).random(len(self.matchings)) < self.probabilities
        links = [link for matching, use in zip(self.matchings, is_used, strict=True) if use for link in matching]
        return tuple((i, j, self.weight) for i, j in sorted(links))

    def shares(self) -> tuple[Edge, ...]:
        pairs = zip(self.matchings, self.probabilities, strict=True)
        return tuple(sorted((i, j, probability) for matching, probability in pairs for i, j in matching))

    def contraction(self) -> float:
        return self.s


@dataclass(frozen=True)
class MatchingCycle:
    """A hypercube with one neighbour per exchange: one matching per exchange, in turn, with weight 1/2.

    For a power of two, all matchings give the exact mean, as the one-peer exponential graph of Ying et al. (2021) does.
    That graph is directed and has a neighbour for every worker; for other numbers of workers it averages faster.

    Attributes:
        num_workers: number of workers.
        matchings: the matchings of the topology.
        every: rounds from one exchange to the next.
    """

    num_workers: int
    matchings: tuple[Matching, ...]
    every: int = 1

    def edges(self, round: int) -> tuple[Edge, ...]:
        """Return the edges of the matching whose turn it is."""
        if round % self.every or not self.matchings:
            return ()
        # Counted in exchanges: counted in rounds, an even ``every`` would leave out every second matching for good.
        matching = self.matchings[round // self.every % len(self.matchings)]
        return tuple((i, j, PAIR_WEIGHT) for i, j in matching)

    def shares(self) -> tuple[Edge, ...]:
        return tuple(sorted((i, j, 1 / len(self.matchings)) for matching in self.matchings for i, j in matching))

    def contraction(self) -> float:
        """Return s as the geometric mean per exchange over a cycle. O(N^3).

        0 for a power of two, because a cycle then leaves all models equal to their mean."""
        product: Floats = np.eye(self.num_workers) - 1 / self.num_workers
        for matching in self.matchings:
            low, high = np.transpose(matching)
            product[low] += PAIR_WEIGHT * (product[high] - product[low])
            product[high] = product[low]
        largest = float(eigenvalues(product.T @ product)[-1])
        return largest ** (1 / len(self.matchings)) if self.matchings and largest > ROUNDING else 0.0


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
    every: int = 1

    def edges(self, round: int) -> tuple[Edge, ...]:
        if round % self.every:
            return ()
        order = generator(self.seed, Purpose.LINKS, number=round).permutation(self.num_workers).tolist()
        pairs = zip(order[::2], order[1::2], strict=False)
        return tuple(sorted((min(pair), max(pair), PAIR_WEIGHT) for pair in pairs))

    def shares(self) -> tuple[Edge, ...]:
        return tuple((i, j, self._share) for i, j in complete(self.num_workers))

    def contraction(self) -> float:
        """Return s. Here W'W = W, and the mean of W is I - share/2 * Laplacian of the complete graph."""
        return 1 - self._share * self.num_workers / 2 if self.num_workers > 1 else 0.0

    @property
    def _share(self) -> float:
        pairs = self.num_workers * (self.num_workers - 1) / 2
        return self.num_workers // 2 / pairs


def build_plan(
    topology: str, num_workers: int, seed: int, *, budget: float | None = None, every: int = 1
) -> TopologyPlan:
    """Return the plan of a topology.

    Without a budget, W = I - alpha * Laplacian with alpha = 2 / (lambda_2 + lambda_max). On a ring this is not D-PSGD's
    1/3 but the constant weight with which averaging converges fastest (8 workers: 0.436, the second largest absolute
    eigenvalue of W 0.745 instead of 0.805). It is one rule for all topologies, and MATCHA with budget 1 equals it.

    With a budget, the probabilities and the weight are computed to 6 digits: at most 0.5 s for up to 100 workers, and
    half a minute for 1,000 workers on an irregular graph.

    Args:
        topology: a name of GRAPHS, or the path of a file of links.
        num_workers: number of workers.
        seed: the run's seed.
        budget: MATCHA's mean share of the matchings to use, above 0 and up to 1; None uses all links.
        every: rounds from one exchange to the next; round 0 has one.

    Raises UsageError for values that do not fit together.
    """
    if every < 1:
        raise UsageError(f"--every must be at least 1, got {every}")
    if budget is not None and not 0 < budget <= 1:
        raise UsageError(f"--budget must be above 0 and at most 1, got {budget:g}")
    if topology in ONE_PEER and budget is not None:
        raise UsageError(
            f"--topology {topology} has a single matching per exchange, of which matcha can draw no share: give --exchange"
            " d-psgd"
        )
    if topology == RANDOM_PAIR:
        check_workers(num_workers)
        return RandomPairs(num_workers, seed, every)
    links = build_links(topology, num_workers)
    if topology == EXPONENTIAL:
        return MatchingCycle(num_workers, find_matchings(topology, num_workers, links), every)
    if not links:  # a single worker
        return FullMixing(num_workers, links, weight=0.0, s=0.0, every=every)
    spectrum = extremes(topology, num_workers, links)
    if budget is None or budget == 1:  # MATCHA then uses all links, always
        weight = constant_weight(*spectrum)
        return FullMixing(num_workers, links, weight, contraction(weight, *spectrum), every)
    matchings = find_matchings(topology, num_workers, links)
    graph = SampledGraph(matchings, num_workers)
    if are_interchangeable(topology, num_workers):
        probabilities = graph.equal_probabilities(budget)
        weight, s = equal_weight(budget, *spectrum)
    else:
        probabilities = graph.best_probabilities(budget)
        weight, s = graph.best_weight(probabilities)
    return SampledMatchings(num_workers, matchings, tuple(probabilities.tolist()), weight, s, seed, every)
