"""Which gradients protocols count, refuse and weigh, against event loops that know nothing of the coordinator."""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.virtual_time import START, Run, Simulation, Vector, quadratic, run
from trainer.coordination.weights import Weights
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP
from trainer.protocols.dssp import DSSP
from trainer.protocols.k_asp import KASP
from trainer.protocols.k_batch_asp import KBatchASP
from trainer.protocols.k_batch_bsp import KBatchBSP
from trainer.protocols.k_bsp import KBSP
from trainer.protocols.n_softsync import NSoftsync

STEPS, PARTS = 8, 4
# Seconds of every step, by worker. A micro-batch takes whole seconds, so that sums are exact and many things coincide.
WHOLE = st.lists(
    st.lists(st.integers(1, 9).map(lambda seconds: PARTS * seconds), min_size=STEPS, max_size=STEPS),
    min_size=1,
    max_size=6,
)
UNEVEN = st.lists(st.lists(st.floats(0.01, 20), min_size=STEPS, max_size=STEPS), min_size=1, max_size=6)
Seen = tuple[int, int, int, int, bool]  # (worker, clock, version pulled, version, accepted)


def timed(times: list[list[Any]]) -> dict[str, Any]:
    return {"steps": STEPS, "rate": 0.01, "step_time": lambda worker, clock: float(times[worker][clock % STEPS])}


def seen(done: Run) -> list[Seen]:
    return [(r.worker, r.clock, r.version_pulled, r.version, r.accepted) for r in done.records]


# --- K-sync, K-batch-sync, K-async and K-batch-async (Dutta et al. 2018, section 2) -------------------------------------


def k_of_n(times: list[list[Any]], k: int, *, fresh: bool, distinct: bool, parts: int = 1) -> list[Seen]:
    """fresh: a gradient of an old version is cancelled; distinct: who has pushed waits for the update; parts: pieces of a
    step, after each of which a worker sees that its step is cancelled."""
    n, version, waiting = len(times), 0, list[int]()
    clock, pulled, begun, number = [0] * n, [0] * n, [0.0] * n, [0] * n
    update: list[tuple[int, int, int]] = []
    log: list[Seen] = []
    ends: list[tuple[float, int, int]] = []

    def ends_at(worker: int, time: float) -> None:
        number[worker] += 1
        heapq.heappush(ends, (time, worker, number[worker]))

    def start(worker: int, now: float) -> None:
        pulled[worker], begun[worker] = version, now
        ends_at(worker, now + times[worker][clock[worker] % STEPS])

    for worker in range(n):
        start(worker, 0.0)
    left = STEPS * n
    while left:
        now, worker, which = heapq.heappop(ends)
        if which != number[worker]:
            continue
        gradient = worker, clock[worker], pulled[worker]
        clock[worker] += 1
        if fresh and pulled[worker] != version:
            log.append((*gradient, version, False))
            start(worker, now)
            continue
        update.append(gradient)
        waiting.append(worker)
        if len(update) == min(k, left):
            old, version, left = version, version + 1, left - len(update)
            log += [(*gradient, version, True) for gradient in update]
            update = []
            for other in set(range(n)) - set(waiting):
                if parts > 1 and pulled[other] == old:
                    part = times[other][clock[other] % STEPS] / parts
                    seams = [begun[other] + part * done for done in range(1, parts + 1)]
                    ends_at(other, min(seam for seam in seams if seam >= now))
        if not (distinct and update):
            for other in sorted(waiting):
                start(other, now)
            waiting = []
    return log


