"""D-PSGD and MATCHA in virtual time: plain loops as oracles, deaths and returns, resumption from every checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from tests.support.peer_oracle import ELEMENTS, Matrix, d_psgd, ring_weights
from tests.support.references import undocumented_below
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final, virtual
from trainer import Options, Result, train
from trainer.checkpoints.read import newest, read_state
from trainer.checkpoints.replica_file import open_replicas, replica_name
from trainer.checkpoints.state import folder_of
from trainer.exchange.d_psgd import DPSGD
from trainer.exchange.matcha import MATCHA
from trainer.exchange.mixing import build_plan
from trainer.exchange.plan_json import plan_from_json, plan_to_json
from trainer.exchange.topologies import ONE_PEER
from trainer.leader import peer_members
from trainer.leader.peer_checkpoints import PeerCheckpoints, ReplicasAtVersion
from trainer.leader.peer_members import PeerMembership, check_view, view_body
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.peers import ConsensusEvent, LinkEvent, NewcomerEvent
from trainer.runlog.kinds.run import RollbackEvent
from trainer.simulate import main
from trainer.simulation.failures import parse_failures
from trainer.simulation.peers import engine
from trainer.simulation.peers.engine import PeerEngine
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay
from trainer.transport.bodies.json_object import unpack_json

HARD: dict[str, Any] = {
    "profile": parse_profile("lognormal:0.5"),
    "latency_ms": 5.0,
    "bandwidth_mbps": 0.5,
    "failures": parse_failures("worker:2@0.55+0.8,worker:3@0.72+0.5"),
}


def decentralised(output: Path, options: Options = QUIET, **values: Any) -> Result:
    """A toy run of D-PSGD with four workers and a constant rate."""
    return virtual(output, "bsp", options, **{"exchange": "d-psgd", "recipe": "constant", "momentum": 0.0} | values)


def folder_of_run(result: Result) -> Path:
    assert isinstance(result.output, Path)
    return result.output


def models_of(result: Result, version: int | None = None, workers: int = 4) -> tuple[Matrix, Matrix]:
    """The models and momenta of all workers at a checkpoint, by default the last."""
    root = folder_of_run(result) / "checkpoints"
    version = newest(root, verify=True) if version is None else version
    assert version is not None
    state = read_state(root, version)
    path = folder_of(root, version) / replica_name(state.generation)
    file = open_replicas(path, workers, ELEMENTS, 0, version)
    return np.array(file.values, np.float64), np.array(file.momentum, np.float64)


def consensus_of(result: Result) -> list[ConsensusEvent]:
    return [event for event in result.events() if isinstance(event, ConsensusEvent)]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], float]:
    """The virtual time of the start of each (worker, round)."""
    found: dict[tuple[int, int], float] = {}
    begin = PeerEngine._begin

    def note(self: PeerEngine, worker: int) -> None:
        found[worker, self.progress.members[worker].clock] = self.now
        begin(self, worker)

    monkeypatch.setattr(PeerEngine, "_begin", note)
    return found


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every checkpoint of a run."""
    monkeypatch.setattr(engine, "prune", lambda root, by_rule: [])


# Against plain loops


