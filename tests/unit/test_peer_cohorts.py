"""D-PSGD and MATCHA that continue with other workers: all begin with the mean of the models, and with new links."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from tests.support.peer_oracle import ELEMENTS, Matrix, ring_weights, toy_gradient
from tests.support.recent_losses import Forgotten, assert_drawn_by_recent_losses
from tests.support.tiers import only
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from tests.unit.test_neighbour_rounds import Network
from tests.unit.test_peers import consensus_of, decentralised, folder_of_run, models_of
from trainer import Result
from trainer.checkpoints.read import newest, read_state, read_vector
from trainer.checkpoints.replica_file import mean_of, open_replicas, replica_name
from trainer.checkpoints.state import folder_of
from trainer.config import RunFacts
from trainer.exchange.plan_json import plan_from_json, plan_to_json
from trainer.leader.peer_checkpoints import PeerTimes, begin_peers, plan_of
from trainer.regroup import obstacle
from trainer.rules import replica_rate
from trainer.runlog.kinds.peers import NewcomerEvent
from trainer.runlog.kinds.run import RollbackEvent
from trainer.runlog.kinds.training import EpochEvent
from trainer.runlog.run_record import read_record
from trainer.sampling.recency import RecencySampler
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.peers import engine
from trainer.simulation.peers.engine import PeerEngine
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every checkpoint of a run."""
    monkeypatch.setattr(engine, "prune", lambda root, by_rule: [])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], tuple[float, bytes, bytes]]:
    """Time, model and momentum at the start of each (worker, round)."""
    found: dict[tuple[int, int], tuple[float, bytes, bytes]] = {}
    begin = PeerEngine._begin

    def note(self: PeerEngine, worker: int) -> None:
        replica = self.peers[worker].replica
        place = (worker, self.progress.members[worker].clock)
        found[place] = (self.now, replica.values.tobytes(), replica.momentum.tobytes())
        begin(self, worker)

    monkeypatch.setattr(PeerEngine, "_begin", note)
    return found


def cohorts_of(result: Result) -> list[tuple[int, int, int, int]]:
    """Workers, first version, first clock, and the steps that earlier epochs are worth."""
    entries = read_record(folder_of_run(result)).config.cohorts.entries
    return [(each.workers, each.version, each.clock, each.epoch_steps) for each in entries]


def means(models: Matrix) -> np.ndarray:
    """The mean of the models, as a checkpoint has it."""
    return mean_of(list(models.astype(np.float32))).astype(np.float32)


