"""The weights and probabilities of D-PSGD and MATCHA, beside published vectors and an independent upper bound."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pipeline.core.arrays import Floats
from pipeline.core.errors import UsageError
from tests.support.graphs import connected_graphs, links_of, mixing_matrix
from trainer.exchange.link_weights import SampledGraph, constant_weight, extremes
from trainer.exchange.matcha import MATCHA
from trainer.exchange.matchings import Matching, are_interchangeable, find_matchings
from trainer.exchange.topologies import Link, build_links

GRAPHS = {
    "graph0": 8,
    "ring": 7,
    "torus": 15,
    "exponential": 12,
    "complete": 6,
}
FOREIGN = {
    "star": nx.star_graph(7),
    "barbell": nx.barbell_graph(5, 2),
    "petersen": nx.petersen_graph(),
    "random": nx.erdos_renyi_graph(20, 0.25, seed=1),
    "scale-free": nx.barabasi_albert_graph(40, 2, seed=1),
}


def matchings_of(name: str) -> tuple[int, tuple[Matching, ...]]:
    """The number of workers and the matchings of a graph of GRAPHS or FOREIGN."""
    num_workers = GRAPHS.get(name) or len(FOREIGN[name])
    links = build_links(name, num_workers) if name in GRAPHS else links_of(FOREIGN[name])
    return num_workers, find_matchings(name, num_workers, links)


def laplacians(matchings: Sequence[Matching], num_workers: int) -> Floats:
    """networkx's Laplacians of the matchings, [M, N, N]."""
    graphs = [nx.Graph(matching) for matching in matchings]
    for graph in graphs:
        graph.add_nodes_from(range(num_workers))
    return np.array(
        [nx.laplacian_matrix(graph, nodelist=range(num_workers)).toarray().astype(float) for graph in graphs]
    )


def upper_bound(
    matchings: Sequence[Matching], num_workers: int, budget: float, near: Floats, rounds: int = 40
) -> float:
    """A proven upper bound of lambda_2 over all probabilities, by cutting planes.

    lambda_2(p) <= v' L(p) v for every unit vector v with sum 0. The largest value under these linear bounds, a linear
    program for HiGHS, is an upper bound; its solution gives the next vectors. near: probabilities to begin with."""
    parts = laplacians(matchings, num_workers)
    cuts: list[Floats] = []
    bound = np.inf
    at = near
    for _ in range(rounds):
        mean = np.tensordot(at, parts, 1)
        values, vectors = np.linalg.eigh(mean + 2)
        if values[0] >= bound * (1 - 1e-5):
            break
        cuts += [np.einsum("i,mij,j->m", v, parts, v) for v in vectors.T[: min(8, num_workers - 1)]]
        size = len(matchings)
        found = linprog(
            [*np.zeros(size), -1],
            A_ub=[*([*-cut, 1] for cut in cuts), [*np.ones(size), 0]],
            b_ub=[*np.zeros(len(cuts)), budget * size],
            bounds=[*[(0, 1)] * size, (None, None)],
            method="highs",
        )
        bound = min(bound, -found.fun)
        # Beside the best point so far: the program's own solutions move far at each step.
        at = 0.9 * near + 0.1 * found.x[:size]
    return float(bound)


@pytest.mark.parametrize(
    ("topology", "lambda_2", "lambda_max", "alpha"),
    [("graph0", 0.670023, 6.329977, 0.285714), ("ring", 0.585786, 4, 0.436130)],
)
def test_spectra_and_weights_of_spec_vectors(topology: str, lambda_2: float, lambda_max: float, alpha: float) -> None:
    spectrum = extremes(topology, 8, build_links(topology, 8))
    assert spectrum == pytest.approx((lambda_2, lambda_max), abs=5e-7)
    assert constant_weight(*spectrum) == pytest.approx(alpha, abs=5e-7)


@pytest.mark.parametrize(
    ("topology", "budget", "probabilities", "weight", "s"),
    [
        ("graph0", 0.5, (0.9837, 0, 0.7581, 0.7581, 0), 0.3964, 0.6440),
        ("graph0", 1.0, (1, 1, 1, 1, 1), 0.2857, 0.6538),
        ("ring", 0.5, (0.5, 0.5), 0.6074, 0.7839),
    ],
)
def test_matcha_has_the_vectors_of_its_code(
    topology: str, budget: float, probabilities: tuple[float, ...], weight: float, s: float
) -> None:
    graph = SampledGraph(find_matchings(topology, 8, build_links(topology, 8)), 8)
    found = graph.best_probabilities(budget)
    assert found == pytest.approx(probabilities, abs=5e-5)
    assert graph.best_weight(found) == pytest.approx((weight, s), abs=5e-5)


@pytest.mark.parametrize(
    ("topology", "num_workers"),
    [
        *((name, size) for name in ("ring", "complete") for size in (2, 3, 4, 5, 8)),
        *(("torus", size) for size in (4, 6, 9, 12, 15, 16)),
    ],
)
def test_closed_spectra_equal_computed_ones(topology: str, num_workers: int) -> None:
    links = build_links(topology, num_workers)
    assert extremes(topology, num_workers, links) == pytest.approx(extremes("FILE", num_workers, links))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("name", [*GRAPHS, *FOREIGN])