@pytest.mark.parametrize("order", ["avg-then-grad", "grad-then-avg"])
@pytest.mark.parametrize("every", [1, 3])
def test_d_psgd_is_a_loop_over_dense_weights(tmp_path: Path, order: str, every: int) -> None:
    ring = ring_weights(5)
    done = decentralised(tmp_path, workers=5, order=order, every=every, momentum=0.5, steps=12)
    expected = d_psgd(lambda k: np.eye(5) if k % every else ring, [8] * 5, 12, rate=0.1, momentum=0.5, order=order)
    np.testing.assert_allclose(models_of(done, workers=5)[0], expected, atol=1e-6)
    np.testing.assert_allclose(final(done), expected.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("weigh_by", ["examples", "workers"])
def test_examples_weigh_gradients_and_not_models(tmp_path: Path, weigh_by: str) -> None:
    ring = ring_weights(4)
    values: dict[str, Any] = {"batch_size": 43, "worker_batch": "exact", "steps": 8}
    done = decentralised(tmp_path, weigh_by=weigh_by, **values)
    expected = d_psgd(lambda k: ring, [11, 11, 11, 10], 8, rate=0.1, weigh=weigh_by == "examples")
    np.testing.assert_allclose(models_of(done)[0], expected, atol=1e-6)


def test_averaging_keeps_the_mean_of_the_models(tmp_path: Path) -> None:
    """The mean of the models moves by the mean of the momenta alone."""
    done = {steps: decentralised(tmp_path / str(steps), momentum=0.9, steps=steps) for steps in (9, 10)}
    before = models_of(done[9])[0]
    after, momentum = models_of(done[10])
    np.testing.assert_allclose(after.mean(axis=0), (before - momentum).mean(axis=0), atol=1e-6)
    assert np.abs(after - after.mean(axis=0)).max() > 1e-3


def test_a_complete_graph_equals_all_reduce(tmp_path: Path) -> None:
    values: dict[str, Any] = {"momentum": 0.9, "recipe": "constant"}
    expected = virtual(tmp_path / "all-reduce", "bsp", exchange="all-reduce", **values)
    done = decentralised(tmp_path / "d-psgd", topology="complete", order="grad-then-avg", momentum=0.9)
    np.testing.assert_allclose(final(done), final(expected), atol=1e-5)
    np.testing.assert_allclose(models_of(done)[0], np.tile(final(expected), (4, 1)), atol=1e-5)


# Messages and time


def test_rounds_without_an_exchange_send_nothing(tmp_path: Path) -> None:
    """Count the bytes of an epoch: four of ten rounds use the four links of the ring, in both directions."""
    done = decentralised(tmp_path, every=3, steps=20)
    sent = [event.sent_bytes for event in consensus_of(done)]
    assert sent == [4 * 2 * 4 * ELEMENTS * 4, 7 * 2 * 4 * ELEMENTS * 4]


def test_a_single_worker_sends_nothing_and_is_a_plain_loop(tmp_path: Path) -> None:
    done = decentralised(tmp_path, workers=1, steps=10)
    expected = virtual(tmp_path / "bsp", "bsp", workers=1, steps=10, recipe="constant", momentum=0.0)
    np.testing.assert_array_equal(final(done), final(expected))
    assert consensus_of(done)[-1].sent_bytes == 0


@pytest.mark.parametrize(("order", "round_s"), [("avg-then-grad", 0.25), ("grad-then-avg", 0.35)])
def test_messages_wait_for_the_link_of_their_sender(tmp_path: Path, order: str, round_s: float) -> None:
    """Two messages of 0.1 s and a latency of 0.05 s, beside a step of 0.1 s or after it."""
    done = decentralised(tmp_path, order=order, bandwidth_mbps=0.02048, latency_ms=50.0, steps=10)
    assert done.seconds == pytest.approx(10 * round_s, abs=0.01)


def test_workers_wait_for_neighbours_only(tmp_path: Path, starts: dict[tuple[int, int], float]) -> None:
    """A worker at distance d of a slow one is as fast as others for d + 1 rounds, as models are sent before a step."""
    decentralised(tmp_path, workers=8, batch_size=80, steps=4, profile=parse_profile("one-slow:5"))
    assert starts[4, 4] == pytest.approx(0.4)
    assert starts[2, 2] == pytest.approx(0.2)
    assert starts[2, 3] == pytest.approx(0.5)
    assert starts[0, 4] == pytest.approx(2.0)


def test_the_log_has_a_fresh_gradient_per_worker_and_round(tmp_path: Path) -> None:
    done = decentralised(tmp_path, profile=parse_profile("lognormal:0.5"))
    pushes = done.pushes()
    assert list(zip(pushes["version"], pushes["worker"], strict=True)) == [
        (k + 1, i) for k in range(30) for i in range(4)
    ]
    assert set(pushes["staleness"]) == {0}
    assert (pushes["clock"] == pushes["version"] - 1).all()
    assert (done.updates, done.examples, done.cause) == (30, 30 * 40, "finished")


# Failures


def test_without_failures_times_do_not_change_the_bits(tmp_path: Path) -> None:
    calm = decentralised(tmp_path / "calm")
    hard = decentralised(tmp_path / "hard", **HARD | {"failures": ()})
    assert models_of(calm)[0].tobytes() == models_of(hard)[0].tobytes()


def test_neighbours_go_on_without_a_dead_worker(tmp_path: Path, starts: dict[tuple[int, int], float]) -> None:
    """Worker 2 dies in its round 3 and comes back in the first round that nobody has begun."""
    done = decentralised(tmp_path, failures=parse_failures("worker:2@0.35+0.4"), steps=20)
    pushes = done.pushes()
    assert sorted(set(range(20)) - set(pushes.loc[pushes["worker"] == 2, "clock"])) == [3, 4, 5, 6, 7]
    assert starts[1, 4] == pytest.approx(0.4)
    assert starts[2, 8] == pytest.approx(0.8)
    assert (len(pushes), done.restarts["worker"], done.updates) == (75, 1, 20)


@pytest.mark.parametrize("latency_ms", [0.0, 20.0])
def test_a_worker_that_returns_in_the_last_round_ends_the_run(tmp_path: Path, latency_ms: float) -> None:
    """It gets a model when all others are done."""
    failures = parse_failures("worker:2@0.35+0.12")
    done = decentralised(tmp_path, failures=failures, steps=5, latency_ms=latency_ms, bandwidth_mbps=1.0)
    assert (done.cause, done.updates, done.restarts["worker"]) == ("finished", 5, 1)


def test_survivors_keep_their_mean(tmp_path: Path) -> None:
    failures = parse_failures("worker:2@0.35+100")
    done = {
        steps: decentralised(tmp_path / str(steps), failures=failures, steps=steps, momentum=0.9) for steps in (9, 10)
    }
    alive = [0, 1, 3]
    before = models_of(done[9])[0][alive]
    after, momentum = (values[alive] for values in models_of(done[10]))
    np.testing.assert_allclose(after.mean(axis=0), (before - momentum).mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(final(done[10]), after.mean(axis=0), atol=1e-6)


def test_a_worker_returns_with_the_model_of_a_neighbour(tmp_path: Path, keep_all: None) -> None:
    """It begins round 10, which also is the end of an epoch, with the model of worker 1 or 3."""
    done = decentralised(tmp_path, failures=parse_failures("worker:2@0.35+0.6"), steps=20, epoch_checkpoints=True)
    models, momentum = models_of(done, 10)
    assert any(np.array_equal(models[2], models[neighbour]) for neighbour in (1, 3))
    assert not momentum[2].any()
    assert momentum[1].any()


@pytest.mark.parametrize("failures", ["server@1.25+1", "worker:0@1.2+1,worker:1@1.3+1,worker:2@1.4+1,worker:3@1.5+1"])
def test_a_run_without_models_rolls_back(tmp_path: Path, failures: str) -> None:
    """To the end of the first epoch, after a second; also if the models of all workers are lost."""
    done = decentralised(tmp_path, failures=parse_failures(failures), steps=30, epoch_checkpoints=True)
    assert (done.rollbacks, done.updates, done.cause) == (1, 30, "finished")
    rollbacks = [event for event in done.events() if isinstance(event, RollbackEvent)]
    assert [event.to_version for event in rollbacks] == [10]
    if "server" in failures:
        calm = decentralised(tmp_path / "calm", steps=30, epoch_checkpoints=True)
        assert models_of(done)[0].tobytes() == models_of(calm)[0].tobytes()


def test_an_absent_worker_stays_at_the_round_it_missed(tmp_path: Path) -> None:
    """Also after a roll-back at which it is away: when it returns, it reports the passes that ended from there on."""
    failures = parse_failures("worker:2@0.35+100,server@1.25+0.1")
    done = decentralised(tmp_path, failures=failures, steps=20, epoch_checkpoints=True)
    assert done.rollbacks == 1
    assert read_state(folder_of_run(done) / "checkpoints", 20).clocks == {0: 20, 1: 20, 2: 3, 3: 20}


# Resumption

TIMELINES = [
    "worker:2@0.55+0.8,worker:3@0.72+0.5",
    pytest.param("", marks=pytest.mark.full),
    pytest.param("worker:2@0.95+0.1,worker:1@1.0+0.3", marks=pytest.mark.full),
    pytest.param("worker:0@0.98+2,worker:1@1.05+0.01,worker:2@1.9+0.4,worker:3@2.0+0.2", marks=pytest.mark.full),
    pytest.param("server@1.25+0.5,worker:1@1.9+0.3", marks=pytest.mark.full),
    "worker:0@1.2+1,worker:1@1.3+1,worker:2@1.4+1,worker:3@1.5+1",
]


def test_checkpoints_by_time_are_forgotten_once_they_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every grant names those that are due: a run of weeks has thousands."""
    counts: list[int] = []
    take = PeerCheckpoints.take

    def taking(self: PeerCheckpoints, *arguments: Any, **values: Any) -> ReplicasAtVersion:
        taken = take(self, *arguments, **values)
        counts.append(len(self.extra))
        return taken

    monkeypatch.setattr(PeerCheckpoints, "take", taking)
    decentralised(tmp_path, checkpoint_every_s=0.7, steps=40, epoch_checkpoints=False)
    assert len(counts) > 4
    assert max(counts) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("failures", TIMELINES)
def test_a_run_resumed_at_any_checkpoint_has_the_same_bits(tmp_path: Path, keep_all: None, failures: str) -> None:
    """Compare parameters, pushes and times with a run that is killed right after a checkpoint."""
    values = HARD | {"failures": parse_failures(failures) if failures else (), "epoch_checkpoints": True}
    values |= {"momentum": 0.9, "rows": 200, "checkpoint_every_s": 0.7, "steps": 20}
    whole = decentralised(tmp_path / "whole", **values)
    versions = [int(path.name) for path in (folder_of_run(whole) / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(versions) > 4
    for version in sorted(versions):
        part = tmp_path / f"part-{version}"
        shutil.copytree(folder_of_run(whole), part)
        (part / "result.json").unlink()
        for later in versions:
            if later > version:
                shutil.rmtree(folder_of(part / "checkpoints", later))
        again = decentralised(part, RESUME, **values)
        for resumed, expected in zip(models_of(again), models_of(whole), strict=True):
            assert resumed.tobytes() == expected.tobytes(), version
        assert read_state(part / "checkpoints", max(versions)).final, version
        assert again.pushes().drop(columns="generation").equals(whole.pushes().drop(columns="generation")), version
        assert again.seconds == pytest.approx(whole.seconds, abs=1e-3)
        mine, theirs = (consensus_of(run)[-1] for run in (again, whole))
        assert (mine.distance, mine.sent_bytes, mine.replicas) == (theirs.distance, theirs.sent_bytes, theirs.replicas)


# MATCHA


def test_matcha_mixes_along_the_links_of_its_plan(tmp_path: Path) -> None:
    """The models of a loop over the dense W of each round; a link that is not drawn costs no byte."""
    values: dict[str, Any] = {"exchange": "matcha", "topology": "graph0", "workers": 8, "batch_size": 80, "steps": 20}
    done = decentralised(tmp_path, order="grad-then-avg", momentum=0.9, **values, rows=800)
    plan = build_plan("graph0", 8, 0, budget=0.5)

    def dense(k: int) -> Matrix:
        weights = np.eye(8)
        for i, j, weight in plan.edges(k):
            weights[[i, j], [j, i]] += weight
            weights[[i, j], [i, j]] -= weight
        return weights

    expected = d_psgd(dense, [10] * 8, 20, rate=0.1, momentum=0.9, order="grad-then-avg")
    np.testing.assert_allclose(models_of(done, workers=8)[0], expected, atol=1e-5)
    links = [len(plan.edges(k)) for k in range(20)]
    assert len(set(links)) > 1
    assert [event.sent_bytes for event in consensus_of(done)] == [
        2 * 4 * ELEMENTS * sum(links[:10]),
        2 * 4 * ELEMENTS * sum(links),
    ]


def test_matcha_with_all_links_is_d_psgd(tmp_path: Path) -> None:
    matcha = decentralised(tmp_path / "matcha", exchange="matcha", budget=1.0)
    assert models_of(matcha)[0].tobytes() == models_of(decentralised(tmp_path / "d-psgd"))[0].tobytes()


@pytest.mark.parametrize("topology", ["random-pair", "exponential", "torus"])
def test_every_topology_trains_through_failures(tmp_path: Path, topology: str) -> None:
    """Also where a worker has other neighbours in each round, or none."""
    done = decentralised(tmp_path, topology=topology, every=2, **HARD)
    assert (done.updates, done.cause, done.restarts["worker"]) == (30, "finished", 2)
    assert (consensus_of(done)[-1].distance or 0.0) < 0.5


# The model on shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("peers"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of the cnn, with BatchNorm, dropout and augmentation, a death and a return."""
    return train_cnn(shards, tmp_path_factory.mktemp("peers") / "run", report=True)


def train_cnn(shards: Path, output: Path, *, report: bool) -> Result:
    options = Options(silent=True, report=report)
    values: dict[str, Any] = {"compute": "real", "model": "cnn", "shards": str(shards), "workers": 3, "batch_size": 12}
    values |= {"epochs": 2, "steps": None, "epoch_checkpoints": True, "learning_rate": 0.05, "exchange": "matcha"}
    return decentralised(output, options, **values, failures=parse_failures("worker:1@0.25+0.2"))


@pytest.mark.slow
def test_the_mean_of_the_models_is_evaluated(shards: Path, trained: Result, tmp_path: Path) -> None:
    evaluations = [event for event in trained.events() if isinstance(event, EvaluationEvent)]
    assert [event.epoch for event in evaluations] == [1, 2]
    assert trained.final_accuracy == evaluations[-1].accuracy
    root = folder_of_run(trained) / "checkpoints"
    version = newest(root)
    assert version is not None
    state = read_state(root, version)
    path = folder_of(root, version) / replica_name(state.generation)
    file = open_replicas(path, 3, state.num_parameters, state.num_buffers, version)
    np.testing.assert_allclose(final(trained), np.array(file.values, np.float64).mean(axis=0), atol=1e-6)
    weights = np.concatenate([array.ravel() for array in trained.weights().values()])
    assert np.isin(final(trained)[: state.num_parameters], weights).all()


@pytest.mark.slow
def test_a_run_of_the_model_repeats_its_bits(shards: Path, trained: Result, tmp_path: Path) -> None:
    again = train_cnn(shards, tmp_path / "run", report=False)
    first, second = ((run.output / "model.safetensors").read_bytes() for run in (trained, again))
    assert first == second


def test_files_and_report_of_a_run_have_what_is_documented(trained: Result) -> None:
    assert undocumented_below(folder_of_run(trained)) == {}
    page = (folder_of_run(trained) / "report.html").read_text()
    assert "Distance of the models" in page
    assert "cnn by MATCHA, 3 workers" in page


# Refusals


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--topology", "graph0"], "graph0"),
        (["--budget", "0"], "--budget must be"),
        (["--topology", "random-pair"], "give --exchange d-psgd"),
        (["--servers", "2"], "leave out --servers 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    common = ["--exchange", "matcha", "--compute", "quadratic", "--workers", "3", "--steps", "1"]
    with pytest.raises(UsageError, match=line) as refused:
        main([*common, *words, "--output", str(tmp_path / "run")])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_more_links_than_a_view_can_list_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the folder of the run is made. Up to the refusal, a view of all workers fits."""
    shards = write_shards(tmp_path, [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(peer_members, "JSON_LIMIT_BYTES", 1024)
        config = make_config(shards, tmp_path / "run", protocol="bsp", exchange="d-psgd", model="cnn", steps=2)
        with pytest.raises(UsageError, match="--topology ring has 1 links between 2 workers, more than a message"):
            train(config, QUIET)
    assert not (tmp_path / "run").exists()
    exchange = DPSGD(topology="complete")
    with pytest.raises(UsageError, match="--topology complete has 124,750 links between 500 workers"):
        check_view(exchange.plan(500, 0), "complete")
    check_view(exchange.plan(400, 0), "complete")
    reach = {"address": f"tcp://[{'f' * 39}]:65535", "host": "h" * 80, "memory": {}}
    member = PeerMembership(1 << 62, 1 << 53, 1 << 31, 399, reach, 0.0)
    body = view_body(
        dict.fromkeys(range(400), member), dict.fromkeys(range(400), 1 << 31), 1 << 31, exchange.plan(400, 0)
    )
    assert len(unpack_json(body)["members"]) == 400


@pytest.mark.parametrize("order", ["avg-then-grad", "grad-then-avg"])
@pytest.mark.parametrize(
    "failures",
    ["worker:2@0.55+0.8,worker:3@0.72+0.5", "worker:0@0.3+5,worker:1@0.9+0.4,worker:2@1.2+0.2,server@1.9+0.2"],
)
def test_a_replay_repeats_who_averaged_with_whom(tmp_path: Path, order: str, failures: str) -> None:
    values = HARD | {"failures": parse_failures(failures), "checkpoint_every_s": 0.5, "momentum": 0.9}
    done = decentralised(tmp_path, exchange="matcha", order=order, **values)
    links = [event for event in done.events() if isinstance(event, LinkEvent)]
    assert {event.used for event in links} == {True, False}
    assert any(isinstance(event, NewcomerEvent) for event in done.events())
    assert replay(done.output).is_equal


def test_a_replay_needs_every_gradient_that_was_used(tmp_path: Path) -> None:
    done = decentralised(tmp_path, steps=8)
    path = folder_of_run(done) / "pushes.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10] + lines[11:]))
    with pytest.raises(DataError, match="the log lacks what worker 1 did before round 3"):
        replay(done.output)
    version = lines[0].strip().split(",").index("version")
    path.write_text("".join(line for line in lines if line.split(",")[version] != "3"))
    with pytest.raises(DataError, match="the log lacks what worker 0 did before round 3"):
        replay(done.output)


def test_memory_and_disk_are_said_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decentralised(tmp_path, Options(report=False), workers=1000, batch_size=1000, steps=1)
    said = capsys.readouterr().out
    assert "1,000 models of 0.000256 MB: up to 0.00102 GB of memory, and 0.000512 GB of disk per checkpoint" in said


# The plan of the links


@pytest.mark.parametrize("topology", ["ring", "complete", "exponential", "random-pair", "torus"])
@pytest.mark.parametrize("budget", [None, 0.5])
def test_a_plan_is_the_same_after_json(topology: str, budget: float | None) -> None:
    if topology in ONE_PEER and budget:
        return
    plan = build_plan(topology, 6, 3, budget=budget, every=2)
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert again == plan
    assert [again.edges(round) for round in range(9)] == [plan.edges(round) for round in range(9)]


@pytest.mark.parametrize("values", [{}, {"kind": "star"}, {"kind": "full", "weight": 1.0}, []])
def test_a_damaged_plan_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="not a plan of links"):
        plan_from_json(values)


def test_a_resumed_run_keeps_the_plan_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor can find other probabilities, where several are as good."""
    whole = decentralised(tmp_path / "whole", exchange="matcha", steps=20)
    decentralised(tmp_path / "run", exchange="matcha", steps=10)
    plan = MATCHA.plan

    def other_plan(self: MATCHA, num_workers: int, seed: int) -> Any:
        found: Any = plan(self, num_workers, seed)
        return dataclasses.replace(found, probabilities=(1.0, 0.0))

    monkeypatch.setattr(MATCHA, "plan", other_plan)
    resumed = decentralised(tmp_path / "run", RESUME, exchange="matcha", steps=20)
    np.testing.assert_array_equal(final(resumed), final(whole))


def test_a_changed_file_of_links_is_noticed(tmp_path: Path) -> None:
    links = tmp_path / "links.txt"
    links.write_text("0 1\n1 2\n2 3\n")
    decentralised(tmp_path / "run", topology=str(links), steps=10)
    links.write_text("0 1\n1 2\n2 3\n3 0\n")
    with pytest.raises(UsageError, match="has other links than at the start of this run: restore them"):
        decentralised(tmp_path / "run", RESUME, topology=str(links), steps=20)
