"""Every protocol in virtual time: what all of them promise, under losses, restarts and both ways to stop."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from pipeline.core.specs import from_json
from tests.support.virtual_time import ALL, START, Run, Vector, pushed, quadratic, run
from trainer.coordination.orders import Record
from trainer.protocols import PROTOCOLS
from trainer.protocols.asp import ASP
from trainer.protocols.base import Gradient as PendingGradient
from trainer.protocols.base import Protocol, View
from trainer.protocols.bsp import BSP
from trainer.protocols.downpour import Downpour
from trainer.protocols.dssp import DSSP
from trainer.protocols.k_asp import KASP
from trainer.protocols.k_batch_asp import KBatchASP
from trainer.protocols.k_batch_bsp import KBatchBSP
from trainer.protocols.k_bsp import KBSP
from trainer.protocols.n_softsync import NSoftsync
from trainer.protocols.ssp import SSP

STEPS = 7  # not a multiple of every update, so that the last one has fewer gradients
DELAYS = st.lists(st.lists(st.floats(0.01, 20), min_size=STEPS, max_size=STEPS), min_size=2, max_size=6)
LOSSES = st.lists(st.tuples(st.floats(0.1, 120), st.integers(0, 5), st.floats(0.5, 30)), max_size=4)
RATE = 0.01  # small enough for stale gradients of every protocol
BOUNDED = [BSP(), SSP(0), SSP(2), DSSP(0, 2), DSSP(1, 4), DSSP(2, 2), DSSP(3, 15)]


def uneven(delays: list[list[float]]) -> dict[str, Any]:
    return {"steps": STEPS, "rate": RATE, "step_time": lambda worker, clock: delays[worker][clock % STEPS]}


def within(losses: list[tuple[float, int, float]], workers: int) -> list[tuple[float, int, float]]:
    return [(time, worker % workers, away) for time, worker, away in losses]


def told_by_the_log(protocol: Protocol, records: list[Record], workers: int) -> Vector:
    """The parameters, computed from the log alone: each gradient anew, at the version that it says it was taken at."""
    updates = defaultdict[int, list[Record]](list)
    for record in records:
        if record.accepted:
            updates[record.version].append(record)
    versions = [START]
    for version in range(1, len(updates) + 1):
        total = np.zeros_like(START)
        for _, worker, clock, pulled, staleness, *_ in updates[version]:
            assert staleness == version - 1 - pulled
            steps = protocol.local_steps(clock)
            push = pushed(steps, quadratic, RATE, versions[pulled], worker, clock)
            total += protocol.weight(staleness, workers) * push
        versions.append(versions[-1] - RATE * total)
    return versions[-1]


def ends_of_pushes(protocol: Protocol) -> list[int]:
    """The clocks at which a worker that loses nothing has pushed."""
    ends = [0]
    while ends[-1] < STEPS:
        ends.append(ends[-1] + protocol.local_steps(ends[-1]))
    return ends[1:]


def assert_sound(protocol: Protocol, done: Run, workers: int, stop: str, *, may_skip: bool) -> None:
    """What holds of every run that has ended. may_skip: a worker that was away may go on at a later step."""
    pushes = [(record.worker, record.clock) for record in done.records]
    assert sorted(pushes) == sorted(done.pushed), "a gradient was lost, or made up"
    assert len(pushes) == len(set(pushes)), "a gradient was counted twice"
    accepted = [record for record in done.records if record.accepted]
    sizes = list(Counter(record.version for record in accepted).values())
    size = protocol.update_size(workers)
    assert max(sizes) <= size
    if protocol.synchronous:
        assert {record.staleness for record in accepted} == {0}
    if stop == "global":
        # The run ends with the push that spends the budget.
        used = [protocol.local_steps(record.clock) for record in accepted]
        assert sum(used) - used[-1] < STEPS * workers <= sum(used)
        assert sum(used) == STEPS * workers or protocol.most_local_steps() > 1
        assert set(sizes[:-1]) <= {size}, "only the last update may have fewer"
    else:
        begins = [clock for clock in range(STEPS) if not clock or clock in ends_of_pushes(protocol)]
        steps = {worker: [clock for who, clock in pushes if who == worker] for worker in range(workers)}
        assert [max(clocks) for clocks in steps.values()] == [begins[-1]] * workers
        assert may_skip or len(pushes) == len(begins) * workers
    np.testing.assert_allclose(done.parameters, told_by_the_log(protocol, done.records, workers), rtol=1e-9, atol=1e-12)


# --- what all protocols promise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ALL, ids=repr)
@given(delays=DELAYS, losses=LOSSES, stop=st.sampled_from(["global", "local"]), servers=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_a_run_with_losses_spends_its_budget_and_logs_it_all(
    protocol: Protocol, delays: list[list[float]], losses: list[tuple[float, int, float]], stop: str, servers: int
) -> None:
    n = len(delays)
    lost = within(losses, n)
    done = run(protocol, n, stop=stop, servers=servers, losses=lost, **uneven(delays))
    may_skip = type(protocol).clock_on_joining is not Protocol.clock_on_joining and bool(lost)
    assert_sound(protocol, done, n, stop, may_skip=may_skip)
    if protocol.reproducible:
        np.testing.assert_array_equal(done.parameters, run(protocol, n, steps=STEPS, rate=RATE).parameters)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ALL, ids=repr)
@given(
    delays=DELAYS,
    losses=LOSSES,
    crashes=st.sets(st.integers(1, 60), max_size=3),
    save_every=st.integers(1, 12),
    stop=st.sampled_from(["global", "local"]),
)
@settings(max_examples=10, deadline=None)
def test_a_run_whose_servers_roll_back_ends_like_any_other(
    protocol: Protocol,
    delays: list[list[float]],
    losses: list[tuple[float, int, float]],
    crashes: set[int],
    save_every: int,
    stop: str,
) -> None:
    n = len(delays)
    lost = within(losses, n)
    done = run(protocol, n, stop=stop, losses=lost, crash_at=crashes, save_every=save_every, **uneven(delays))
    may_skip = type(protocol).clock_on_joining is not Protocol.clock_on_joining and bool(lost)
    assert_sound(protocol, done, n, stop, may_skip=may_skip)
    if protocol.reproducible:
        np.testing.assert_array_equal(done.parameters, run(protocol, n, steps=STEPS, rate=RATE).parameters)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_a_crash_at_any_event_ends_no_run(protocol: Protocol) -> None:
    """Crash at every second event of either budget, which take turns."""
    delays = [[1.0, 2.5] * 4, [1.5] * 8, [4.0, 1.0] * 4]
    for first, stop in enumerate(("global", "local"), start=1):
        options = uneven(delays) | {"workers": 3, "stop": stop}
        undisturbed = run(protocol, **options)
        for event in range(first, undisturbed.events + 1, 2):
            done = run(protocol, crash_at=[event], save_every=2, **options)
            assert_sound(protocol, done, 3, stop, may_skip=False)
            if protocol.reproducible:
                np.testing.assert_array_equal(done.parameters, undisturbed.parameters)
            held = {"last", "before", "extra"} if isinstance(protocol, DSSP) else set[str]()
            assert all(set(json.loads(saved.position)["memory"]) == held for saved in done.checkpoints)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_declarations_about_gradients_hold(protocol: Protocol) -> None:
    """Compare both with the gradients that are refused, and the parameters that a worker gets after its own gradients."""
    done = run(
        protocol, 4, steps=20, rate=RATE, step_time=lambda worker, clock: 1.0 + 0.37 * worker + 0.1 * (clock % 3)
    )
    assert protocol.refuses_gradients or all(record.accepted for record in done.records)
    applied = {(record.worker, record.clock): record.version for record in done.records if record.accepted}
    for _, worker, clock, version in done.starts if protocol.reads_own_writes else ():
        assert all(applied[who, old] <= version for who, old in applied if who == worker and old < clock)


@pytest.mark.parametrize("protocol", [each for each in ALL if not each.refuses_gradients], ids=repr)
@given(
    delays=DELAYS,
    losses=LOSSES,
    crashes=st.sets(st.integers(1, 60), max_size=2),
    stop=st.sampled_from(["global", "local"]),
)
@settings(max_examples=5, deadline=None)
def test_no_worker_passes_a_barrier_before_all_others(
    protocol: Protocol, delays: list[list[float]], losses: list[tuple[float, int, float]], crashes: set[int], stop: str
) -> None:
    """Whoever dies and whatever the servers roll back, each step before the last barrier is made once by each worker."""
    n = len(delays)
    barriers = (2, 3, 5)
    options = uneven(delays) | {"losses": within(losses, n), "crash_at": crashes, "save_every": 4, "stop": stop}
    done = run(protocol, n, barriers=barriers, **options)
    ends = {clock: min([b for b in barriers if b > clock] or [STEPS * n]) for clock in range(STEPS * n)}
    steps = [range(r.clock, min(r.clock + protocol.local_steps(r.clock), ends[r.clock])) for r in done.records]
    early = [
        (r.worker, step) for r, span in zip(done.records, steps, strict=True) for step in span if step < barriers[-1]
    ]
    assert sorted(early) == [(worker, clock) for worker in range(n) for clock in range(barriers[-1])]
    for barrier in barriers:
        last = max(record.version for record in done.records if record.clock < barrier)
        after = [record for record in done.records if record.clock >= barrier]
        assert all(record.version_pulled >= last for record in after)


@pytest.mark.parametrize("protocol", ALL, ids=repr)
def test_what_a_protocol_is_told_survives_a_saved_configuration(protocol: Protocol) -> None:
    assert from_json(PROTOCOLS, "--protocol", protocol.to_json()) == protocol


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KBSP(k=4).check(3), ["--k 4", "3"]),
        (lambda: KASP(k=4).check(3), ["--k 4", "3"]),
        (lambda: NSoftsync(4).check(3), ["--softsync 4", "3"]),
        (lambda: DSSP(4, 3), ["--staleness-upper-bound 3", "--staleness-bound 4"]),
    ],
    ids=["k-bsp", "k-asp", "n-softsync", "dssp"],
)
def test_a_parameter_that_does_not_fit_is_one_line_with_its_flag(make: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("protocol", [KBatchBSP(k=7), KBatchASP(k=7), KBSP(k=3), KASP(k=3), NSoftsync(3)], ids=repr)
def test_a_parameter_at_its_limit_fits(
    protocol: Protocol,
) -> None:
    protocol.check(3)
    done = run(protocol, workers=3)
    assert max(Counter(record.version for record in done.records if record.accepted).values()) == min(
        36, protocol.update_size(3)
    )


# --- how far a worker may be ahead ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", BOUNDED, ids=repr)
@given(delays=DELAYS)
@settings(max_examples=30, deadline=None)
def test_no_worker_is_ever_further_ahead_than_declared(protocol: Protocol, delays: list[list[float]]) -> None:
    done = run(protocol, len(delays), **uneven(delays) | {"steps": 3 * STEPS})
    bound = protocol.clock_bound()
    assert bound is not None
    for (_, worker, clock, _), clocks in zip(done.starts, done.clocks_at_starts, strict=True):
        assert clock == clocks[worker] <= min(clocks.values()) + bound
    for clocks in done.clocks:  # with the step that is being done
        assert max(clocks.values(), default=0) <= min(clocks.values(), default=0) + bound + 1


@pytest.mark.parametrize("protocol", BOUNDED, ids=repr)
@given(delays=DELAYS, losses=LOSSES, crashes=st.sets(st.integers(1, 60), max_size=2))
@settings(max_examples=30, deadline=None)
def test_a_worker_that_comes_back_lets_nobody_start_beyond_the_bound(
    protocol: Protocol, delays: list[list[float]], losses: list[tuple[float, int, float]], crashes: set[int]
) -> None:
    n = len(delays)
    done = run(protocol, n, losses=within(losses, n), crash_at=crashes, save_every=5, **uneven(delays))
    bound = protocol.clock_bound()
    assert bound is not None
    for (_, worker, clock, _), clocks in zip(done.starts, done.clocks_at_starts, strict=True):
        assert clock == clocks[worker] <= min(clocks.values()) + bound


@pytest.mark.parametrize("protocol", BOUNDED, ids=repr)
def test_a_bound_binds_where_one_worker_is_very_slow(protocol: Protocol) -> None:
    done = run(protocol, 3, steps=60, rate=RATE, step_time=lambda worker, clock: 100.0 if worker == 2 else 1.0)
    steps = zip(done.starts, done.clocks_at_starts, strict=True)
    ahead = max(clock - min(clocks.values()) for (_, _, clock, _), clocks in steps)
    assert ahead == protocol.clock_bound()


@given(
    delays=DELAYS,
    bound=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_ssp_reads_all_updates_older_than_its_bound(delays: list[list[float]], bound: int) -> None:
    n = len(delays)
    done = run(SSP(bound), n, **uneven(delays))
    applied = {(record.worker, record.clock): record.version for record in done.records if record.accepted}
    for _, worker, clock, version in done.starts:
        for other in range(n):
            newest = clock - 1 if other == worker else clock - bound - 1
            for old in range(newest + 1):
                assert applied[other, old] <= version


# --- what single protocols promise -------------------------------------------------------------------------------------


def test_asp_of_equal_workers_has_a_staleness_of_n_minus_1() -> None:
    done = run(ASP(), workers=5, steps=20)
    assert [record.staleness for record in done.records[:5]] == [0, 1, 2, 3, 4]
    assert {record.staleness for record in done.records[5:]} == {4}


@pytest.mark.parametrize(("n", "times"), [(4, 10), (3, 5)])
@pytest.mark.parametrize("name", ["bsp", "asp", "ssp", "k-bsp", "k-batch-asp"])
def test_a_straggler_costs_what_the_theory_says(name: str, n: int, times: int) -> None:
    """One of n workers is f times slower: n/f, n - 1 + 1/f, and SSP tends to n/f, k-BSP of n - 1 to n - 1."""
    protocol, rate = {
        "bsp": (BSP(), n / times),
        "asp": (ASP(), n - 1 + 1 / times),
        "ssp": (SSP(3), n / times),
        "k-bsp": (KBSP(k=n - 1), n - 1),
        "k-batch-asp": (KBatchASP(k=n), n - 1 + 1 / times),
    }[name]
    done = run(protocol, n, steps=400, rate=RATE, step_time=lambda w, clock: float(times) if w == n - 1 else 1.0)
    accepted = sum(record.accepted for record in done.records)
    assert accepted / done.seconds == pytest.approx(rate, rel=0.02)


def test_bsp_waits_for_a_lost_worker_and_keeps_its_bits() -> None:
    undisturbed = run(BSP(), momentum=0.9)
    disturbed = run(BSP(), momentum=0.9, lose_at={(2, 5): 50.0, (0, 0): 3.0})
    np.testing.assert_array_equal(disturbed.parameters, undisturbed.parameters)
    assert disturbed.seconds == undisturbed.seconds + 55.0  # 50 + 3 away, and each step done again


def test_ssp_takes_a_lost_worker_back_at_the_slowest_clock() -> None:
    done = run(SSP(1), workers=3, steps=30, lose_at={(1, 4): 10.0})
    alone = [clock for time, worker, clock, _ in done.starts if worker != 1 and 6 < time < 14]
    assert max(alone) > 4 + 1 + 1
    back = next(clock for time, worker, clock, _ in done.starts if worker == 1 and time >= 15.0)
    assert back >= max(alone) - 2


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_no_worker_waits_for_a_returned_one_to_catch_up(worker: int) -> None:
    """The servers go back while it is away; then it is there again, and goes on where the slowest of the others was."""
    done = run(SSP(1), workers=3, steps=30, losses=[(2.5, worker, 1000.0)], save_every=1, crash_at=[40])
    back_at = next(time for time, who, *_ in done.starts if who == worker and time > 2.5)
    assert back_at == 18.0  # of the servers' restart
    clocks = {who: clock for time, who, clock, _ in done.starts if time == back_at}
    assert set(clocks) == {0, 1, 2}
    assert min(clocks.values()) >= 17


def test_downpour_pushes_after_one_step_and_then_after_every_fifth() -> None:
    """Step t = 0, 1, ...: t % 5 == 0 ends with a push, as in DataGossip's program."""
    done = run(Downpour(), workers=1, steps=16)
    assert [record.clock for record in done.records] == [0, 1, 6, 11]
    ends = [record.clock + Downpour().local_steps(record.clock) - 1 for record in done.records]
    assert ends == [step for step in range(16) if step % 5 == 0]


