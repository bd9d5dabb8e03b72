"""Mixing plans: the edges of every round, and the average of neighbours' models."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.arrays import Floats
from trainer.exchange.mixing import Edge, Vector, build_plan, mix

STATIC = [("ring", 2), ("ring", 7), ("ring", 8), ("complete", 5), ("torus", 12), ("graph0", 8)]


def matrix(num_workers: int, edges: tuple[Edge, ...]) -> Floats:
    """W, by its definition: x_i + sum of w * (x_j - x_i)."""
    made = np.eye(num_workers)
    for i, j, weight in edges:
        made[i, j] += weight
        made[j, i] += weight
        made[i, i] -= weight
        made[j, j] -= weight
    return made


def second_eigenvalue(mixing: Floats) -> float:
    """The second largest absolute eigenvalue of W."""
    return float(np.sort(np.abs(np.linalg.eigvalsh(mixing)))[-2])


def mix_all(models: list[Vector], edges: tuple[Edge, ...]) -> list[Vector]:
    """The models of all workers after a round."""
    others: list[list[tuple[int, float]]] = [[] for _ in models]
    for i, j, weight in edges:
        others[i].append((j, weight))
        others[j].append((i, weight))
    return [
        mix(own, [(weight, models[j]) for j, weight in sorted(near)]) for own, near in zip(models, others, strict=True)
    ]


@pytest.mark.parametrize(("topology", "num_workers"), STATIC)
def test_w_is_doubly_stochastic_and_contracts(topology: str, num_workers: int) -> None:
    mixing = matrix(num_workers, build_plan(topology, num_workers, seed=0).edges(0))
    np.testing.assert_array_equal(mixing, mixing.T)
    np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-12)
    assert second_eigenvalue(mixing) < 1


def test_weights_of_the_ring_and_graph0() -> None:
    """SPEC 7.6's vectors, measured with MATCHA's published code."""
    ring = build_plan("ring", 8, seed=0).edges(0)
    assert [weight for _, _, weight in ring] == pytest.approx([0.436130] * 8, abs=5e-7)
    assert second_eigenvalue(matrix(8, ring)) == pytest.approx(0.744521, abs=5e-7)
    graph0 = build_plan("graph0", 8, seed=0).edges(0)
    assert graph0[0][2] == pytest.approx(0.285714, abs=5e-7)
    assert second_eigenvalue(matrix(8, graph0)) == pytest.approx(0.808565, abs=5e-7)


def test_edges_are_in_use_every_f_rounds() -> None:
    plan = build_plan("ring", 8, seed=0, every=3)
    assert [len(plan.edges(round)) for round in range(7)] == [8, 0, 0, 8, 0, 0, 8]


def test_one_peer_exponential_averages_exactly() -> None:
    """With 2^k workers, k exchanges are a full average; --every must not skip bits of the numbers."""
    for every in (1, 2, 3):
        plan = build_plan("exponential", 8, seed=0, every=every)
        product = np.eye(8)
        for exchange in range(3):
            edges = plan.edges(exchange * every)
            assert len(edges) == 4
            product = matrix(8, edges) @ product
        np.testing.assert_allclose(product, 1 / 8)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
def test_random_pairs_are_matchings_and_vary(num_workers: int) -> None:
    plan = build_plan("random-pair", num_workers, seed=3, every=2)
    rounds = [plan.edges(round) for round in range(0, 200, 2)]
    for edges in rounds:
        assert len(edges) == num_workers // 2
        assert len({worker for i, j, _ in edges for worker in (i, j)}) == 2 * len(edges)
        assert all(i < j and weight == 0.5 for i, j, weight in edges)
    met = {(i, j) for edges in rounds for i, j, _ in edges}
    assert len(met) == num_workers * (num_workers - 1) / 2
    assert plan.edges(1) == ()
    assert rounds == [build_plan("random-pair", num_workers, seed=3).edges(round) for round in range(0, 200, 2)]


def test_mix_equals_the_matrix_and_keeps_the_mean() -> None:
    rng = np.random.default_rng(0)
    models = list(rng.standard_normal((8, 1000)).astype(np.float32))
    edges = build_plan("graph0", 8, seed=0).edges(0)
    mixed = mix_all(models, edges)
    np.testing.assert_allclose(mixed, matrix(8, edges) @ np.stack(models), atol=1e-6)
    assert all(model.dtype == np.float32 for model in mixed)
    np.testing.assert_allclose(np.mean(mixed, axis=0, dtype=float), np.mean(models, axis=0, dtype=float), atol=1e-6)
