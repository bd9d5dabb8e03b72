"""The update rule of a server's slice against loops in float64 and torch's own optimiser."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import slice_bounds
from trainer.server.parameter_slice import CHUNK, ParameterSlice

Floats = npt.NDArray[np.float32]
EDGES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3]


def make(parameters: int, statistics: int = 0, *, seed: int = 0, workers: int = 4, kind: str = "ema") -> ParameterSlice:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=parameters + statistics).astype(np.float32)
    momentum = rng.normal(size=parameters).astype(np.float32)
    return ParameterSlice(values, momentum, 0.9, workers, kind)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("parameters", EDGES)
@pytest.mark.parametrize("statistics", [0, 5])
def test_where_the_chunks_end_makes_no_difference(parameters: int, statistics: int) -> None:
    """Every number once: the whole vector in one go gives the same bits, and the statistics get no update."""
    part, pushed = make(parameters, statistics, kind="last"), gradients(2, parameters + statistics)
    values, momentum = part.values.copy(), part.momentum.copy()
    rate = np.float32(0.1)
    part.apply(pushed, 0.1, [1.0, 1.0])
    momentum = np.float32(0.9) * momentum + rate * (pushed[0][:parameters] + pushed[1][:parameters])
    np.testing.assert_array_equal(part.momentum, momentum)
    np.testing.assert_array_equal(part.values[:parameters], values[:parameters] - momentum)
    np.testing.assert_array_equal(part.values[parameters:], pushed[1][parameters:])


@given(seed=st.integers(0, 1000), rate=st.floats(1e-4, 1), momentum=st.floats(0, 0.99), count=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_at_a_constant_rate_it_is_the_sgd_of_torch(seed: int, rate: float, momentum: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    start = rng.normal(size=17)
    part = ParameterSlice(start.copy(), np.zeros(17), momentum, count, "ema")
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimiser = torch.optim.SGD([parameter], lr=rate, momentum=momentum)
    for _ in range(5):
        pushed = list(rng.normal(size=(count, 17)))
        part.apply(pushed, rate, [1.0] * count)
        parameter.grad = torch.from_numpy(np.sum(pushed, axis=0))
        optimiser.step()
    np.testing.assert_allclose(part.values, parameter.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_momentum_carries_the_rate_of_its_time() -> None:
    """torch multiplies the whole velocity by the newest rate; here a drop of the rate leaves past updates as they were."""
    part = ParameterSlice(np.zeros(1), np.zeros(1), 0.5, 1, "ema")
    part.apply([np.ones(1)], 1.0, [1.0])
    part.apply([np.zeros(1)], 0.1, [1.0])
    assert part.values[0] == -1.5


def test_gradients_are_left_as_they_were_pushed() -> None:
    """They may lie in a worker's memory, which computes the next one from zero by itself."""
    part, pushed = make(40, 3), gradients(3, 43)
    kept = [vector.copy() for vector in pushed]
    part.apply(pushed, 0.1, [1.0, 0.5, 1.0])
    np.testing.assert_array_equal(pushed, kept)


def test_the_running_statistics_follow_every_push_by_one_nth() -> None:
    part, pushed = make(2, 3, workers=4), gradients(3, 5)
    expected = part.values[2:].astype(np.float64)
    for vector in pushed:
        expected = 0.75 * expected + 0.25 * vector[2:]
    part.apply(pushed, 0.1, [1.0, 1.0, 1.0])
    np.testing.assert_allclose(part.values[2:], expected, rtol=1e-5)


@pytest.mark.parametrize(("kind", "workers"), [("last", 4), ("ema", 1)])
def test_the_last_push_wins_with_last_and_with_a_single_worker(kind: str, workers: int) -> None:
    part, pushed = make(2, 3, workers=workers, kind=kind), gradients(2, 5)
    part.apply(pushed, 0.1, [1.0, 1.0])
    np.testing.assert_array_equal(part.values[2:], pushed[1][2:])


@given(workers=st.integers(1, 12), pushes=st.integers(1, 8), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_merged_statistics_stay_between_those_that_were_merged(workers: int, pushes: int, seed: int) -> None:
    """A running variance never becomes negative, whatever is pushed in what order."""
    rng = np.random.default_rng(seed)
    part = ParameterSlice(rng.random(6).astype(np.float32), np.zeros(0, np.float32), 0.9, workers, "ema")
    seen = [part.values.copy()]
    for _ in range(pushes):
        seen.append(rng.random(6).astype(np.float32))
        part.apply([seen[-1]], 0.1, [1.0])
    slack = 1e-6
    assert (part.values >= np.min(seen, axis=0) - slack).all()
    assert (part.values <= np.max(seen, axis=0) + slack).all()


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
def test_however_many_servers_hold_the_vector_its_numbers_are_the_same(
    servers: int, parameters: int, statistics: int, seed: int
) -> None:
    alone, pushed = make(parameters, statistics, seed=seed), gradients(3, parameters + statistics, seed)
    parts = [
        ParameterSlice(
            alone.values[b:e].copy(), alone.momentum[min(b, parameters) : min(e, parameters)].copy(), 0.9, 4, "ema"
        )
        for b, e in slice_bounds(parameters + statistics, servers)
    ]
    for _ in range(2):
        alone.apply(pushed, 0.2, [1.0, 0.5, 1.0])
        for part, (b, e) in zip(parts, slice_bounds(parameters + statistics, servers), strict=True):
            part.apply([vector[b:e] for vector in pushed], 0.2, [1.0, 0.5, 1.0])
    np.testing.assert_array_equal(np.concatenate([part.values for part in parts]), alone.values)