def as_protocol(name: str, k: int) -> tuple[Protocol, dict[str, bool]]:
    return {
        "k-bsp": (KBSP(k=k), {"fresh": True, "distinct": True}),
        "k-batch-bsp": (KBatchBSP(k=k), {"fresh": True, "distinct": False}),
        "k-asp": (KASP(k=k), {"fresh": False, "distinct": True}),
        "k-batch-asp": (KBatchASP(k=k), {"fresh": False, "distinct": False}),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k-bsp", "k-batch-bsp", "k-asp", "k-batch-asp"])
@given(times=st.one_of(WHOLE, UNEVEN), k=st.integers(1, 9), servers=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_k_protocols_keep_and_cancel_as_a_plain_loop_does(
    name: str, times: list[list[Any]], k: int, servers: int
) -> None:
    n = len(times)
    k = k if "batch" in name else 1 + (k - 1) % n
    protocol, rules = as_protocol(name, k)
    assert seen(run(protocol, n, servers=servers, **timed(times))) == k_of_n(times, k, **rules)


@pytest.mark.parametrize("kind", [KBSP, KBatchBSP])
@given(times=WHOLE, k=st.integers(1, 9), parts=st.sampled_from([2, PARTS]))
@settings(max_examples=40, deadline=None)
def test_a_preempted_worker_stops_after_its_micro_batch(
    kind: type[KBatchBSP], times: list[list[int]], k: int, parts: int
) -> None:
    n = len(times)
    k = 1 + (k - 1) % n if kind is KBSP else k
    done = run(kind(k=k, cancel="preempt", micro_batches=parts), n, **timed(times))
    assert seen(done) == k_of_n(times, k, fresh=True, distinct=kind is KBSP, parts=parts)


@pytest.mark.parametrize("times", [1.5, 2.5, 4.0, 10.0])
@pytest.mark.parametrize(("kind", "k"), [(KBSP, 3), (KBSP, 4), (KBatchBSP, 2), (KBatchBSP, 4), (KBatchBSP, 7)])
def test_preemption_with_a_straggler_costs_no_throughput(kind: type[KBatchBSP], k: int, times: float) -> None:
    def step_time(worker: int, clock: int) -> float:
        return times if worker == 3 else 1.0 + 0.125 * worker

    push = run(kind(k=k), steps=100, rate=0.01, step_time=step_time)
    preempt = run(kind(k=k, cancel="preempt"), steps=100, rate=0.01, step_time=step_time)
    assert preempt.seconds <= push.seconds  # of the same budget
    if kind is KBatchBSP:  # nobody waits there, so whoever stops early has a gradient earlier
        assert preempt.seconds < push.seconds


# --- n-softsync (Zhang et al. 2016, equations 5 and 6, figure 4) --------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(12, 1), (12, 2), (12, 4), (12, 12), (10, 3)])
def test_n_softsync_has_a_staleness_of_m_and_at_most_2m(n: int, m: int) -> None:
    jitter = np.random.default_rng(m).uniform(0.9, 1.1, size=(n, 100))
    done = run(NSoftsync(m), n, steps=100, rate=1e-4, step_time=lambda worker, clock: jitter[worker, clock % 100])
    size = n // m  # gradients an update
    staleness = np.array([record.staleness for record in done.records])
    # Between two pushes of a worker come those of the n - 1 others, of which each update takes n // m: about m updates.
    assert staleness[5 * n :].mean() == pytest.approx((n - 1) / size, rel=0.05)
    assert staleness[5 * n :].mean() == pytest.approx(m, abs=1.05)
    assert staleness.min() >= 0
    assert staleness.max() <= 2 * m
    assert set(Counter(record.version for record in done.records[: n * 100 // size * size]).values()) == {size}


@pytest.mark.parametrize("divide", [True, False])
@given(times=UNEVEN, m=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_n_softsync_divides_gradients_by_their_staleness(divide: bool, times: list[list[float]], m: int) -> None:
    """w -= (a / c) * sum of g / max(staleness, 1) over the c = floor(n / m) gradients of an update."""
    n, a = len(times), 0.02
    m = 1 + (m - 1) % n
    done = run(NSoftsync(m, divide), n, **timed(times) | {"rate": a / n})
    updates = defaultdict[int, list[Vector]](list)
    versions = [START]
    for record in done.records:
        slope = quadratic(versions[record.version_pulled], record.worker, record.clock)
        staleness = record.version - 1 - record.version_pulled
        updates[record.version].append(slope / max(staleness, 1) if divide else slope)
        if len(updates[record.version]) == n // m:
            versions.append(versions[-1] - a / (n // m) * np.sum(updates[record.version], axis=0))
    if STEPS * n % (n // m):  # the last update of a run has what is left, and each gradient's share is the same
        versions.append(versions[-1] - a / (n // m) * np.sum(updates[done.records[-1].version], axis=0))
    np.testing.assert_allclose(done.parameters, versions[-1], rtol=1e-10, atol=1e-12)
    assert done.records[-1].version == len(versions) - 1


# --- DSSP (Zhao et al. 2019, algorithms 1 and 2) ------------------------------------------------------------------------


def controller(pushes: list[float], slowest: list[float], most: int) -> int:
    """Algorithm 2: the r of the predicted pushes P[r] and Q[j] that are nearest to each other."""
    if len(pushes) < 2 or len(slowest) < 2:
        return 0
    found, least = 0, float("inf")
    for r in range(most + 1):
        for j in range(most + 1):
            mine = pushes[-1] + r * (pushes[-1] - pushes[-2])
            other = slowest[-1] + (j + 1) * (slowest[-1] - slowest[-2])
            if abs(mine - other) < least:
                found, least = r, abs(mine - other)
    return found


HISTORY = st.lists(st.integers(0, 30), max_size=4).map(lambda steps: [float(at) for at in np.cumsum(steps)])


@given(mine=HISTORY, slowest=HISTORY, lower=st.integers(0, 3), most=st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_the_controller_of_dssp_equals_a_double_loop(
    mine: list[float], slowest: list[float], lower: int, most: int
) -> None:
    view = SimpleNamespace(num_workers=3, memory={}, slowest_worker=lambda: 2, time=0.0)
    protocol = DSSP(lower, lower + most)
    for worker, history in ((1, mine), (2, slowest)):
        for view.time in history:
            protocol.pushed(worker, view)
    if not view.memory:
        return
    assert protocol._extra_steps(1, view) == controller(mine, slowest, most)


def dssp_starts(times: list[list[float]], lower: int, upper: int, steps: int) -> list[tuple[float, int, int]]:
    """Algorithm 1, and its bound on top of it: (time, worker, clock) of every step that is started."""
    n = len(times)
    clock, extra = [0] * n, [0] * n
    pushes: list[list[float]] = [[] for _ in range(n)]
    order = list(range(n))  # of their last pushes
    blocked, ends, starts = set[int](), list[tuple[float, int]](), list[tuple[float, int, int]]()

    def may_go_on(worker: int) -> bool:
        ahead = clock[worker] - min(clock)
        if extra[worker] and ahead <= upper:
            extra[worker] -= 1
            return True
        extra[worker] = 0
        if ahead <= lower:
            return True
        if clock[worker] == max(clock) and ahead <= upper:
            slowest = min(order, key=lambda other: clock[other])
            extra[worker] = controller(pushes[worker], pushes[slowest], upper - lower)
        return extra[worker] > 0

    def start(worker: int, now: float) -> None:
        starts.append((now, worker, clock[worker]))
        heapq.heappush(ends, (now + times[worker][clock[worker] % STEPS], worker))

    for worker in range(n):
        start(worker, 0.0)
    for left in reversed(range(steps * n)):
        now, worker = heapq.heappop(ends)
        clock[worker] += 1
        pushes[worker].append(now)
        order.remove(worker)
        order.append(worker)
        if not left:
            return starts
        blocked.add(worker)
        going = {worker} if may_go_on(worker) else set[int]()
        going |= {other for other in blocked if clock[other] - min(clock) <= lower}
        for other in sorted(going):
            start(other, now)
        blocked -= going
    raise AssertionError


@given(times=WHOLE, lower=st.integers(0, 3), more=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_dssp_starts_the_steps_of_a_plain_loop(times: list[list[float]], lower: int, more: int) -> None:
    done = run(DSSP(lower, lower + more), len(times), **timed(times) | {"steps": 3 * STEPS})
    assert [start[:3] for start in done.starts] == dssp_starts(times, lower, lower + more, 3 * STEPS)


class Restarted(Simulation):
    """Checks what servers that start anew know of the time before."""

    checked = 0

    def load(self, now: float) -> None:
        known = json.loads(json.dumps(self.coordinator.view.memory)) if now else {}
        super().load(now)
        for name in ("last", "before") if known else ():
            assert json.loads(self.saved.position)["memory"][name] == known[name]
            assert self.coordinator.view.memory[name] == known[name]
            self.checked += 1


@given(times=UNEVEN, crash_at=st.integers(3, 40))
@settings(max_examples=30, deadline=None)
def test_the_memory_of_dssp_survives_a_checkpoint_exactly(times: list[list[float]], crash_at: int) -> None:
    options: dict[str, Any] = {"gradient": quadratic, "start": START, **timed(times)}
    crashed = Restarted(DSSP(0, 4), workers=len(times), save_every=1, crash_at=[crash_at], **options)
    crashed.to_the_end()
    assert crashed.checked == 2 * (crash_at <= crashed.run.events)


@pytest.mark.parametrize("protocol", [BSP(), KASP(3), KBatchBSP(3), KBatchASP(3)])
def test_weighing_by_examples_is_the_mean_over_all_examples(
    protocol: Protocol,
) -> None:
    """Of Bernoulli sampling's mini-batches of 2, 0 and 7: each gradient, a mean, counts by its size."""
    examples = [2, 0, 7]
    weights = Weights(protocol, 3, by_examples=True)
    factors = np.array(weights.factors([0, 0, 0], examples)) * weights.correction(examples)
    np.testing.assert_allclose(factors / 3, np.array(examples) / 9)
    assert weights.holds is (protocol == BSP())
