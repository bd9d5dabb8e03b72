"""Mixing plans: the edges of every round, and the average of neighbours' models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.graphs import connected_graphs, mixing_matrix, second_eigenvalue
from trainer.exchange.mixing import (
    CHUNK,
    Edge,
    FullMixing,
    RandomPairs,
    SampledMatchings,
    TopologyPlan,
    Vector,
    build_plan,
    links_by_worker,
    mix,
)
from trainer.exchange.topologies import Link, build_links

STATIC = [("ring", 2), ("ring", 7), ("ring", 8), ("complete", 5), ("torus", 12), ("graph0", 8)]


def some_plans(every: int = 1) -> list[TopologyPlan]:
    """A plan of every kind."""
    return [
        build_plan("ring", 7, seed=3, every=every),
        build_plan("graph0", 8, seed=3, budget=0.5, every=every),
        build_plan("exponential", 12, seed=3, every=every),
        build_plan("random-pair", 9, seed=3, every=every),
    ]


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
    plan = build_plan(topology, num_workers, seed=0)
    check_w(plan, num_workers)


@settings(deadline=None, max_examples=30)
@given(connected_graphs())
def test_w_of_any_file_contracts(tmp_path_factory: pytest.TempPathFactory, graph: tuple[int, tuple[Link, ...]]) -> None:
    num_workers, links = graph
    file = tmp_path_factory.mktemp("graph") / "links.txt"
    file.write_text("\n".join(f"{i} {j}" for i, j in links))
    check_w(build_plan(str(file), num_workers, seed=0), num_workers)


def check_w(plan: TopologyPlan, num_workers: int) -> None:
    """Assert that W is symmetric and doubly stochastic, and that its second eigenvalue is below 1."""
    mixing = mixing_matrix(num_workers, plan.edges(0))
    np.testing.assert_array_equal(mixing, mixing.T)
    np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-12)
    assert second_eigenvalue(mixing) < 1
    assert second_eigenvalue(mixing) ** 2 == pytest.approx(plan.contraction(), abs=1e-9)


def test_weights_of_the_ring_and_graph0() -> None:
    """Vectors that were measured with MATCHA's published code."""
    ring = build_plan("ring", 8, seed=0).edges(0)
    assert [weight for _, _, weight in ring] == pytest.approx([0.436130] * 8, abs=5e-7)
    assert second_eigenvalue(mixing_matrix(8, ring)) == pytest.approx(0.744521, abs=5e-7)
    graph0 = build_plan("graph0", 8, seed=0).edges(0)
    assert graph0[0][2] == pytest.approx(0.285714, abs=5e-7)
    assert second_eigenvalue(mixing_matrix(8, graph0)) == pytest.approx(0.808565, abs=5e-7)


def test_edges_are_in_use_every_f_rounds() -> None:
    plan = build_plan("ring", 8, seed=0, every=3)
    assert [len(plan.edges(round)) for round in range(7)] == [8, 0, 0, 8, 0, 0, 8]
    for every in (2, 3):
        for sparse in some_plans(every):
            assert all(sparse.edges(round) == () for round in range(100) if round % every)