def test_downpour_adds_what_each_worker_has_moved_its_copy_by() -> None:
    """The messages of DataGossip's published program, by a loop: w += acc per message, without a mean or another rate."""
    times = [1.0, 1.3, 0.6]
    done = run(Downpour(push_every=3), workers=3, steps=12, rate=RATE, step_time=lambda worker, clock: times[worker])
    server = START.copy()
    versions = [server.copy()]
    for record in done.records:
        local = versions[record.version_pulled].copy()
        accumulated = np.zeros_like(START)
        step = record.clock
        while True:
            change = -RATE * quadratic(local, record.worker, step)
            accumulated += change
            local += change
            step += 1
            if (step - 1) % 3 == 0:
                break
        server += accumulated
        versions.append(server.copy())
    np.testing.assert_allclose(done.parameters, server, rtol=1e-9)
    assert {record.staleness for record in done.records} > {0, 1}


def test_downpour_of_one_worker_is_plain_sgd() -> None:
    np.testing.assert_allclose(
        run(Downpour(), workers=1, steps=16, rate=RATE).parameters,
        run(ASP(), workers=1, steps=16, rate=RATE).parameters,
        rtol=1e-9,
    )


@dataclass(frozen=True)
class Picky(ASP):
    """Uses no gradient that is staler than 1, and divides the others by their staleness and 1."""

    def admit(self, gradient: PendingGradient, view: View) -> bool:
        return view.version - gradient.version <= 1

    def weight(self, staleness: int, num_workers: int) -> float:
        return 1 / (1 + staleness)


def test_refused_gradients_are_not_used_and_weights_count() -> None:
    """Held against a loop over the log: gradients are taken anew at the version that each was computed at."""
    done = run(Picky(), workers=3, steps=10, step_time=lambda worker, clock: 1.0 + 0.4 * worker)
    refused = [record for record in done.records if not record.accepted]
    assert refused
    assert all(record.version - record.version_pulled > 1 for record in refused)
    assert {record.staleness for record in done.records if record.accepted} == {0, 1}
    versions = [START.copy()]
    for record in done.records:
        if record.accepted:
            slope = quadratic(versions[record.version_pulled], record.worker, record.clock)
            versions.append(versions[-1] - 0.05 * slope / (1 + record.staleness))
    np.testing.assert_allclose(done.parameters, versions[-1], rtol=1e-10)
    assert len(versions) == 1 + 3 * 10
