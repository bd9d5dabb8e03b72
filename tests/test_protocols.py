"""Every protocol in virtual time, held against loops that know nothing of coordinators, slices or orders."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UsageError
from pipeline.specs import OPTION, from_json
from tests.virtual_time import Gradient, Run, Vector, simulate
from trainer.protocols import PROTOCOLS
from trainer.protocols.asp import ASP
from trainer.protocols.base import Gradient as PendingGradient
from trainer.protocols.base import Protocol, View
from trainer.protocols.bsp import BSP
from trainer.protocols.ssp import SSP


def variants(kind: type[Protocol]) -> list[Protocol]:
    """A protocol as it is by default, with each bounded parameter and all of them at their least, and with each choice."""
    found, least, hints = [kind()], dict[str, Any](), get_type_hints(kind)
    for item in fields(kind):
        about = item.metadata.get(OPTION)
        if about and about.least is not None:
            least[item.name] = int(about.least)
            with suppress(UsageError):  # two parameters may bound each other
                found.append(kind(**{item.name: int(about.least)}))
        found += [kind(**{item.name: choice}) for choice in get_args(hints[item.name]) if isinstance(choice, str)]
    return list(dict.fromkeys([*found, kind(**least)]))


ALL = [protocol for kind in PROTOCOLS.values() for protocol in variants(kind)]
DELAYS = st.lists(st.lists(st.floats(0.01, 20), min_size=8, max_size=8), min_size=2, max_size=6)
START = np.random.default_rng(0).normal(size=7)


def quadratic(seed: int = 0) -> Gradient:
    """The gradient of a least-squares loss over random rows, fresh for every worker and clock."""

    def gradient(parameters: Vector, worker: int, clock: int) -> Vector:
        rows = np.random.default_rng([seed, worker, clock]).normal(size=(5, len(parameters)))
        return rows.T @ (rows @ parameters - 1) / 5

    return gradient


def plain_sgd(steps: int, gradients: Gradient, workers: int, rate: float, momentum: float = 0.0) -> Vector:
    """One process that takes the sum of all workers' gradients at a step."""
    parameters, velocity = START.copy(), np.zeros_like(START)
    for step in range(steps):
        total = sum(gradients(parameters, worker, step) for worker in range(workers))
        velocity = momentum * velocity + rate * total
        parameters = parameters - velocity
    return parameters


def run(protocol: Protocol, workers: int = 4, steps: int = 12, **options: object) -> Run:
    values: dict[str, object] = {"gradient": quadratic(), "start": START, "rate": 0.05} | options
    return simulate(protocol, workers=workers, steps=steps, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_plain_sgd_under_every_protocol(protocol: Protocol, servers: int) -> None:
    done = run(protocol, workers=1, momentum=0.9, servers=servers)
    np.testing.assert_allclose(done.parameters, plain_sgd(12, quadratic(), 1, 0.05, 0.9), rtol=1e-10)


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=6), servers=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_bsp_is_one_process_whatever_the_speeds_and_servers(speeds: list[float], servers: int) -> None:
    n = len(speeds)
    done = run(BSP(), n, momentum=0.9, servers=servers, step_time=lambda worker, clock: speeds[worker])
    np.testing.assert_allclose(done.parameters, plain_sgd(12, quadratic(), n, 0.05, 0.9), rtol=1e-10)
    assert {record.staleness for record in done.records} == {0}


def test_ssp_with_bound_zero_is_bsp_for_plain_sgd_when_gradients_are_summed_in_one_round() -> None:
    """A linear loss has the same gradient wherever it is taken, so that only the order of sums can differ."""
    slopes = np.random.default_rng(1).normal(size=(4, 12, len(START)))
    fixed: dict[str, Any] = {"gradient": lambda parameters, worker, clock: slopes[worker, clock]}
    bsp, ssp = run(BSP(), **fixed), run(SSP(0), **fixed)
    np.testing.assert_allclose(ssp.parameters, bsp.parameters, rtol=1e-10)


def test_ssp_without_a_reachable_bound_is_asp() -> None:
    speeds: dict[str, Any] = {"step_time": lambda worker, clock: 1.0 + 0.37 * worker + 0.01 * clock}
    asp, ssp = run(ASP(), **speeds), run(SSP(10_000), **speeds)
    np.testing.assert_array_equal(asp.parameters, ssp.parameters)
    assert asp.records == ssp.records


