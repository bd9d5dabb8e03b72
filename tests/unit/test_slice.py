"""The update rule of a server's slice against loops in float64 and torch's own optimiser."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import slice_bounds
from trainer.coordination.momentum import Momentum, heavy_ball, look_ahead, nesterov
from trainer.coordination.parameter_slice import CHUNK, ParameterSlice, add_pushed

Floats = npt.NDArray[np.float32]
EDGES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3]


def make(
    parameters: int, statistics: int = 0, *, seed: int = 0, workers: int = 4, kind: str = "changes"
) -> ParameterSlice:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=parameters + statistics).astype(np.float32)
    momentum = rng.normal(size=parameters).astype(np.float32)
    return ParameterSlice(values, momentum, heavy_ball(0.9), workers, kind)  # type: ignore[arg-type]


def gradients(count: int, numbers: int, seed: int = 1) -> list[Floats]:
    return list(np.random.default_rng(seed).normal(size=(count, numbers)).astype(np.float32))


def in_float64(
    before: ParameterSlice, pushed: list[Floats], rate: float, weights: list[float]
) -> tuple[list[float], list[float]]:
    """(parameters, momentum) after an update, one number at a time."""
    momentum = [
        0.9 * float(m) + rate * sum(w * float(g[i]) for g, w in zip(pushed, weights, strict=True))
        for i, m in enumerate(before.momentum)
    ]
    return [float(before.values[i]) - m for i, m in enumerate(momentum)], momentum


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [0.5, 2.0], [0.25, 1.0, 0.0]], ids=str)
def test_an_update_is_the_weighted_sum_through_momentum(weights: list[float]) -> None:
    part, pushed = make(257), gradients(len(weights), 257)
    parameters, momentum = in_float64(part, pushed, 0.3, weights)
    part.apply(pushed, 0.3, weights)
    np.testing.assert_allclose(part.momentum, momentum, rtol=0, atol=1e-5)
    np.testing.assert_allclose(part.values, parameters, rtol=0, atol=1e-5)
    assert part.values.dtype == part.momentum.dtype == np.float32


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_all_reduce_is_within_1e_6_of_exact_fractions(workers: int) -> None:
    """The sum of each worker's range, in the order of workers, and the update of the whole model by all ranges."""
    parameters, rate = 23, 0.1 / workers
    part, pushed = make(parameters, workers=workers), gradients(workers, parameters)
    weights = [1.0 + worker / 4 for worker in range(workers)]
    exact = [
        sum((Fraction(weight) * Fraction(float(g[i])) for g, weight in zip(pushed, weights, strict=True)), Fraction(0))
        for i in range(parameters)
    ]
    momentum = [
        Fraction(0.9) * Fraction(float(m)) + Fraction(rate) * total
        for m, total in zip(part.momentum, exact, strict=True)
    ]
    values = [Fraction(float(value)) - m for value, m in zip(part.values, momentum, strict=True)]
    ranges = []
    for begin, end in slice_bounds(parameters, workers):
        ranges.append(np.empty(end - begin, np.float32))
        add_pushed(ranges[-1], [gradient[begin:end] for gradient in pushed], weights, end - begin)
    # The longest sum has an absolute value of about 20.
    assert farthest(np.concatenate(ranges), exact) < 1e-6 * max(1.0, *map(abs, map(float, exact)))
    part.apply_sum(ranges, rate, workers)
    assert farthest(part.momentum, momentum) < 1e-6
    assert farthest(part.values, values) < 1e-6


def farthest(found: npt.NDArray[np.floating[Any]], exact: list[Fraction]) -> float:
    return float(max(abs(Fraction(float(value)) - true) for value, true in zip(found, exact, strict=True)))


@pytest.mark.parametrize("parameters", EDGES)
@pytest.mark.parametrize("statistics", [0, 5])
def test_where_the_chunks_end_makes_no_difference(parameters: int, statistics: int) -> None:
    """Every number once: the whole vector in one go gives the same bits, and the statistics get no update."""
    part, pushed = make(parameters, statistics, kind="whole"), gradients(2, parameters + statistics)
    values, momentum = part.values.copy(), part.momentum.copy()
    rate = np.float32(0.1)
    part.apply(pushed, 0.1, [1.0, 1.0])
    momentum = np.float32(0.9) * momentum + rate * (pushed[0][:parameters] + pushed[1][:parameters])
    np.testing.assert_array_equal(part.momentum, momentum)
    np.testing.assert_array_equal(part.values[:parameters], values[:parameters] - momentum)
    np.testing.assert_array_equal(part.values[parameters:], (pushed[0] + pushed[1])[parameters:] / 2)