@pytest.mark.slow
def test_edges_depend_on_seed_and_round_only() -> None:
    """Asked in another order, by another process, with another history."""
    rounds = list(range(50))
    made = [[plan.edges(round) for round in rounds] for plan in some_plans()]
    again = [[plan.edges(round) for round in reversed(rounds)][::-1] for plan in some_plans()]
    assert made == again
    program = (
        "from tests.unit.test_mixing import some_plans\n"
        "print([[plan.edges(round) for round in range(50)] for plan in some_plans()])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{made}\n"
    other = build_plan("graph0", 8, seed=4, budget=0.5)
    assert made[1] != [other.edges(round) for round in rounds]


def test_links_are_in_use_as_often_as_planned() -> None:
    """Within 3 standard deviations of the probability, over 4,000 draws; unused matchings stay unused."""
    draws = 4000
    for plan in (build_plan("graph0", 8, 1, budget=0.5, every=2), build_plan("random-pair", 5, 1, every=2)):
        used: dict[Link, int] = {}
        for round in range(0, 2 * draws, 2):
            for i, j, _ in plan.edges(round):
                used[i, j] = used.get((i, j), 0) + 1
        for i, j, share in plan.shares():
            spread = np.sqrt(share * (1 - share) / draws)
            assert used.get((i, j), 0) / draws == pytest.approx(share, abs=3 * spread + 1e-12)


def test_no_flag_no_edges() -> None:
    """A round of MATCHA without a drawn matching has no edge, hence no message."""
    plan = build_plan("ring", 8, seed=0, budget=0.1)
    assert isinstance(plan, SampledMatchings)
    sizes = [len(plan.edges(round)) for round in range(500)]
    assert set(sizes) == {0, 4, 8}
    assert sizes.count(0) / 500 == pytest.approx(0.81, abs=0.06)


def test_budget_1_is_d_psgd() -> None:
    for topology, num_workers in STATIC:
        plan = build_plan(topology, num_workers, seed=0, budget=1.0, every=2)
        assert plan.edges(4) == build_plan(topology, num_workers, seed=0, every=2).edges(4)


def test_edges_are_ascending_and_all_weights_alike() -> None:
    for plan in some_plans():
        for round in range(20):
            edges = plan.edges(round)
            assert list(edges) == sorted(edges)
            assert all(0 <= i < j < plan.num_workers for i, j, _ in edges)
            assert len({weight for _, _, weight in edges}) <= 1


def test_one_peer_exponential_averages_exactly() -> None:
    """Check that k exchanges of 2^k workers give the exact mean, also with --every."""
    for every in (1, 2, 3):
        plan = build_plan("exponential", 8, seed=0, every=every)
        product = np.eye(8)
        for exchange in range(3):
            edges = plan.edges(exchange * every)
            assert len(edges) == 4
            product = mixing_matrix(8, edges) @ product
        np.testing.assert_allclose(product, 1 / 8)
        assert plan.contraction() == 0


def test_one_peer_exponential_contracts_any_number_of_workers() -> None:
    for num_workers in (3, 5, 12):
        plan = build_plan("exponential", num_workers, seed=0)
        cycle = (num_workers - 1).bit_length()
        product = np.eye(num_workers)
        for exchange in range(cycle):
            product = mixing_matrix(num_workers, plan.edges(exchange)) @ product
        norms = np.linalg.svd(product - 1 / num_workers, compute_uv=False)
        assert plan.contraction() ** cycle == pytest.approx(norms[0] ** 2)
        assert 0 < plan.contraction() < 1


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
def test_random_pairs_are_matchings_and_vary(num_workers: int) -> None:
    plan = build_plan("random-pair", num_workers, seed=3, every=2)
    rounds = [plan.edges(round) for round in range(0, 200, 2)]
    for edges in rounds:
        assert len(edges) == num_workers // 2
        assert len({worker for i, j, _ in edges for worker in (i, j)}) == 2 * len(edges)
        assert all(weight == 0.5 for _, _, weight in edges)
    met = {(i, j) for edges in rounds for i, j, _ in edges}
    assert len(met) == num_workers * (num_workers - 1) / 2


def test_random_pairs_contract_as_they_say() -> None:
    """The mean of W'W over all perfect matchings of 6 workers, by enumeration."""

    def perfect(workers: list[int]) -> list[list[Link]]:
        if not workers:
            return [[]]
        first, rest = workers[0], workers[1:]
        return [[(first, other), *more] for other in rest for more in perfect([w for w in rest if w != other])]

    every_matching = perfect(list(range(6)))
    squares = [
        mixing @ mixing.T
        for matching in every_matching
        for mixing in [mixing_matrix(6, tuple((i, j, 0.5) for i, j in matching))]
    ]
    expected = np.linalg.eigvalsh(np.mean(squares, axis=0) - 1 / 6)[-1]
    assert build_plan("random-pair", 6, seed=0).contraction() == pytest.approx(expected)


def test_one_worker_has_no_edges() -> None:
    for topology in ("ring", "complete", "exponential", "random-pair"):
        plan = build_plan(topology, 1, seed=0)
        assert (plan.edges(0), plan.shares(), plan.contraction()) == ((), (), 0)
    assert build_plan("ring", 1, seed=0, budget=0.5).edges(0) == ()


@pytest.mark.parametrize(
    ("topology", "budget", "every", "message"),
    [
        ("ring", 0.0, 1, "--budget must be above 0 and at most 1, got 0"),
        ("ring", 1.5, 1, "--budget must be above 0 and at most 1, got 1.5"),
        ("ring", float("nan"), 1, "--budget must be above 0 and at most 1, got nan"),
        ("ring", None, 0, "--every must be at least 1, got 0"),
        ("exponential", 0.5, 1, "has a single matching per exchange, .*: give --exchange d-psgd"),
        ("random-pair", 0.5, 1, "has a single matching per exchange, .*: give --exchange d-psgd"),
    ],
)
def test_impossible_plans_are_refused(topology: str, budget: float | None, every: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_plan(topology, 8, seed=0, budget=budget, every=every)


def test_large_plans_are_made_from_closed_forms() -> None:
    """10,000 workers in virtual time: neither a matrix of 800 MB nor 50 million pairs."""
    assert isinstance(build_plan("ring", 10_000, seed=0), FullMixing)
    assert isinstance(build_plan("torus", 10_000, seed=0), FullMixing)
    assert isinstance(build_plan("ring", 10_000, seed=0, budget=0.5), SampledMatchings)
    pairs = build_plan("random-pair", 10_000, seed=0)
    assert isinstance(pairs, RandomPairs)
    assert len(pairs.edges(7)) == 5000


def test_mix_equals_the_matrix_and_keeps_the_mean() -> None:
    rng = np.random.default_rng(0)
    models = list(rng.standard_normal((8, 1000)).astype(np.float32))
    edges = build_plan("graph0", 8, seed=0).edges(0)
    mixed = mix_all(models, edges)
    np.testing.assert_allclose(mixed, mixing_matrix(8, edges) @ np.stack(models), atol=1e-6)
    assert all(model.dtype == np.float32 for model in mixed)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3]))