def test_asp_with_equally_fast_workers_settles_at_a_staleness_of_n_minus_1() -> None:
    done = run(ASP(), workers=5, steps=20)
    assert [record.staleness for record in done.records[:5]] == [0, 1, 2, 3, 4]
    assert {record.staleness for record in done.records[5:]} == {4}


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@given(delays=DELAYS)
@settings(max_examples=30, deadline=None)
def test_no_worker_starts_a_step_further_ahead_than_its_protocol_declares(
    protocol: Protocol, delays: list[list[float]]
) -> None:
    done = run(protocol, len(delays), steps=8, step_time=lambda worker, clock: delays[worker][clock % 8])
    bound = protocol.clock_bound()
    for (_, worker, clock, _), clocks in zip(done.starts, done.clocks_at_starts, strict=True):
        assert clock == clocks[worker]
        assert bound is None or clock - min(clocks) <= bound


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@given(
    delays=DELAYS, lost=st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 7)), st.floats(0.5, 30), max_size=3)
)
@settings(max_examples=30, deadline=None)
def test_no_gradient_is_used_twice_and_every_run_ends_with_its_budget(
    protocol: Protocol, delays: list[list[float]], lost: dict[tuple[int, int], float]
) -> None:
    n = len(delays)
    step_time = {"step_time": lambda worker, clock: delays[worker][clock % 8]}
    done = run(protocol, n, steps=8, lose_at=dict(lost), **step_time)
    used = [(record.worker, record.clock, record.version_pulled) for record in done.records if record.accepted]
    assert len(used) == len(set(used)) == 8 * n
    versions = [record.version for record in done.records if record.accepted]
    assert versions == sorted(versions)
    if protocol.reproducible:
        np.testing.assert_array_equal(done.parameters, run(protocol, n, steps=8).parameters)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_what_a_protocol_is_told_survives_a_saved_configuration(protocol: Protocol) -> None:
    assert from_json(PROTOCOLS, "--protocol", protocol.to_json()) == protocol


@given(
    delays=st.lists(st.lists(st.floats(0.01, 20), min_size=8, max_size=8), min_size=2, max_size=5),
    bound=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_ssp_reads_every_update_that_is_older_than_its_bound_and_all_of_its_own(
    delays: list[list[float]], bound: int
) -> None:
    n = len(delays)
    done = run(SSP(bound), n, steps=8, step_time=lambda worker, clock: delays[worker][clock % 8])
    applied = {(record.worker, record.clock): record.version for record in done.records if record.accepted}
    for _, worker, clock, version in done.starts:
        for other in range(n):
            newest = clock - 1 if other == worker else clock - bound - 1
            for old in range(newest + 1):
                assert applied[other, old] <= version


@pytest.mark.parametrize(
    ("protocol", "rate"), [(BSP(), 4 / 10), (ASP(), 3 + 1 / 10), (SSP(3), 4 / 10)], ids=["bsp", "asp", "ssp"]
)
def test_a_straggler_costs_what_the_theory_says(protocol: Protocol, rate: float) -> None:
    """One of n=4 workers is f=10 times slower: n/f, n-1+1/f, and SSP tends to n/f."""
    done = run(protocol, steps=400, step_time=lambda worker, clock: 10.0 if worker == 3 else 1.0)
    assert len(done.records) / done.seconds == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_every_run_ends_with_exactly_its_budget_of_gradients(protocol: Protocol) -> None:
    done = run(protocol, workers=3, steps=7, step_time=lambda worker, clock: 1 + worker)
    assert sum(record.accepted for record in done.records) == 21


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_with_local_stop_every_worker_does_its_own_steps_and_nobody_waits_for_who_has_left(protocol: Protocol) -> None:
    done = run(protocol, workers=3, steps=7, stop="local", step_time=lambda worker, clock: 1.0 + 5 * worker)
    assert sorted((record.worker, record.clock) for record in done.records) == [
        (w, c) for w in range(3) for c in range(7)
    ]


def test_bsp_waits_for_a_lost_worker_and_its_numbers_do_not_show_that_it_was_away() -> None:
    undisturbed = run(BSP(), momentum=0.9)
    disturbed = run(BSP(), momentum=0.9, lose_at={(2, 5): 50.0, (0, 0): 3.0})
    np.testing.assert_array_equal(disturbed.parameters, undisturbed.parameters)
    assert disturbed.seconds == undisturbed.seconds + 55.0  # 50 + 3 away, and each step done again


def test_ssp_goes_on_without_a_lost_worker_and_takes_it_back_at_the_slowest_clock() -> None:
    done = run(SSP(1), workers=3, steps=30, lose_at={(1, 4): 10.0})
    alone = [clock for time, worker, clock, _ in done.starts if worker != 1 and 6 < time < 14]
    assert max(alone) > 4 + 1 + 1
    back = next(clock for time, worker, clock, _ in done.starts if worker == 1 and time >= 15.0)
    assert back >= max(alone) - 2


@dataclass(frozen=True)
class Picky(ASP):
    """Uses no gradient that is staler than 1, and divides the others by their staleness and 1."""

    def admit(self, gradient: PendingGradient, view: View) -> bool:
        return view.version - gradient.version <= 1

    def weight(self, staleness: int, num_workers: int) -> float:
        return 1 / (1 + staleness)


def test_what_a_protocol_refuses_is_not_used_and_what_it_weighs_counts_so_much() -> None:
    """Held against a loop over the log: gradients are taken anew at the version that each was computed at."""
    done = run(Picky(), workers=3, steps=10, step_time=lambda worker, clock: 1.0 + 0.4 * worker)
    refused = [record for record in done.records if not record.accepted]
    assert refused
    assert all(record.version - record.version_pulled > 1 for record in refused)
    assert {record.staleness for record in done.records if record.accepted} == {0, 1}
    versions, gradient = [START.copy()], quadratic()
    for record in done.records:
        if record.accepted:
            slope = gradient(versions[record.version_pulled], record.worker, record.clock)
            versions.append(versions[-1] - 0.05 * slope / (1 + record.staleness))
    np.testing.assert_allclose(done.parameters, versions[-1], rtol=1e-10)
    assert len(versions) == 1 + 3 * 10