def test_no_other_probabilities_connect_better(name: str, budget: float) -> None:
    num_workers, matchings = matchings_of(name)
    graph = SampledGraph(matchings, num_workers)
    found = graph.best_probabilities(budget)
    assert found.min() >= 0
    assert found.max() <= 1
    assert found.sum() <= budget * len(matchings) + 1e-5
    reached = np.linalg.eigvalsh(np.tensordot(found, laplacians(matchings, num_workers), 1))[1]
    assert reached >= upper_bound(matchings, num_workers, budget, found) * (1 - 1e-4)


@pytest.mark.parametrize(("topology", "num_workers"), [("ring", 8), ("complete", 7), ("complete", 12), ("torus", 16)])
def test_equal_probabilities_are_best_by_symmetry(topology: str, num_workers: int) -> None:
    assert are_interchangeable(topology, num_workers)
    matchings = find_matchings(topology, num_workers, build_links(topology, num_workers))
    graph = SampledGraph(matchings, num_workers)
    equal = graph.equal_probabilities(0.4)
    assert graph.connectivity(equal)[0] >= upper_bound(matchings, num_workers, 0.4, equal) * (1 - 1e-4)


@settings(max_examples=25, deadline=None)
@example((3, ((0, 1), (0, 2))), 0.5)  # whose s has a bend
@given(connected_graphs(7), st.sampled_from([0.05, 0.3, 0.5, 0.9, 1.0]))
def test_s_bounds_the_mean_of_w_squared(graph: tuple[int, tuple[Link, ...]], budget: float) -> None:
    """The mean is taken over all 2^M draws of matchings; no other weight has a smaller s."""
    num_workers, links = graph
    matchings = find_matchings("FILE", num_workers, links)
    sampled = SampledGraph(matchings, num_workers)
    probabilities = sampled.best_probabilities(budget)
    weight, s = sampled.best_weight(probabilities)
    assert 0 <= s < 1
    assert s == pytest.approx(mean_contraction(matchings, probabilities, weight, num_workers), abs=1e-9)
    for other in (0.9 * weight, 0.999 * weight, 1.001 * weight, 1.1 * weight):
        # The weight is rounded to DIGITS digits, and s may have a bend at its minimum.
        assert mean_contraction(matchings, probabilities, other, num_workers) >= s - 2e-6


def mean_contraction(matchings: Sequence[Matching], probabilities: Floats, weight: float, num_workers: int) -> float:
    """The largest eigenvalue of the mean of W'W - J, by enumeration."""
    mean = np.zeros((num_workers, num_workers))
    for draw in range(2 ** len(matchings)):
        use = [bool(draw >> number & 1) for number in range(len(matchings))]
        chance = np.prod(np.where(use, probabilities, 1 - probabilities))
        edges = tuple((i, j, weight) for matching, on in zip(matchings, use, strict=True) if on for i, j in matching)
        mixing = mixing_matrix(num_workers, edges)
        mean += chance * (mixing.T @ mixing)
    return float(np.linalg.eigvalsh(mean - 1 / num_workers)[-1])


def test_a_budget_that_all_links_fit_gives_d_psgd() -> None:
    """Also where the largest eigenvalue of the Laplacian is N, and after an iterate in several parts."""
    for topology, num_workers in (("complete", 12), ("graph0", 8), ("torus", 15)):
        links = build_links(topology, num_workers)
        graph = SampledGraph(find_matchings(topology, num_workers, links), num_workers)
        weight, _ = graph.best_weight(graph.best_probabilities(1.0))
        assert weight == pytest.approx(constant_weight(*extremes(topology, num_workers, links)), rel=1e-12)


def test_the_gradient_of_a_disconnected_mean_graph() -> None:
    """Matching 0 alone leaves pairs unconnected: any vector with sum 0 that is constant on them is an eigenvector."""
    graph = SampledGraph(find_matchings("ring", 8, build_links("ring", 8)), 8)
    value, gradient = graph.connectivity(np.array([1.0, 0.0]))
    assert value == pytest.approx(0, abs=1e-12)
    assert gradient[0] == pytest.approx(0, abs=1e-12)
    assert gradient[1] > 1e-3
    complete = SampledGraph(find_matchings("complete", 6, build_links("complete", 6)), 6)
    assert complete.connectivity(np.ones(5))[0] == pytest.approx(6)
    assert complete.connectivity(np.ones(5))[1].sum() == pytest.approx(6)  # v' L v of a unit vector with sum 0


def test_a_budget_for_no_link_at_all_is_refused() -> None:
    """Find weights for the least budget, which are far from the largest floats."""
    with pytest.raises(UsageError, match=r"--budget must be at least 1e-06 and at most 1, got 1e-300"):
        MATCHA(budget=1e-300)
    assert MATCHA(budget=1e-6).plan(8, 0)
