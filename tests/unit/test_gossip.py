"""The exchange of examples: selectors by oracles, the weaving, rounds under losses, and runs in virtual time."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, copy_of, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.coordination.orders import ExampleOffer
from trainer.data import gossip as gossip_data
from trainer.data.gossip import GossipSampler, rows_of_pool
from trainer.data.holdout import is_held_out
from trainer.data.opening import open_shards
from trainer.data.rows import Rows
from trainer.data.sampling import FixedSampler
from trainer.exchange.all_reduce import AllReduce
from trainer.gossip import SELECTORS
from trainer.gossip.losses import RecordedLosses, draw_by_weight
from trainer.gossip.rounds import Examples, GossipRounds, Pool
from trainer.gossip.schedule import DELAY, PoolSchedule
from trainer.gossip.self_paced import spl_weights
from trainer.gossip.weave import WovenStep, selection_epoch, woven_step
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.read import read_events, surviving_events
from trainer.sampling.base import Population
from trainer.sampling.shuffle import ShuffleSampler
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.compute import RealCompute
from trainer.simulation.failures import parse_failures
from trainer.simulation.peers.examples import PeerExamples
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay
from trainer.transport.bodies.examples import pack_examples, unpack_examples
from trainer.transport.malformed import MalformedMessageError
from trainer.worker.clients.base import Turn
from trainer.worker.gossip import WorkerGossip

NAN = float("nan")
SCHEDULE: dict[str, Any] = {"profile": parse_profile("lognormal:0.5")}


def losses_of(values: list[float]) -> RecordedLosses:
    """Losses of rows that were visited once, or never if NaN."""
    losses = RecordedLosses(len(values))
    rows = np.flatnonzero(~np.isnan(values))
    losses.note(rows, np.array(values)[rows])
    return losses


# --- selectors ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    visits=st.lists(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 10, width=32)), max_size=6), max_size=6),
    size=st.integers(1, 5),
)
def test_recorded_losses_have_the_moments_of_all_visits(visits: list[list[tuple[int, float]]], size: int) -> None:
    """A row may be in one mini-batch several times. Selectors return distinct rows whatever the losses are."""
    losses = RecordedLosses(5)
    for batch in visits:
        losses.note(np.array([row for row, _ in batch], np.int64), np.array([loss for _, loss in batch], np.float32))
    history = {row: [loss for batch in visits for each, loss in batch if each == row] for row in range(5)}
    for row, values in history.items():
        assert losses.counts[row] == len(values)
        np.testing.assert_equal(losses.last[row], values[-1] if values else NAN)
        assert losses.variances()[row] == pytest.approx(np.var(values) if values else 0, abs=1e-9)
    for select in SELECTORS.values():
        rows = select(losses, size, 3, np.random.default_rng(0))
        assert len(set(rows.tolist())) == size
        assert set(rows.tolist()) <= set(range(5))


@given(values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, NAN]), min_size=1, max_size=8), data=st.data())
def test_hem_takes_the_greatest_losses_and_unseen_rows_last(values: list[float], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values)))
    rows = SELECTORS["hem"](losses_of(values), size, 0, np.random.default_rng(0)).tolist()
    expected = sorted(range(len(values)), key=lambda row: (np.isnan(values[row]), -np.nan_to_num(values[row]), row))
    assert rows == expected[:size]


def test_draws_by_weight_follow_their_probabilities() -> None:
    """Against all ordered draws without replacement; a weight of 0 comes last, at random."""
    weights = np.array([1.0, 2.0, 0.0, 5.0, 0.0])
    expected: Counter[frozenset[int]] = Counter()
    for order in permutations((0, 1, 3), 2):
        first = weights[order[0]] / 8
        expected[frozenset(order)] += first * weights[order[1]] / (8 - weights[order[0]])
    rng = np.random.default_rng(5)
    draws = [draw_by_weight(weights, 4, rng) for _ in range(4000)]
    counts = Counter(frozenset(draw[:2].tolist()) for draw in draws)
    assert counts.keys() == expected.keys()
    for pair, probability in expected.items():
        assert counts[pair] / 4000 == pytest.approx(
            probability, abs=4 * (probability * (1 - probability) / 4000) ** 0.5
        )
    assert all(set(draw[:3].tolist()) == {0, 1, 3} for draw in draws)
    assert Counter(draw[3] for draw in draws)[2] == pytest.approx(2000, abs=130)


def test_spl_weighs_rows_below_a_threshold_that_grows() -> None:
    last = np.array([0.0, 0.05, 0.0999, 0.1, 0.11, 0.14, NAN])
    assert spl_weights(last, 0)[1:].tolist() == [0.05, 0.0999, 0, 0, 0, 0]
    assert spl_weights(last, 0)[0] > 0, "an eligible row without loss comes before others"
    assert np.flatnonzero(spl_weights(last, 1)).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(spl_weights(last, 2)).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["spl", "ab", "active-bias"])
def test_too_few_rows_with_a_weight_are_all_taken(name: str) -> None:
    """The rest is random; without any, all are."""
    losses = losses_of([5.0, 0.03, 5.0, 0.02, NAN, 5.0])
    losses.note(np.array([1, 3]), np.array([0.01, 0.07]))
    rng = np.random.default_rng(2)
    draws = [set(SELECTORS[name](losses, 4, 0, rng).tolist()) for _ in range(200)]
    assert all({1, 3} < draw for draw in draws)
    assert set().union(*draws) == set(range(6))
    blank = [SELECTORS[name](RecordedLosses(6), 2, 0, rng).tolist() for _ in range(600)]
    assert min(Counter(row for draw in blank for row in draw).values()) > 150


@pytest.mark.parametrize(
    ("name", "ratio"), [("ab", 4.0), ("active-bias", ((4 + 16 / 2) ** 0.5) / ((1 + 1 / 2) ** 0.5)), ("random", 1.0)]
)
def test_ab_weighs_rows_by_the_variance_of_their_losses(name: str, ratio: float) -> None:
    """Two rows with variances 4 and 1 over two visits: how often the first is drawn before the second."""
    losses = RecordedLosses(2)
    losses.note(np.array([0, 1]), np.array([0.0, 0.0]))
    losses.note(np.array([0, 1]), np.array([4.0, 2.0]))
    rng = np.random.default_rng(3)
    first = Counter(int(SELECTORS[name](losses, 1, 0, rng)[0]) for _ in range(4000))
    share = ratio / (1 + ratio)
    assert first[0] / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


# --- weaving and rounds ---------------------------------------------------------------------------------------------


@given(first=st.none() | st.integers(0, 12), every=st.integers(1, 5), epoch_steps=st.integers(1, 4))
def test_a_foreign_mini_batch_follows_every_f_own_ones(first: int | None, every: int, epoch_steps: int) -> None:
    """Against a loop that counts; every own mini-batch has its turn, and every epoch one selection."""
    own = foreign = row = 0
    epochs: dict[str, list[int]] = {"end": [], "start": []}
    for clock in range(60):
        step = woven_step(clock, first, every)
        if first is not None and clock >= first and row == every:
            assert step == WovenStep(True, foreign)
            foreign, row = foreign + 1, 0
        else:
            assert step == WovenStep(False, own)
            own += 1
            row += first is not None and clock >= first
        for signal, of_signal in epochs.items():
            epoch = selection_epoch(step, epoch_steps, signal)  # type: ignore[arg-type]
            of_signal += [] if epoch is None else [epoch]
    assert epochs["start"] == list(range(-(-own // epoch_steps)))
    assert epochs["end"] == epochs["start"][:-1]


def examples_of(worker: int, number: int, size: int = 2) -> Examples:
    ids = 1000 * worker + 10 * number + np.arange(size)
    return Examples(ids, ids % 7, (ids % 256).astype(np.uint8)[:, None, None, None])


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "lose", "back", "step", "resume"]), st.integers(0, 3)), max_size=60
    )
)
def test_rounds_keep_their_invariants(actions: list[tuple[str, int]]) -> None:
    """Whatever workers do: whole pools of others alone, in order, and one exchange per worker and epoch."""
    rounds = GossipRounds({})
    members = {0, 1, 2, 3}
    epochs = [0] * 4
    sessions = [0] * 4
    clocks = [0] * 4
    waiting: dict[int, Examples] = {}  # of the open round, by an own count
    last: dict[int, Examples] = {}
    number = 0
    adopted: dict[int, Pool] = {}
    begins: dict[int, tuple[int, int]] = {}
    for action, worker in actions:
        if action == "add" and worker in members:
            given_now = examples_of(worker, epochs[worker])
            assert rounds.add(worker, epochs[worker], given_now) == (worker not in waiting)
            assert not rounds.add(worker, epochs[worker], given_now), "the same epoch again"
            waiting.setdefault(worker, given_now)
            epochs[worker] += 1
        elif action == "lose":
            members.discard(worker)
        elif action == "back":
            members.add(worker)
            sessions[worker] += 1
        elif action == "step" and worker in members:
            clocks[worker] += 1
            pool = rounds.next_pool(worker, sessions[worker], clocks[worker])
            before = begins.get(worker)
            if pool:
                adopted[worker] = pool
                # The mini-batches of a pool that a restarted worker gets again are counted from the same step.
                is_again = before is not None and before[0] == pool.round > 0
                assert pool.clock == (before[1] if is_again and before else clocks[worker])
                begins[worker] = pool.round, pool.clock
            current = adopted[worker]
            assert current.round == number, "the newest complete round, or none"
            others = [examples for other, examples in sorted(last.items()) if other != worker]
            pool_examples = current.others()
            assert pool_examples.ids.tolist() == [i for examples in others for i in examples.ids.tolist()]
            if pool_examples.has_content and others:
                np.testing.assert_array_equal(pool_examples.images_KCHW.ravel(), pool_examples.ids % 256)
            same = [other for other in adopted.values() if other.round == current.round > 0]
            assert all(other.examples is current.examples for other in same), "one array for all workers"
            assert rounds.next_pool(worker, sessions[worker], clocks[worker] + 1) is None, "it has the newest"
        elif action == "resume":  # from a checkpoint, which has JSON
            rounds = GossipRounds(json.loads(json.dumps(rounds.memory)))
            assert {int(worker): ids for worker, (_, ids) in rounds.memory["open"].items()} == {
                worker: examples.ids.tolist() for worker, examples in waiting.items()
            }
            sessions = [session + 1 for session in sessions]
            adopted = {}
        is_due = len(waiting) >= 2 and members <= waiting.keys()
        assert rounds.complete(members) == is_due
        if is_due:
            last = dict(waiting)
            waiting = {}
            number += 1


@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2), max_size=2), st.booleans()), max_size=60
    )
)
def test_a_schedule_keeps_two_pools(steps: list[tuple[set[int], set[int], bool]]) -> None:
    """Compare with a count by hand. steps: who gives examples, who is away, and whether the run resumes after it."""
    schedule = PoolSchedule({})
    waiting: dict[int, list[int]] = {}
    rounds: list[tuple[int, dict[int, list[int]]]] = []
    for step, (givers, away, resumes) in enumerate(steps):
        offers = {worker: ExampleOffer(step, (100 * worker + step,)) for worker in givers}
        waiting |= {worker: list(offers[worker].ids) for worker in givers - waiting.keys()}
        begins = rounds[-1][0] if rounds else 0
        is_due = begins <= step + 1 and len(waiting) > 1 and {0, 1, 2} - away <= waiting.keys()
        assert schedule.advance(step, offers, {}, {0, 1, 2} - away) == is_due
        if is_due:
            rounds.append((step + 1 + DELAY, waiting))
            waiting = {}
        if resumes:
            schedule = PoolSchedule(json.loads(json.dumps(schedule.rounds.memory)))
        for worker in range(3):
            expected = [
                (number, clock, rounds[0][0], [i for other in sorted(ids) if other != worker for i in ids[other]])
                for number, (clock, ids) in list(enumerate(rounds, 1))[-2:]
            ]
            pools = schedule.pools(worker)
            assert [(pool.round, pool.clock, pool.first, pool.others().ids.tolist()) for pool in pools] == expected


def sampler_of(rows: int, batch: int, every: int, size: int, selector: str = "random") -> GossipSampler:
    own = Rows(np.zeros((rows, 1, 1, 1), np.uint8), np.zeros(rows, np.int64), np.arange(rows))
    population = Population(own.labels, None, None, batch, batch / rows, max(1, rows // batch), seed=3, worker=0)
    config = make_config(gossip=size, gossip_every=every, selector=selector, seed=3)
    stream = ShuffleSampler().stream(population)
    return GossipSampler(FixedSampler(own, stream), own, config, 0, batch, population.epoch_steps)


@pytest.mark.slow
@given(
    batch=st.integers(1, 5),
    every=st.integers(1, 3),
    adoptions=st.lists(st.integers(1, 20), max_size=4),
    others=st.integers(1, 4),
    size=st.integers(1, 3),
)
def test_pools_leave_the_own_passes_as_they_are(
    batch: int, every: int, adoptions: list[int], others: int, size: int
) -> None:
    """Own rows come in the order of a run without pools; a pool is read in whole rounds, K or more rows at a time."""
    sampler = sampler_of(10, batch, every, size)
    plain = sampler_of(10, batch, every, size)
    clocks = np.cumsum(adoptions).tolist()
    own = 0
    rest: Counter[int] = Counter()
    for clock in range(80):
        if clock in clocks:
            examples = [examples_of(worker, clocks.index(clock), size) for worker in range(1, others + 1)]
            whole = Examples(*(np.concatenate(part) for part in zip(*examples, strict=True)))
            sampler.adopt(clock, clocks[0], rows_of_pool(Pool(1, clock, clocks[0], whole), lambda ids: None))  # type: ignore
            rest = Counter()
        draw = sampler.draw(clock)
        ids = draw.rows.ids[draw.places]
        if not draw.is_foreign:
            np.testing.assert_array_equal(ids, plain.draw(own).rows.ids[plain.draw(own).places])
            own += 1
            continue
        assert len(ids) >= min(size, batch), "BatchNorm needs more than one"
        assert draw.seen() is None
        rest.update(ids.tolist())
        assert set(rest) <= set(whole.ids.tolist())
        assert max(rest.values()) - min(rest[i] for i in whole.ids.tolist()) <= 1
        np.testing.assert_array_equal(draw.rows.images_NCHW[draw.places].ravel(), ids % 256)


@pytest.mark.parametrize(("selector", "distinct"), [("static", 1), ("random", 20)])
def test_a_static_overlap_has_the_same_examples_in_all_rounds(selector: str, distinct: int) -> None:
    sampler = sampler_of(100, 10, 2, 5, selector)
    given = [sampler.selection(clock) for clock in range(10, 201, 10)]
    assert len({tuple(each.examples.ids.tolist()) for each in given if each}) == distinct
    assert [each.epoch for each in given if each] == list(range(20))


class RecordedLink:
    def __init__(self) -> None:
        self.offers: list[tuple[int, Examples]] = []

    def offer_examples(self, epoch: int, examples: Examples) -> None:
        self.offers.append((epoch, examples))


def test_a_worker_gives_and_adopts_examples_between_steps() -> None:
    """It drops what was made ahead, and a new generation brings the losses of the ledger."""
    sampler = sampler_of(10, 5, 1, 2)
    link = RecordedLink()
    drops: list[int] = []
    history = [(np.array([3, 99]), np.array([0.5, 7.0], np.float32)), (np.array([3]), np.array([1.5], np.float32))]
    gossip = WorkerGossip(
        sampler, link, lambda: drops.append(clock), lambda ids: own_rows(ids), lambda version: history[: 1 + version]
    )
    foreign = Pool(1, 3, 3, Examples(np.array([50, 51]), np.zeros(0, np.int64), np.zeros((0, 0, 0, 0), np.uint8)))
    for clock in range(8):
        generation = 1 + (clock >= 6)
        gossip.begin(Turn(clock, version=int(clock >= 6), generation=generation, pool=foreign if clock == 3 else None))
        draw = sampler.draw(clock)
        assert draw.is_foreign == (clock in (4, 6))
        assert draw.rows.ids[draw.places].min() >= (50 if draw.is_foreign else 0)
        if clock == 0:
            assert sampler.losses.counts.tolist() == [0, 0, 0, 1] + [0] * 6, "rows of others are left out"
        gossip.end(draw, (np.full(len(draw.rows.ids[draw.places]), 2.0, np.float32), np.zeros(5, np.bool_)))
    assert drops == [3]
    # Own mini-batches 2 and 4 begin passes: the steps 2 and 5.
    assert [epoch for epoch, _ in link.offers] == [0, 1]
    assert all(len(examples.ids) == 2 for _, examples in link.offers)
    assert sampler.losses.counts.sum() == 2 + 5, "the ledger, and the own step of the second generation"


def own_rows(ids: Any) -> Rows:
    return Rows(np.zeros((len(ids), 1, 1, 1), np.uint8), np.zeros(len(ids), np.int64), ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_examples_cross_the_wire_whole(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 2, 4, 5)).astype(dtype)
    labels: Any = np.array([1, 2, 3], np.int64 if dtype is np.uint8 else np.float32)
    examples = Examples(np.array([5, 1 << 50, 7]), labels, images)
    body = pack_examples(examples)
    for before, after in zip(examples, unpack_examples(memoryview(body)), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
    without = Examples(examples.ids, np.empty(0, np.int64), np.empty((0, 0, 0, 0), np.uint8))
    assert not unpack_examples(pack_examples(without)).has_content
    for end in (0, 10, len(body) - 1):
        with pytest.raises(MalformedMessageError):
            unpack_examples(body[:end])
    with pytest.raises(MalformedMessageError):
        unpack_examples(b"\xff\xff\xff\xff" + body[4:])


# --- runs in virtual time -------------------------------------------------------------------------------------------


def in_full(*values: Any) -> Any:
    """Return the values of a parameter that only the full tier runs."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workers = [rows_of(20, seed=worker, first_id=20 * worker) for worker in range(3)]
    return write_shards(tmp_path_factory.mktemp("set") / "shards", workers, EVAL_ROWS)


