"""Which protocols are one and the same under which conditions, in virtual time and float64, and what plain loops say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.virtual_time import ALL, START, Gradient, Run, Vector, quadratic, run
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP
from trainer.protocols.dssp import DSSP
from trainer.protocols.k_asp import KASP
from trainer.protocols.k_batch_asp import KBatchASP
from trainer.protocols.k_batch_bsp import KBatchBSP
from trainer.protocols.k_bsp import KBSP
from trainer.protocols.n_softsync import NSoftsync
from trainer.protocols.ssp import SSP

STEPS = 8
# Seconds of every step, by worker; whole numbers, so that workers also push at the same instant.
TIMES = st.lists(st.lists(st.integers(1, 9), min_size=STEPS, max_size=STEPS), min_size=1, max_size=6)


def uneven(times: list[list[int]]) -> dict[str, Any]:
    return {"steps": STEPS, "step_time": lambda worker, clock: float(times[worker][clock % STEPS])}


def averaged(workers: int, steps: int, learning_rate: float, gradient: Gradient) -> Vector:
    """What All-Reduce computes: every step takes the mean of all workers' gradients."""
    parameters = START.copy()
    for step in range(steps):
        mean = np.mean([gradient(parameters, worker, step) for worker in range(workers)], axis=0)
        parameters = parameters - learning_rate * mean
    return parameters


def plain_sgd(steps: int, gradients: Gradient, workers: int, rate: float, momentum: float = 0.0) -> Vector:
    """One process that takes the sum of all workers' gradients at a step."""
    parameters, velocity = START.copy(), np.zeros_like(START)
    for step in range(steps):
        total = sum(gradients(parameters, worker, step) for worker in range(workers))
        velocity = momentum * velocity + rate * total
        parameters = parameters - velocity
    return parameters


def assert_same(one: Run, other: Run) -> None:
    """The same bits, log and steps."""
    np.testing.assert_array_equal(one.parameters, other.parameters)
    assert one.records == other.records
    assert one.starts == other.starts


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [each for each in ALL if each.most_local_steps() == 1], ids=repr)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_is_plain_sgd_bit_for_bit_under_every_protocol(
    protocol: Protocol, servers: int, momentum: float
) -> None:
    done = run(protocol, workers=1, momentum=momentum, servers=servers)
    np.testing.assert_array_equal(done.parameters, plain_sgd(12, quadratic, 1, 0.05, momentum))


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6), servers=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_bsp_is_one_process_whatever_the_speeds_and_servers(speeds: list[float], servers: int) -> None:
    n = len(speeds)
    done = run(BSP(), n, momentum=0.9, servers=servers, step_time=lambda worker, clock: speeds[worker])
    np.testing.assert_allclose(done.parameters, plain_sgd(12, quadratic, n, 0.05, 0.9), rtol=1e-10)
    assert {record.staleness for record in done.records} == {0}


# --- synchronous ------------------------------------------------------------------------------------------------------


@given(times=TIMES)
@settings(max_examples=40, deadline=None)
def test_protocols_that_wait_for_all_average_like_all_reduce(times: list[list[int]]) -> None:
    """The loss is quadratic: a gradient at another version than the round's would show."""
    n = len(times)
    expected = averaged(n, STEPS, 0.05 * n, quadratic)
    same = [BSP(), SSP(0), DSSP(0, 0), KBSP(k=n), KBSP(k=n, cancel="preempt"), KASP(k=n)]
    for protocol in same:
        done = run(protocol, n, **uneven(times))
        np.testing.assert_allclose(done.parameters, expected, rtol=1e-10, atol=1e-12, err_msg=repr(protocol))
        assert sorted((record.worker, record.clock) for record in done.records) == [
            (worker, clock) for worker in range(n) for clock in range(STEPS)
        ]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cancel", ["push", "preempt"])
def test_k_batch_bsp_of_equal_workers_averages_over_all(n: int, cancel: Any) -> None:
    """Equally fast is: all push before the first of them could begin another step."""
    done = run(KBatchBSP(k=n, cancel=cancel), n, together=True)
    expected = averaged(n, 12, 0.05 * n, quadratic)
    np.testing.assert_allclose(done.parameters, expected, rtol=1e-10, atol=1e-12)
    assert all(record.accepted for record in done.records)


# --- asynchronous -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [KASP(k=1), KBatchASP(k=1), SSP(10**9), DSSP(10**9, 10**9)], ids=repr)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(times=TIMES)
@settings(max_examples=20, deadline=None)
def test_a_protocol_without_waits_is_asp_bit_for_bit(
    protocol: Protocol, momentum: float, times: list[list[int]]
) -> None:
    options = uneven(times) | {"momentum": momentum}
    assert_same(run(protocol, len(times), **options), run(ASP(), len(times), **options))


@given(times=TIMES)
@settings(max_examples=20, deadline=None)
def test_n_softsync_of_one_gradient_is_asp_at_an_nth_of_its_rate(
    times: list[list[int]],
) -> None:
    n = len(times)
    options = uneven(times)
    undivided = run(NSoftsync(n, divide_by_staleness=False), n, rate=1 / 256, **options)  # a/n is a power of two,
    assert_same(undivided, run(ASP(), n, rate=n / 256, **options))  # so n times it has no rounding


@given(times=TIMES, bound=st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_dssp_with_equal_bounds_is_ssp_bit_for_bit(times: list[list[int]], bound: int) -> None:
    options = uneven(times) | {"momentum": 0.9}
    assert_same(run(DSSP(bound, bound), len(times), **options), run(SSP(bound), len(times), **options))