def cut(output: Path, version: int) -> None:
    """Leave of a run what a kill right after a checkpoint leaves."""
    for path in (output / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > version:
            shutil.rmtree(path)
    (output / "result.json").unlink()


@pytest.mark.parametrize("order", ["avg-then-grad", "grad-then-avg"])
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_all_new_workers_begin_with_the_mean(
    tmp_path: Path, order: str, workers: int, begun: dict[tuple[int, int], tuple[float, bytes, bytes]]
) -> None:
    """Compute the means of models and momenta, the time of the last worker at the checkpoint, and one round by hand."""
    values: dict[str, Any] = {"order": order, "momentum": 0.9, "profile": parse_profile("lognormal:0.5")}
    before = decentralised(tmp_path, steps=13, **values)
    models, momenta = models_of(before)
    assert len({model.tobytes() for model in models}) == 4
    mean, momentum = means(models), means(momenta)
    reached = max(begun[worker, 13][0] for worker in range(4))
    begun.clear()
    after = decentralised(tmp_path, RESUME, workers=workers, steps=14, **values)
    for worker in range(workers):
        time, own, own_momentum = begun[worker, 13]
        assert time == pytest.approx(reached)
        assert own == mean.tobytes()
        assert own_momentum == momentum.tobytes()
    size = 40 // workers
    gradients = np.array([toy_gradient(mean, worker, 13, size) for worker in range(workers)])
    steps = 0.9 * momentum + 0.1 * gradients
    weights = ring_weights(workers) if workers > 1 else np.eye(1)
    expected = weights @ (mean - steps) if order == "grad-then-avg" else mean - steps
    np.testing.assert_allclose(models_of(after, workers=workers)[0], expected, atol=1e-6)


def test_epochs_and_rounds_continue(tmp_path: Path) -> None:
    """Two and a half epochs of ten rounds, then epochs of eight, then a worker fewer at the end of an epoch."""
    first = decentralised(tmp_path, steps=25, epoch_checkpoints=True)
    sent = read_state(folder_of_run(first) / "checkpoints", 25).memory["replicas"]["sent_bytes"]
    decentralised(tmp_path, RESUME, workers=6, batch_size=50, steps=None, epochs=4)
    done = decentralised(tmp_path, RESUME, workers=5, batch_size=50, steps=None, epochs=6)
    assert cohorts_of(done) == [(4, 0, 0, 0), (6, 25, 25, 20), (5, 37, 37, 32)]
    assert (done.updates, done.cause, done.num_workers) == (53, "finished", 5)
    ends = {1: 10, 2: 20, 3: 29, 4: 37, 5: 45, 6: 53}
    events = consensus_of(done)
    assert {event.epoch: event.version for event in events} == ends
    assert [event.replicas for event in events] == [4, 4, 6, 6, 5, 5]
    assert {event.epoch: event.version for event in done.events() if isinstance(event, EpochEvent)} == ends
    # Two models of 64 elements per worker and round of a ring.
    assert sent == 25 * 4 * 2 * 4 * ELEMENTS
    assert [event.sent_bytes - sent for event in events[2:]] == [
        2 * 4 * ELEMENTS * count for count in (4 * 6, 12 * 6, 12 * 6 + 8 * 5, 12 * 6 + 16 * 5)
    ]
    assert (np.diff([event.seconds or 0.0 for event in events]) > 0).all()
    pushes = done.pushes()
    assert list(zip(pushes["clock"], pushes["worker"], strict=True)) == [
        (round, worker) for round in range(53) for worker in range(4 if round < 25 else 6 if round < 37 else 5)
    ]
    assert replay(done.output).is_equal


def test_the_rate_of_a_round_continues(tmp_path: Path) -> None:
    """Keep the rate of the next round, whatever the mini-batch and the length of an epoch are."""
    values: dict[str, Any] = {"recipe": "inverse-sqrt", "momentum": 0.0}
    decentralised(tmp_path, steps=25, **values)
    before = read_record(tmp_path).config
    decentralised(tmp_path, RESUME, workers=6, batch_size=80, steps=30, **values)
    later = read_record(tmp_path).config
    facts = RunFacts(4, 400, ELEMENTS, 0)
    rates = [replica_rate(config, replace(facts, num_workers=each), 25) for config, each in ((before, 4), (later, 6))]
    assert rates == pytest.approx([0.1 * 26**-0.5] * 2)


HARD: dict[str, Any] = {"profile": parse_profile("lognormal:0.5"), "latency_ms": 5.0, "bandwidth_mbps": 0.5}
WAYS: list[dict[str, Any]] = [
    {"topology": "ring"},
    {"topology": "random-pair", "every": 2},
    {"exchange": "matcha", "order": "grad-then-avg"},
]


@pytest.mark.parametrize("values", WAYS)
def test_a_kill_at_any_checkpoint_keeps_the_bits(tmp_path: Path, values: dict[str, Any]) -> None:
    """Replay a run with 4, then 6, then 2 workers, also right after a change."""
    values = HARD | values | {"momentum": 0.9, "checkpoint_every_s": 0.7, "epoch_checkpoints": True}
    whole = tmp_path / "whole"
    for workers, steps in ((4, 13), (6, 24), (2, 40)):
        done = decentralised(whole, QUIET if workers == 4 else RESUME, workers=workers, steps=steps, **values)
    assert replay(whole).is_equal
    ends = sorted(int(path.name) for path in (whole / "checkpoints").iterdir() if path.name.isdigit())
    later = [version for version in ends if 24 <= version < 40]
    assert len(later) > 2
    for version in later:
        part = tmp_path / str(version)
        shutil.copytree(whole, part)
        cut(part, version)
        again = decentralised(part, RESUME, workers=None, steps=40, **values)
        assert cohorts_of(again) == cohorts_of(done) == [(4, 0, 0, 0), (6, 13, 13, 13), (2, 24, 24, 24)]
        assert models_of(again, workers=2)[0].tobytes() == models_of(done, workers=2)[0].tobytes(), version
        assert again.pushes().drop(columns="generation").equals(done.pushes().drop(columns="generation")), version
        assert again.seconds == pytest.approx(done.seconds, abs=1e-3)
        assert replay(part).is_equal


def test_a_change_without_an_update_is_none(tmp_path: Path) -> None:
    """A start that was killed before its first checkpoint leaves no cohort and no plan behind."""
    decentralised(tmp_path, steps=13)
    decentralised(tmp_path, RESUME, workers=6, steps=24)
    cut(tmp_path, 13)
    assert replay(tmp_path).is_equal
    done = decentralised(tmp_path, RESUME, workers=3, steps=24)
    assert cohorts_of(done) == [(4, 0, 0, 0), (3, 13, 13, 13)]
    assert [plan_from_json(each).num_workers for each in _memory(done)["earlier_plans"]] == [4]
    assert replay(tmp_path).is_equal


def _memory(result: Result) -> dict[str, Any]:
    root = folder_of_run(result) / "checkpoints"
    return read_state(root, newest(root) or 0).memory


def test_absent_workers_end_with_the_others(tmp_path: Path) -> None:
    """Worker 2 misses the last rounds before the change and worker 1 rounds after it; then the leader rolls back."""
    failures = parse_failures("worker:2@0.95+0.8,worker:1@1.5+0.3,server@2.4+0.1")
    values = HARD | {"failures": failures, "momentum": 0.9, "checkpoint_every_s": 0.5}
    before = decentralised(tmp_path, steps=10, **values)
    state = read_state(tmp_path / "checkpoints", 10)
    assert state.clocks[2] < 10
    assert sorted(PeerTimes.from_state(state).begun) == [0, 1, 3]
    mean = means(models_of(before)[0][[0, 1, 3]])
    np.testing.assert_array_equal(read_vector(tmp_path / "checkpoints", 10), mean)
    done = decentralised(tmp_path, RESUME, workers=5, steps=30, **values)
    assert cohorts_of(done) == [(4, 0, 0, 0), (5, 10, 10, 10)]
    assert read_record(tmp_path).config.cohorts.present.ends == (10, 10, 10, 10)
    assert (done.updates, done.cause) == (30, "finished")
    assert {type(event) for event in done.events()} >= {NewcomerEvent, RollbackEvent}
    assert replay(tmp_path).is_equal


def test_a_roll_back_to_the_change_begins_it_again(tmp_path: Path) -> None:
    """The leader dies in the first round of the new workers, of whom two are away."""
    values = HARD | {"momentum": 0.9, "checkpoint_every_s": 1000.0}
    at = decentralised(tmp_path / "calm", steps=13, **values).seconds or 0.0
    text = f"worker:0@{at + 0.02}+1.5,worker:3@{at + 0.03}+0.7,server@{at + 0.3}+0.1"
    values["failures"] = parse_failures(text)
    run = tmp_path / "run"
    decentralised(run, steps=13, **values)
    done = decentralised(run, RESUME, workers=6, steps=33, **values)
    assert [event.to_version for event in done.events() if isinstance(event, RollbackEvent)] == [13]
    assert (done.updates, done.cause) == (33, "finished")
    assert replay(run).is_equal


def test_unchanged_workers_keep_their_links(tmp_path: Path) -> None:
    """Change the mini-batch too. A file of links may change with the number of workers, and only then."""
    links = tmp_path / "links.txt"
    links.write_text("0 1\n1 2\n2 3\n")
    run = tmp_path / "run"
    decentralised(run, topology=str(links), steps=13)
    again = replace(RESUME, batch_size_given=True)
    done = decentralised(run, again, batch_size=50, topology=str(links), steps=20)
    assert cohorts_of(done) == [(4, 0, 0, 0), (4, 13, 13, 10)]
    assert _memory(done)["plan"] == _memory(done)["earlier_plans"][0]
    links.write_text("0 1\n1 2\n2 3\n3 4\n")
    done = decentralised(run, RESUME, workers=5, batch_size=50, topology=str(links), steps=30)
    assert replay(run).is_equal
    links.write_text("0 1\n1 2\n2 3\n3 4\n4 0\n")
    for batch_size in (50, 60):
        with pytest.raises(UsageError, match="has other links than at the start of this run: restore them"):
            decentralised(run, again, workers=5, batch_size=batch_size, topology=str(links), steps=40)


@pytest.mark.parametrize(
    ("topology", "workers", "line"),
    [
        ("FILE", 3, "links.txt"),
        ("FILE", 6, "links.txt"),
        ("torus", 5, "torus"),
    ],
)
def test_links_that_cannot_be_are_refused(tmp_path: Path, topology: str, workers: int, line: str) -> None:
    """Before anything is written."""
    (tmp_path / "links.txt").write_text("0 1\n1 2\n2 3\n")
    own = str(tmp_path / "links.txt") if topology == "FILE" else topology
    run = tmp_path / "run"
    decentralised(run, topology=own, steps=5)
    files = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    with pytest.raises(UsageError, match=line) as refused:
        decentralised(run, RESUME, topology=own, workers=workers, steps=9)
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == files


def test_clocks_of_other_workers_are_broken_data(tmp_path: Path) -> None:
    decentralised(tmp_path, steps=13)
    decentralised(tmp_path, RESUME, workers=6, steps=24)
    config = read_record(tmp_path).config
    facts = RunFacts(6, 400, ELEMENTS, 0)
    root = tmp_path / "checkpoints"
    state = read_state(root, 13)
    plan = plan_of(config, facts, root, begin_peers(config, facts, root, state))
    assert plan_to_json(plan)["num_workers"] == 6
    with pytest.raises(DataError, match="has other clocks than the workers"):
        begin_peers(config, facts, root, replace(state, clocks={0: 13, 1: 13}))
    damages: tuple[Any, ...] = (3, [3], [{}])
    for damaged in damages:
        with pytest.raises(DataError, match="holds no plan of links"):
            begin_peers(config, facts, root, replace(state, memory=state.memory | {"earlier_plans": damaged}))
    with pytest.raises(DataError, match=r"is damaged; the newest whole one is of version 0"):
        begin_peers(config, facts, root, read_state(root, 0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workers", [1, 6])
def test_messages_in_any_order_have_virtual_times_bits(tmp_path: Path, workers: int, seed: int) -> None:
    """The leader and the workers of real processes, in a network without sockets, continue a run of four workers."""
    values: dict[str, Any] = {"exchange": "matcha", "momentum": 0.9, "heartbeat_timeout_s": 60.0}
    decentralised(tmp_path / "run", steps=7, **values)
    shutil.copytree(tmp_path / "run", tmp_path / "network")
    done = decentralised(tmp_path / "run", RESUME, workers=workers, steps=19, **values)
    config = read_record(tmp_path / "run").config
    config = replace(config, run=replace(config.run, output=str(tmp_path / "network")))
    network = Network(seed, config, workers)
    network.run()
    root = tmp_path / "network" / "checkpoints"
    assert newest(root, verify=True) == 19
    path = folder_of(root, 19) / replica_name(read_state(root, 19).generation)
    models = np.array(open_replicas(path, workers, ELEMENTS, 0, 19).values, np.float64)
    assert models.tobytes() == models_of(done, workers=workers)[0].tobytes()
    assert read_vector(root, 19).tobytes() == final(done).tobytes()
    assert read_state(root, 19).memory["earlier_plans"] == _memory(done)["earlier_plans"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    parts = [rows_of(size, 10 + number, 100 * number) for number, size in enumerate((40, 29, 45))]
    return str(write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS))


def by_losses(shards: str, output: Path, options: Any, workers: int | None, **values: Any) -> Result:
    """Train a real model, whose workers draw rows by their most recent losses; the first pass takes six steps or fewer."""
    machines = {name: values.pop(name) for name in ("failures",) if name in values}
    common: dict[str, Any] = {"sampling": "recency", "pressure": 1000.0, "example_ledger": True, "threads": 1}
    common |= {"exchange": "d-psgd", "model": "logistic", "batch_size": 24}
    config = make_config(shards, output, **common | values)
    return simulate(config, SimulationSettings(workers=workers, **machines), options)


LOSSES: dict[str, dict[str, Any]] = {
    "d-psgd": {},
    "matcha": {"exchange": "matcha", "order": "grad-then-avg"},
    "batch-norm": {"model": "cnn"},
}


@pytest.mark.parametrize("case", only(["d-psgd"], list(LOSSES)))
def test_the_losses_of_rows_go_to_their_new_workers(case: str, shards: str, tmp_path: Path) -> None:
    """Compare all draws of five workers with the losses of the ledger."""
    values = LOSSES[case]
    by_losses(shards, tmp_path, QUIET, None, steps=12, **values)
    by_losses(shards, tmp_path, RESUME, 5, steps=20, batch_size=30, **values)
    assert assert_drawn_by_recent_losses(tmp_path) == 5 * 8
    assert replay(tmp_path).is_equal


@pytest.mark.full
def test_losses_outlast_two_changes_and_a_kill(shards: str, tmp_path: Path) -> None:
    """The kill is four rounds after the second change."""
    values: dict[str, Any] = {"checkpoint_every_s": 0.4}
    by_losses(shards, tmp_path, QUIET, None, steps=12, **values)
    by_losses(shards, tmp_path, RESUME, 5, steps=20, batch_size=30, **values)
    end = final(by_losses(shards, tmp_path, RESUME, 2, steps=32, batch_size=30, **values)).tobytes()
    assert assert_drawn_by_recent_losses(tmp_path) == 2 * 12
    cut(tmp_path, 25)
    assert newest(tmp_path / "checkpoints", verify=True) in range(21, 26)
    assert final(by_losses(shards, tmp_path, RESUME, None, steps=32, batch_size=30, **values)).tobytes() == end
    assert assert_drawn_by_recent_losses(tmp_path) == 2 * 12
    assert replay(tmp_path).is_equal


@pytest.mark.full
@pytest.mark.parametrize(
    ("failures", "forgotten"),
    [
        ("worker:1@0.95+0.3", {(12, 1): 0}),
        ("worker:0@0.75+0.02,worker:1@0.95+0.3", {(8, 0): 0, (12, 1): 8}),
    ],
)
def test_losses_of_an_absent_worker_are_those_of_a_neighbour(
    failures: str, forgotten: Forgotten, shards: str, tmp_path: Path
) -> None:
    """Worker 1 is absent at the change. In the second case worker 0 has begun round 8 with the model of worker 1."""
    values: dict[str, Any] = {"failures": parse_failures(failures)}
    by_losses(shards, tmp_path, QUIET, None, steps=12, **values)
    by_losses(shards, tmp_path, RESUME, 5, steps=20, batch_size=30, **values)
    assert assert_drawn_by_recent_losses(tmp_path, forgotten) == 5 * 8
    assert replay(tmp_path).is_equal


def test_another_table_of_own_losses_does_not_change_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are not those of rows, so that nothing says to whom they go."""
    config = make_config(exchange="d-psgd", sampling="recency")
    assert obstacle(config, 5, has_followed=False) is None
    monkeypatch.setattr(RecencySampler, "has_row_entries", False)
    assert "keeps the losses of --sampling recency" in str(obstacle(config, 5, has_followed=False))