def run(shards: Path | str, output: Path, options: Any = QUIET, simulated: Any = None, **values: Any) -> Result:
    settings: dict[str, Any] = {"batch_size": 12, "steps": 40, "model": "logistic", "gossip": 3, "gossip_every": 2}
    machines = SimulationSettings(**(SCHEDULE if simulated is None else simulated))
    return simulate(make_config(shards, output, **(settings | values)), machines, options)


def ledger_of(result: Result) -> pd.DataFrame:
    folder = Path(str(result.output)) / "examples"
    return pd.concat(pd.read_parquet(path) for path in sorted(folder.glob("*.parquet")))


def events_of(result: Result, kind: Any) -> list[Any]:
    return [
        event for event in surviving_events(read_events(result.output / "metrics.jsonl")) if isinstance(event, kind)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"protocol": "bsp", "selector": "spl", "gossip_signal": "start"},
        {"protocol": "asp", "selector": "ab", "servers": 2},
        {"protocol": "k-bsp", "selector": "hem", "cancel": "preempt", "k": 2},
        {"protocol": "ssp", "selector": "active-bias", "sampling": "bernoulli"},
        {"protocol": "downpour", "selector": "ab", "push_every": 3},
        {"exchange": "d-psgd", "steps": 52, "selector": "ab", "gossip_signal": "start"},
        in_full({"exchange": "matcha", "steps": 60, "order": "grad-then-avg", "every": 2, "selector": "hem"}),
        in_full({"exchange": "all-reduce", "selector": "static", "gossip_signal": "start"}),
        in_full({"exchange": "strategy-switch", "alpha": 0.5, "selector": "hem"}),
        in_full({"exchange": "sync-switch", "fraction": 0.4, "selector": "ab"}),
    ],
    ids=lambda values: str(values.get("protocol", values.get("exchange"))),
)
def test_a_run_with_failures_is_replayed(values: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """The same command gives the same bits too; a worker dies, then the servers."""
    machines = SCHEDULE | {"latency_ms": 5.0, "failures": parse_failures("worker:1@1+0.7,server@2+0.5")}
    first = run(shards, tmp_path / "a", simulated=machines, checkpoint_every_s=0.5, **values)
    assert replay(first.output).is_equal
    second = run(shards, tmp_path / "b", simulated=machines, checkpoint_every_s=0.5, **values)
    assert final(first).tobytes() == final(second).tobytes()
    pools = events_of(first, PoolEvent)
    assert len({pool.round for pool in pools}) > 3
    plain = {key: value for key, value in values.items() if key not in ("selector", "gossip_signal")}
    without = run(shards, tmp_path / "c", simulated=machines, gossip=0, gossip_every=4, **plain)
    assert final(first).tobytes() != final(without).tobytes()


@pytest.mark.full
def test_all_reduce_has_the_pools_of_bsp(shards: Path, tmp_path: Path) -> None:
    """Compare bits and logs, also while a worker is away, whose losses are lost with it."""
    machines = SCHEDULE | {"latency_ms": 2.0, "failures": parse_failures("worker:1@1+0.7,server@2+0.5")}
    runs = {"bsp": {"protocol": "bsp"}, "all-reduce": {"exchange": "all-reduce"}}
    ends = [run(shards, tmp_path / name, simulated=machines, **values) for name, values in runs.items()]
    assert final(ends[0]).tobytes() == final(ends[1]).tobytes()
    pools = [{(each.round, each.worker, each.clock, each.first) for each in events_of(end, PoolEvent)} for end in ends]
    assert pools[0] == pools[1]
    assert len(pools[0]) > 9


@pytest.mark.slow
@pytest.mark.parametrize("values", [{"protocol": "bsp", "gossip_signal": "start"}, {"exchange": "all-reduce"}])
def test_a_death_in_any_step_keeps_the_pools(values: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """Random selections depend on no losses, so a worker that repeats a step has the examples that it had before."""
    settings = {"steps": 22, "gossip_every": 1, "epoch_checkpoints": False} | values
    whole = run(shards, tmp_path / "whole", **settings)
    assert len(events_of(whole, GossipEvent)) > 1
    for tenth in range(1, 25, 2):
        machines = SCHEDULE | {"failures": parse_failures(f"worker:{tenth % 3}@{tenth / 10}+0.3")}
        disturbed = run(shards, tmp_path / str(tenth), simulated=machines, **settings)
        assert final(disturbed).tobytes() == final(whole).tobytes(), tenth


@pytest.mark.slow
def test_training_waits_for_no_exchange(shards: Path, tmp_path: Path) -> None:
    """The pushes of a run are those of one without exchange, at the same times, also with a worker that never returns."""
    machines = SCHEDULE | {"failures": parse_failures("worker:2@1.5+1000"), "latency_ms": 2.0}
    columns = ["version", "worker", "clock", "seconds"]
    values: dict[str, Any] = {"simulated": machines, "protocol": "asp"}
    given_to_others = run(shards, tmp_path / "a", **values)
    alone = run(shards, tmp_path / "b", gossip=0, gossip_every=4, **values)
    pd.testing.assert_frame_equal(given_to_others.pushes()[columns], alone.pushes()[columns])
    rounds = events_of(given_to_others, GossipEvent)
    assert [len(event.ids) for event in rounds[:2]] == [3, 3]
    assert [len(event.ids) for event in rounds[-2:]] == [2, 2], "survivors exchange without the worker that is away"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        in_full({"protocol": "asp"}),
        in_full({"exchange": "all-reduce"}),
        {"exchange": "d-psgd"},
        in_full({"exchange": "matcha", "every": 3}),
        in_full({"exchange": "sync-switch"}),
        {"exchange": "strategy-switch", "alpha": 0.5},
    ],
    ids=lambda values: str(values.get("exchange", "parameter-server")),
)
def test_pools_keep_their_invariants(
    values: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect (T - 1) K rows as the set has them, none of them own, and at most one gift per pass of a worker."""
    adopt = RealCompute.adopt
    adopted: list[tuple[int, Pool]] = []

    def note(self: RealCompute, worker: int, pool: Pool) -> None:
        adopt(self, worker, pool)
        adopted.append((worker, pool))
        others = pool.others()
        if pool.round:
            assert others.has_content
            np.testing.assert_array_equal(others.images_KCHW, self._find_rows(others.ids).images_NCHW)
            np.testing.assert_array_equal(others.labels, self._find_rows(others.ids).labels)

    monkeypatch.setattr(RealCompute, "adopt", note)
    result = run(shards, tmp_path / "run", steps=60, example_ledger=True, **values)
    pools = [(worker, pool) for worker, pool in adopted if pool.round]
    for worker, pool in pools:
        sources = pool.others().ids // 20
        assert Counter(sources.tolist()) == dict.fromkeys({0, 1, 2} - {worker}, 3)
    ledger = ledger_of(result)
    passes = np.bincount(ledger.id // 20, minlength=3) // 20
    rounds = [{pool.round for each, pool in pools if each == worker} for worker in range(3)]
    assert all(2 <= len(rounds[worker]) <= passes[worker] for worker in range(3))


@pytest.mark.slow
def test_rows_that_are_held_out_go_to_nobody(shards: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"exchange": "strategy-switch", "switch_on": "holdout", "holdout_share": 0.4}
    result = run(shards, tmp_path / "run", gossip=5, selector="hem", **values)
    config = make_config(shards, tmp_path / "run", **values)
    given = {number for event in events_of(result, GossipEvent) for ids in event.ids.values() for number in ids}
    held_out = set(np.flatnonzero(is_held_out(np.arange(60), config)).tolist())
    assert len(held_out) > 9
    assert not given & held_out
    assert len(given) > 15


@pytest.mark.slow
def test_pools_have_the_size_and_the_rows_of_others(shards: Path, tmp_path: Path) -> None:
    """(T - 1) K rows, none of them own; a round per epoch; the ledger and the passes have own rows alone."""
    result = run(shards, tmp_path / "run", protocol="bsp", example_ledger=True, steps=60)
    rounds = {event.round: event.ids for event in events_of(result, GossipEvent)}
    for ids in rounds.values():
        assert list(ids) == ["0", "1", "2"]
        for worker, own in ids.items():
            assert len(set(own)) == 3
            assert all(20 * int(worker) <= number < 20 * int(worker) + 20 for number in own)
    pools = events_of(result, PoolEvent)
    # 5 own mini-batches are a pass, and a pool comes a step after its end. Then two of three mini-batches are own ones.
    own_clocks = [clock for clock in range(60) if clock < 6 or (clock - 6) % 3 < 2]
    assert [pool.clock for pool in pools if pool.worker == 0] == [clock + 1 for clock in own_clocks[5::5]]
    assert {pool.first for pool in pools} == {6}
    ledger = ledger_of(result)
    assert len(ledger) == 3 * 4 * len(own_clocks)
    assert np.ptp(np.bincount(ledger.id, minlength=60)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selector", "exchange"),
    [
        ("random", "parameter-server"),
        ("hem", "all-reduce"),
        ("ab", "all-reduce"),
        in_full("ab", "d-psgd"),
        in_full("random", "matcha"),
        in_full("random", "strategy-switch"),
    ],
)
def test_a_run_resumes_in_any_round(
    selector: str, exchange: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of the whole run if the losses are in a ledger or do not count; without one it is replayed.

    Under asp, in the second stage, all workers begin together."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values: dict[str, Any] = {"exchange": exchange, "selector": selector}
    values |= {"steps": 45 if exchange in ("d-psgd", "matcha") else 30}
    values |= {"alpha": 0.5} if exchange == "strategy-switch" else {"example_ledger": selector == "ab"}
    values |= {"protocol": "bsp"} if exchange == "parameter-server" else {}
    whole = run(shards, tmp_path / "whole", **values)
    stored = versions(tmp_path / "whole" / "checkpoints")
    for middle in stored[1:-1:2]:
        shutil.copytree(tmp_path / "whole", tmp_path / str(middle))
        (tmp_path / str(middle) / "result.json").unlink()
        for later in stored:
            if later > middle:
                shutil.rmtree(folder_of(tmp_path / str(middle) / "checkpoints", later))
        resumed = run(shards, tmp_path / str(middle), RESUME, **values)
        if selector != "hem" and exchange != "strategy-switch":
            assert final(resumed).tobytes() == final(whole).tobytes(), middle
        assert replay(resumed.output).is_equal


def test_rows_are_read_beside_a_file_without_rows(shards: Path, tmp_path: Path) -> None:
    """Spark writes files without a row group for empty partitions."""
    folder = copy_of(shards, tmp_path / "set")
    manifest = json.loads((folder / "manifest.json").read_text())
    part = folder / manifest["workers"][0]["files"][0]["path"]
    pq.ParquetWriter(part.with_name("empty.parquet"), pq.read_schema(part)).close()
    data = part.with_name("empty.parquet").read_bytes()
    empty = {"path": str(part.with_name("empty.parquet").relative_to(folder)), "rows": 0, "bytes": len(data)}
    manifest["workers"][0]["files"].append(empty | {"sha256": hashlib.sha256(data).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rows = gossip_data.read_rows(open_shards(str(folder)), np.array([3, 1]), targets=False)
    assert rows.ids.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sampling": "recency"}, "which the loss table of --sampling recency does not count"),
        ({"follow": True}, "exchanges examples among the shards of one set: leave out --follow"),
        ({"protocol": "bsp", "repartition": "random"}, "among the shards of one set: leave out --repartition random"),
        ({"gossip": 0, "selector": "ab"}, "--selector is for runs whose workers exchange examples: give --gossip K"),
        ({"selector": "easy"}, "--selector must be random or static or hem or spl or ab or active-bias, got 'easy'"),
    ],
)
def test_options_that_exclude_an_exchange(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_config(**{"gossip": 3, **values})
    assert line in str(raised.value)


@pytest.mark.slow
def test_large_losses_of_late_epochs_overflow_nothing() -> None:
    """SPL's threshold grows without end, and a row without any loss has a tiny weight."""
    weights = spl_weights(np.array([0.0, 1e30, np.nan]), 10_000)
    assert weights.tolist() == [1e-300, 1e30, 0]
    assert np.isfinite(np.random.default_rng(0).exponential(size=100_000) / weights[0]).all()


def test_sets_that_cannot_exchange_are_refused(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--gossip 21 exceeds the 20 rows of a worker: give at most 20"):
        run(shards, tmp_path / "many", gossip=21)
    with pytest.raises(UsageError, match="--gossip 3 exchanges examples among workers, and the run has one"):
        run(shards, tmp_path / "one", simulated={"workers": 1})
    with pytest.raises(UsageError, match="the 1 example that a mini-batch of --gossip 1 may have: give --gossip 2"):
        run(shards, tmp_path / "norm", gossip=1, model="cnn")
    with pytest.raises(UsageError, match="--gossip 3 exchanges rows, --compute quadratic has none"):
        run("", tmp_path / "toy", simulated={"compute": "quadratic", "workers": 3})
    monkeypatch.setattr(gossip_data, "MOST_EXAMPLE_BYTES", 10)
    with pytest.raises(UsageError, match="--gossip 3 sends images of at most 10 bytes"):
        run(shards, tmp_path / "large")
    assert not list(tmp_path.iterdir())


def test_an_exchange_may_carry_no_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllReduce, "carries_examples", False)
    with pytest.raises(UsageError, match="--gossip 3 gives examples to all other workers, which --exchange all-reduce"):
        make_config(gossip=3, exchange="all-reduce")


@pytest.mark.slow
def test_no_worker_is_far_ahead_of_the_slowest(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep workers with rare links at most DELAY steps ahead, so that all begin a pool at the same step."""
    leads = []
    give = PeerExamples.give

    def note(self: PeerExamples, worker: int, round: int) -> None:
        leads.append(round - self.progress.version)
        give(self, worker, round)

    monkeypatch.setattr(PeerExamples, "give", note)
    machines = {"profile": parse_profile("one-slow:8")}
    result = run(shards, tmp_path / "run", simulated=machines, exchange="d-psgd", every=40, steps=60)
    assert max(leads) == DELAY
    pools = events_of(result, PoolEvent)
    begins = {(pool.round, pool.clock, pool.first) for pool in pools}
    assert len(begins) == max(pool.round for pool in pools) > 2
    assert {pool.first for pool in pools} == {min(pool.clock for pool in pools)}
    assert replay(result.output).is_equal