@pytest.mark.parametrize("cuts", [[], [CHUNK], [7, 7, CHUNK + 1], [2 * CHUNK + 1], [1, 2, 3, 2 * CHUNK + 5]], ids=str)
@pytest.mark.parametrize("parameters", [2 * CHUNK + 3, 0])
def test_a_sum_in_ranges_has_the_bits_of_one_update(cuts: list[int], parameters: int) -> None:
    """Ranges end inside of chunks, at their ends, among the statistics, and may be empty; none of them is changed."""
    pushed, weights = gradients(3, parameters + 5), [0.5, 1.0, 2.0]
    plain, joined = (make(parameters, 5, kind="whole") for _ in range(2))
    plain.apply(pushed, 0.1, weights)
    total = np.empty(parameters + 5, np.float32)
    add_pushed(total, pushed, weights, parameters)
    total.flags.writeable = False  # like a message
    joined.apply_sum(np.split(total, [min(cut, len(total)) for cut in cuts]), 0.1, len(pushed))
    np.testing.assert_array_equal(joined.values, plain.values)
    np.testing.assert_array_equal(joined.momentum, plain.momentum)


@pytest.mark.slow
@given(seed=st.integers(0, 1000), rate=st.floats(1e-4, 1), momentum=st.floats(0, 0.99), count=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_at_a_constant_rate_it_is_the_sgd_of_torch(seed: int, rate: float, momentum: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=17)
    part = ParameterSlice(start.copy(), np.zeros(17), heavy_ball(momentum), count, "changes")
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.SGD([parameter], lr=rate, momentum=momentum)
    for _ in range(5):
        pushed = list(rng.normal(size=(count, 17)))
        part.apply(pushed, rate, [1.0] * count)
        parameter.grad = torch.from_numpy(np.sum(pushed, axis=0))
        optimiser.step()
    np.testing.assert_allclose(part.values, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_look_ahead", [False, True])
@given(seed=st.integers(0, 1000), momentum=st.floats(0, 0.99), workers=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_momentum_that_looks_ahead_of_whole_rounds_is_nesterovs(
    is_look_ahead: bool, seed: int, momentum: float, workers: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=17)
    rule = look_ahead(momentum, workers, workers, rounds=1) if is_look_ahead else nesterov(momentum)
    part = ParameterSlice(start.copy(), np.zeros(17), rule, workers, "changes")
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.SGD([parameter], lr=0.1, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        pushed = list(rng.normal(size=(workers, 17)))
        part.apply(pushed, 0.1, [1.0] * workers)
        parameter.grad = torch.from_numpy(np.sum(pushed, axis=0))
        optimiser.step()
    np.testing.assert_allclose(part.values, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("update_size", "workers", "rounds"), [(1, 12, 1), (3, 12, 1), (6, 8, 1.5), (1, 12, 1.5)])
def test_workers_pull_what_momentum_will_have_made_of_the_parameters(
    update_size: int, workers: int, rounds: float
) -> None:
    """Against the parameters themselves, which momentum moves update by update; a round is workers / update_size updates."""
    rng, m, rate = np.random.default_rng(0), 0.9, 0.1
    part = ParameterSlice(np.zeros(3), np.zeros(3), look_ahead(m, update_size, workers, rounds), workers, "changes")
    decay = m ** (update_size / workers)
    step = (1 - decay) / (1 - m)  # of a velocity, so that all of an update's steps come to 1 / (1 - m)
    parameters, velocity = np.zeros(3), np.zeros(3)
    for _ in range(30):
        pushed = list(rng.normal(size=(update_size, 3)))
        part.apply(pushed, rate, [1.0] * update_size)
        velocity = decay * velocity + rate * np.sum(pushed, axis=0)
        parameters = parameters - step * velocity
        updates, rest = divmod(rounds * workers / update_size, 1)
        ahead, coasting = parameters.copy(), velocity.copy()
        for _ in range(int(updates)):
            coasting = decay * coasting
            ahead -= step * coasting
        ahead -= step * (decay * (1 - decay**rest) / (1 - decay)) * coasting
        np.testing.assert_allclose(part.values, ahead, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [heavy_ball(0.9), look_ahead(0.9, 1, 12), look_ahead(0.9, 4, 12)], ids=str)
def test_a_gradient_moves_parameters_as_far_under_either_rule(rule: Momentum) -> None:
    part = ParameterSlice(np.zeros(1), np.zeros(1), rule, 12, "changes")
    part.apply([np.ones(1)], 0.1, [1.0])
    for _ in range(3000):
        part.apply([np.zeros(1)], 0.1, [1.0])
    assert part.values[0] == pytest.approx(-0.1 / (1 - 0.9), rel=1e-9)


def test_momentum_that_looks_ahead_bears_gradients_a_round_old() -> None:
    """A quadratic of curvature 8 at what in the end is 0.5 a gradient: SGD with momentum bears 76 alone, and 2.5 with an
    update for every gradient of 12 workers, each a round old."""

    def after(rule: Momentum, workers: int, rate: float) -> float:
        part = ParameterSlice(np.ones(1), np.zeros(1), rule, workers, "changes")
        held = [part.values.copy() for _ in range(workers)]
        for push in range(100 * workers):
            part.apply([8.0 * held[push % workers]], rate / workers, [1.0])
            held[push % workers] = part.values.copy()
        return abs(float(part.values[0]))

    assert after(heavy_ball(0.9), 1, 0.05) < 0.1
    assert after(look_ahead(0.95, 1, 12), 12, 0.025) < 0.1
    assert after(heavy_ball(0.9), 12, 0.05) > 1e6


def test_momentum_carries_the_rate_of_its_time() -> None:
    """torch multiplies the whole velocity by the newest rate; here a drop of the rate leaves past updates as they were."""
    part = ParameterSlice(np.zeros(1), np.zeros(1), heavy_ball(0.5), 1, "changes")
    part.apply([np.ones(1)], 1.0, [1.0])
    part.apply([np.zeros(1)], 0.1, [1.0])
    assert part.values[0] == -1.5


def test_gradients_are_left_as_they_were_pushed() -> None:
    """They may lie in a worker's memory, which computes the next one from zero by itself."""
    part, pushed = make(40, 3), gradients(3, 43)
    kept = [vector.copy() for vector in pushed]
    part.apply(pushed, 0.1, [1.0, 0.5, 1.0])
    np.testing.assert_array_equal(pushed, kept)


@pytest.mark.parametrize("together", [True, False], ids=["one update", "an update each"])
def test_workers_move_running_statistics_as_one_process_does(together: bool) -> None:
    """Four workers see batches of one law: with BatchNorm's momentum 0.1 each brings a quarter of a step, from wherever
    the round began. An average of whole statistics would average twice, and keep what they began with for longer."""
    workers, parameters, rng = 4, 2, np.random.default_rng(0)
    part = make(parameters, 3, workers=workers)
    alone = part.values[parameters:].astype(np.float64)
    for _ in range(20):
        batches = rng.random((workers, 3))
        pushed = gradients(workers, parameters + 3)
        for vector, batch in zip(pushed, batches, strict=True):
            vector[parameters:] = 0.1 * (batch - part.values[parameters:])
        for some in [pushed] if together else [[vector] for vector in pushed]:
            part.apply(some, 0.1, [0.5] * len(some))
        alone = 0.9 * alone + 0.1 * batches.mean(axis=0)
    np.testing.assert_allclose(part.values[parameters:], alone, rtol=1e-5)


def test_whole_statistics_are_the_mean_of_the_last_updates() -> None:
    """In worker order the last gradient of an update is always the last worker's, whose shard is like no other."""
    part, pushed = make(2, 3, kind="whole"), gradients(4, 5)
    part.apply(pushed[:1], 0.1, [0.5])
    np.testing.assert_array_equal(part.values[2:], pushed[0][2:])
    part.accumulate(pushed[1:3], [1.0, 0.25])
    part.apply(pushed[3:], 0.1, [1.0])
    np.testing.assert_allclose(part.values[2:], np.mean(pushed[1:], axis=0)[2:], rtol=1e-6)


@given(total=st.integers(0, 10**7), servers=st.integers(1, 64))
def test_the_slices_tile_the_vector_and_differ_by_one_number_at_most(total: int, servers: int) -> None:
    bounds = slice_bounds(total, servers)
    assert len(bounds) == servers
    assert [0, *(end for _, end in bounds)] == [*(begin for begin, _ in bounds), total]
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


@given(servers=st.integers(1, 7), parameters=st.integers(0, 40), statistics=st.integers(0, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_vector_is_the_same_on_any_number_of_servers(
    servers: int, parameters: int, statistics: int, seed: int
) -> None:
    alone, pushed = make(parameters, statistics, seed=seed), gradients(3, parameters + statistics, seed)
    parts = [
        ParameterSlice(
            alone.values[b:e].copy(),
            alone.momentum[min(b, parameters) : min(e, parameters)].copy(),
            heavy_ball(0.9),
            4,
            "changes",
        )
        for b, e in slice_bounds(parameters + statistics, servers)
    ]
    for _ in range(2):
        alone.apply(pushed, 0.2, [1.0, 0.5, 1.0])
        for part, (b, e) in zip(parts, slice_bounds(parameters + statistics, servers), strict=True):
            part.apply([vector[b:e] for vector in pushed], 0.2, [1.0, 0.5, 1.0])
    np.testing.assert_array_equal(np.concatenate([part.values for part in parts]), alone.values)