def test_rounds_keep_the_mean_and_shrink_the_spread(seed: int, every: int) -> None:
    """The mean of the models moves by at most 1e-6 over 20 rounds of every plan."""
    for plan in some_plans(every):
        rng = np.random.default_rng(seed)
        models = list(rng.standard_normal((plan.num_workers, 50)).astype(np.float32))
        mean = np.mean(models, axis=0, dtype=float)
        spread = float(np.var(models, axis=0).mean())
        for round in range(20):
            models = mix_all(models, plan.edges(round))
        np.testing.assert_allclose(np.mean(models, axis=0, dtype=float), mean, atol=1e-6)
        assert np.var(models, axis=0).mean() < spread


Exact = list[list[Fraction]]


def exactly(vectors: Iterable[Vector]) -> Exact:
    return [[Fraction(float(value)) for value in vector] for vector in vectors]


def mix_exactly(models: Exact, edges: tuple[Edge, ...], cut: frozenset[tuple[int, int]] = frozenset()) -> Exact:
    """Return W times the models in exact fractions. cut: (i, j) of which worker i uses nothing of worker j."""
    mixed = [model[:] for model in models]
    for low, high, weight in edges:
        for i, j in ((low, high), (high, low)):
            if (i, j) not in cut:
                change = (Fraction(weight) * (other - own) for own, other in zip(models[i], models[j], strict=True))
                mixed[i] = [value + step for value, step in zip(mixed[i], change, strict=True)]
    return mixed


def sums(models: Exact) -> list[Fraction]:
    return [sum(values, Fraction(0)) for values in zip(*models, strict=True)]


def distance(models: list[Vector], exact: Exact) -> float:
    """Return the largest absolute difference of any element."""
    pairs = zip(exactly(models), exact, strict=True)
    return float(max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)))


@pytest.mark.parametrize("every", [1, 2])
def test_mixing_in_fractions_keeps_the_mean_exactly(every: int) -> None:
    """Over rounds of every plan; the product's float32 models stay within 1e-6 of the fractions."""
    for plan in some_plans(every):
        rng = np.random.default_rng(plan.num_workers)
        models = list(rng.standard_normal((plan.num_workers, 5)).astype(np.float32))
        exact = exactly(models)
        total = sums(exact)
        for round in range(6):
            edges = plan.edges(round)
            models, exact = mix_all(models, edges), mix_exactly(exact, edges)
            assert sums(exact) == total
            assert distance(models, exact) < 1e-6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32))
def test_a_death_moves_the_sum_by_the_edges_used(seed: int) -> None:
    """In fractions: the sum of the survivors changes by the sum of w(x_D - x_i) over the survivors that have D's model."""
    for plan in some_plans():
        rng = np.random.default_rng(seed)
        models = list(rng.standard_normal((plan.num_workers, 3)).astype(np.float32))
        exact, edges, dead = exactly(models), plan.edges(0), int(rng.integers(plan.num_workers))
        weights = {i + j - dead: Fraction(weight) for i, j, weight in edges if dead in (i, j)}
        users = [worker for worker in weights if rng.random() < 0.5]
        mixed = mix_exactly(exact, edges, frozenset((worker, dead) for worker in weights if worker not in users))
        others = [worker for worker in range(plan.num_workers) if worker != dead]
        moved = [
            sum((weights[worker] * (exact[dead][k] - exact[worker][k]) for worker in users), Fraction(0))
            for k in range(3)
        ]
        before, after = (sums([values[worker] for worker in others]) for values in (exact, mixed))
        assert [b - a for a, b in zip(before, after, strict=True)] == moved
        # The weights of the whole graph, from which the product leaves the missing model out.
        links = links_by_worker(edges)
        product = [
            mix(models[i], [(weight, models[j]) for j, weight in links.get(i, ()) if j != dead or i in users])
            for i in others
        ]
        assert distance(product, [mixed[worker] for worker in others]) < 1e-6


def test_mix_adds_in_order_and_rounds_each_step() -> None:
    """The same bits as the definition in numpy's float32 scalars, with chunks of any size, in place or not."""
    rng = np.random.default_rng(1)
    for length in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        own, first, second = (rng.standard_normal(length).astype(np.float32) for _ in range(3))
        kept = own.copy()
        expected = own + np.float32(0.3) * (first - own)
        expected = expected + np.float32(0.1) * (second - own)
        out = np.full(length, np.nan, np.float32)
        assert mix(own, [(0.3, first), (0.1, second)], out=out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(mix(own, [(0.3, first), (0.1, second)]), expected)
        np.testing.assert_array_equal(mix(own, []), kept)
        np.testing.assert_array_equal(own, kept)


def test_a_plan_reads_its_file(tmp_path: Path) -> None:
    file = tmp_path / "path.txt"
    file.write_text("0 1\n1 2\n")
    plan = build_plan(str(file), 3, seed=0)
    assert [(i, j) for i, j, _ in plan.edges(0)] == list(build_links(str(file), 3)) == [(0, 1), (1, 2)]
