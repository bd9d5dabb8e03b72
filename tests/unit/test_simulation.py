"""Runs in virtual time: repeatable to the bit, held against theory, plain loops and scripted failures."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.seeds import Purpose, generator
from tests.support.configs import make_config
from tests.support.trainer_runs import ROOT, lines_of, until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final, virtual
from trainer import Options, Result
from trainer.checkpoints.read import newest, read_vector
from trainer.checkpoints.state import RunState
from trainer.data.deal import deal
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.home.place import Place
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.protocols.downpour import Downpour
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.run import GenerationEvent, RollbackEvent, StartEvent
from trainer.runlog.kinds.training import EpochEvent
from trainer.runlog.read import read_events, surviving_events
from trainer.runlog.result import read_result
from trainer.simulate import main, simulate
from trainer.simulation import run
from trainer.simulation.compute import MiniBatchResult, Quadratic
from trainer.simulation.engine import Engine
from trainer.simulation.failures import parse_failures
from trainer.simulation.network import Network
from trainer.simulation.options import SimulationSettings
from trainer.simulation.profiles import PROFILES, parse_profile
from trainer.simulation.replay import configurations, replay


def bits_of(result: Result) -> tuple[bytes, bytes]:
    """All that happened, and the parameters that came of it."""
    return (result.output / "pushes.csv").read_bytes(), final(result).tobytes()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("virtual"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


def test_classes_of_a_single_kind_are_refused(tmp_path: Path) -> None:
    """A network with one output would be read as one of two classes, of which a set has only the first."""
    shards = write_shards(tmp_path / "set", [rows_of(12, 2), rows_of(12, 3, 2000)], EVAL_ROWS)
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["labels"] = {"num_classes": 1}
    (shards / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError, match=r"--model logistic tells classes apart, and all labels of .* are of one; shard"
    ):
        simulate(
            make_config(shards, tmp_path / "run", model="logistic", batch_size=4, steps=2), SimulationSettings(), QUIET
        )
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("train_rows", "values", "line"),
    [
        (1, {}, "the 1 training row of the set for --batch-norm recalibrate: give more rows, --batch-norm ema, or"),
        (1, {"norm": "group"}, None),
        (1, {"batch_norm": "ema"}, None),
        (4, {}, None),
        (
            4,
            {"evaluation_mode": "paper"},
            "the 1 evaluation row of the set for --evaluation-mode paper: give more rows",
        ),
    ],
)
def test_an_evaluation_never_normalises_a_single_row(
    train_rows: int, values: dict[str, Any], line: str | None, tmp_path: Path
) -> None:
    shards = write_shards(tmp_path / "set", [rows_of(train_rows, 2)], rows_of(1, 3, 100))
    config = make_config(shards, tmp_path / "run", model="cnn", batch_size=4, steps=1, **values)
    if line is None:
        assert simulate(config, SimulationSettings(), QUIET).updates == 1
        return
    with pytest.raises(UsageError) as refused:
        simulate(config, SimulationSettings(), QUIET)
    assert line in str(refused.value)
    assert not (tmp_path / "run").exists()


HARD: dict[str, Any] = {
    "servers": 3,
    "profile": parse_profile("lognormal:0.5"),
    "latency_ms": 5.0,
    "bandwidth_mbps": 0.5,
    "failures": parse_failures("worker:2@1+2,server@2+3"),
}


@pytest.mark.parametrize("protocol", ["ssp", "k-batch-asp", "k-bsp"])
def test_the_same_command_gives_the_same_bits(tmp_path: Path, protocol: str) -> None:
    own: dict[str, Any] = {"cancel": "preempt"} if protocol == "k-bsp" else {}
    first, second = (virtual(tmp_path / name, protocol, **HARD, **own) for name in "ab")
    assert bits_of(first) == bits_of(second)
    assert first.seconds == second.seconds
    assert virtual(tmp_path / "c", protocol, seed=1, **HARD, **own).seconds != first.seconds


def test_a_simulation_leaves_the_torch_of_its_caller_alone(shards: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(11)
    try:
        state = torch.get_rng_state()
        virtual(tmp_path / "run", compute="real", shards=str(shards), steps=3, batch_size=30, workers=None)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_one_worker_is_a_loop_of_plain_gradient_descent(tmp_path: Path) -> None:
    done = virtual(tmp_path / "run", workers=1, batch_size=10, steps=20, momentum=0.5, recipe="constant")
    curvature = np.geomspace(1, 0.01, 64).astype(np.float32)
    values, velocity = np.ones(64, np.float32), np.zeros(64, np.float32)
    for step in range(20):
        noise = generator(0, Purpose.TOY, 0, step).standard_normal(64, np.float32)
        velocity = 0.5 * velocity + 0.1 * (curvature * values + noise / np.sqrt(10))
        values = values - velocity
    np.testing.assert_allclose(final(done)[:64], values, rtol=1e-4, atol=1e-5)


def test_listed_drops_take_effect_at_their_epochs(tmp_path: Path) -> None:
    """Three epochs of ten steps: a list of auto's epochs gives the bits of auto, one after the end those of constant."""
    listed = {"auto": (2.25, 2.7), "constant": (3.0,)}
    for recipe, drops in listed.items():
        theirs = virtual(tmp_path / recipe, recipe=recipe)
        mine = virtual(tmp_path / f"like-{recipe}", drops=drops)
        assert bits_of(mine) == bits_of(theirs)
    assert bits_of(virtual(tmp_path / "earlier", drops=(0.5,))) != bits_of(theirs)
    saved = json.loads((tmp_path / "earlier" / "config.json").read_text())
    assert saved["config"]["optimiser"]["drops"] == [0.5]


@pytest.mark.parametrize(
    ("protocol", "rate", "own"),
    [
        ("bsp", 4 / 8, {}),
        ("asp", 3 + 1 / 8, {}),
        ("ssp", 4 / 8, {}),
        ("k-bsp", 3, {"k": 3}),
        ("k-batch-asp", 3 + 1 / 8, {"k": 4}),
    ],
)
def test_a_straggler_costs_what_the_theory_says(tmp_path: Path, protocol: str, rate: float, own: Any) -> None:
    """One of 4 workers is 8 times slower: accepted gradients in the time of an ordinary step."""
    done = virtual(
        tmp_path / "run", protocol, compute="none", steps=300, profile=parse_profile("one-slow:8"), step_ms=20, **own
    )
    assert done.seconds
    assert 300 * 4 / done.seconds * 0.02 == pytest.approx(rate, rel=0.05)


def test_messages_share_a_server_s_link_and_wait_for_each_other() -> None:
    network = Network(latency_s=0.25, megabits_per_s=8, message_bytes=1e6)  # a second a message
    assert [network.push(now) for now in (0.0, 0.0, 0.5, 10.0)] == [1.25, 2.25, 3.25, 11.25]
    assert network.reply(0.0) == 1.25  # the other direction is free


def test_on_a_slow_link_more_workers_are_no_faster(tmp_path: Path) -> None:
    """64 parameters are 2,048 bits: at 0.02048 Mbit/s a message takes 0.1 s, so ten gradients a second are all there can
    be."""
    for workers in (4, 8):
        done = virtual(tmp_path / str(workers), workers=workers, bandwidth_mbps=0.02048, step_ms=10, steps=100)
        assert done.seconds
        assert 100 * workers / done.seconds == pytest.approx(10, rel=0.05)


def test_scripted_failures_cost_time_and_no_gradient(tmp_path: Path) -> None:
    calm = virtual(tmp_path / "calm", "k-asp")
    failures = parse_failures("worker:1@0.95+2,server@1.5+4")
    hit = virtual(tmp_path / "hit", "k-asp", failures=failures, checkpoint_every_s=0.5)
    assert hit.restarts == {"worker": 1, "server": 1, "evaluator": 0}
    assert hit.rollbacks == 1
    assert hit.examples == calm.examples == 30 * 40
    accepted = hit.pushes()[hit.pushes()["accepted"] == 1]
    assert not accepted.duplicated(["worker", "clock"]).any()


def test_a_worker_that_is_dead_stays_so_when_the_servers_come_back(tmp_path: Path) -> None:
    done = virtual(tmp_path / "run", "bsp", failures=parse_failures("worker:1@0.5+20,server@1+2"))
    assert done.rollbacks == 1
    assert (done.pushes()["worker"] == 1).sum() == 30
    events = [json.loads(line) for line in (done.output / "metrics.jsonl").read_bytes().splitlines()]
    end = next(event for event in events if event["event"] == "end")
    assert end["time"] == pytest.approx(20.5 + 30 * 0.1)


@pytest.mark.parametrize("exchange", ["parameter-server", "d-psgd"])
def test_overlapping_crashes_roll_back_once(tmp_path: Path, exchange: str) -> None:
    """The servers return when the last absence is over, and the run loses the time of one absence of 3.5 s."""
    failures = parse_failures("server@1.25+2,server@2.25+2.5,server@3+0.5")
    hit = virtual(tmp_path / "hit", "bsp", exchange=exchange, failures=failures, epoch_checkpoints=True)
    calm = virtual(tmp_path / "calm", "bsp", exchange=exchange, epoch_checkpoints=True)
    assert (hit.rollbacks, hit.restarts["server"], hit.cause) == (1, 3, "finished")
    np.testing.assert_array_equal(final(hit), final(calm))
    events = [json.loads(line) for line in (hit.output / "metrics.jsonl").read_bytes().splitlines()]
    assert next(event["time"] for event in events if event["event"] == "rollback") == pytest.approx(4.75)


def test_a_finished_run_resumes_on_the_same_machines_only(tmp_path: Path) -> None:
    whole, part = (
        virtual(tmp_path / name, "bsp", steps=steps, recipe="constant") for name, steps in (("whole", 20), ("part", 8))
    )
    longer = virtual(tmp_path / "part", "bsp", RESUME, steps=20, recipe="constant")
    assert (part.updates, longer.updates) == (8, 20)
    np.testing.assert_array_equal(final(longer), final(whole))
    with pytest.raises(UsageError, match="virtual machines"):
        virtual(tmp_path / "part", "bsp", RESUME, steps=20, recipe="constant", step_ms=7.0)


@pytest.mark.parametrize("exchange", ["parameter-server", "all-reduce"])
def test_the_memory_of_workers_is_said_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exchange: str
) -> None:
    virtual(tmp_path / "run", options=Options(report=False), workers=100, batch_size=100, steps=1, exchange=exchange)
    assert "parameters and a gradient of 100 workers: up to 5.12e-05 GB of memory\n" in capsys.readouterr().out


@pytest.mark.full
def test_the_report_and_the_result_say_that_seconds_are_virtual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = virtual(tmp_path / "run", options=Options(quiet=True))
    assert done.simulated
    assert done.simulated["compute"] == "quadratic"
    assert "all seconds on this page are virtual time" in (tmp_path / "run" / "report.html").read_text()
    assert "of virtual time" in capsys.readouterr().out


@pytest.mark.full
def test_an_interrupted_run_leaves_a_checkpoint_and_resume_goes_on(tmp_path: Path) -> None:
    """Ctrl-C is looked for between two events, so that no update is cut in half."""
    flags = ["--compute", "quadratic", "--workers", "4", "--batch-size", "40", "--protocol", "bsp", "--output"]
    command = [sys.executable, "-m", "trainer.simulate", *flags, str(tmp_path / "run"), "--no-report", "--quiet"]
    command += ["--steps", "100000", "--recipe", "constant"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(lambda: (tmp_path / "run" / "pushes.csv").exists(), "it has begun")
    process.send_signal(signal.SIGINT)
    assert "--resume continues" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    version = newest(tmp_path / "run" / "checkpoints", verify=True)
    assert version
    left = simulate(
        make_config("", tmp_path / "whole", protocol="bsp", batch_size=40, steps=version, recipe="constant"),
        SimulationSettings(compute="quadratic", workers=4),
        QUIET,
    )
    np.testing.assert_array_equal(read_vector(tmp_path / "run" / "checkpoints", version), final(left))


@pytest.mark.parametrize(("exchange", "version"), [("parameter-server", 17), ("d-psgd", 10)])
def test_an_interruption_names_the_version_of_its_resume(
    exchange: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt a run while its four workers compute the 18th of 30 steps. Workers with models end epochs of 10 steps."""
    step = Quadratic.step

    def interrupted(self: Quadratic, worker: int, clock: int, parameters: Any) -> MiniBatchResult:
        if (worker, clock) == (0, 17):
            signal.raise_signal(signal.SIGINT)
        return step(self, worker, clock, parameters)

    monkeypatch.setattr(Quadratic, "step", interrupted)
    with pytest.raises(RunInterruptedError, match=rf"^interrupted at version {version} \(epoch {version / 10:.2f}\);"):
        virtual(tmp_path / "run", "bsp", exchange=exchange, epoch_checkpoints=True)
    assert newest(tmp_path / "run" / "checkpoints") == version


def test_ctrl_c_in_the_last_evaluation_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate only at the end, where the first signal is raised in Python."""

    def interrupt(root: Place, state: RunState) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run._Watcher, "__call__", lambda self, engine: None)
        patched.setattr(run, "mark_evaluated", interrupt)
        with pytest.raises(RunInterruptedError, match="--resume continues"):
            virtual(tmp_path / "run", "bsp")
    assert lines_of(tmp_path / "run" / "metrics.jsonl", "end")[-1]["cause"] == "interrupted"
    assert virtual(tmp_path / "run", "bsp", options=Options(resume=True, silent=True, report=False)).cause == "finished"


def test_a_toy_run_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="diverged"):
        virtual(tmp_path / "run", learning_rate=1e20)


def test_a_model_that_begins_as_nan_is_not_told_to_learn_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Quadratic.step

    def broken(self: Quadratic, worker: int, clock: int, parameters: Any) -> MiniBatchResult:
        return step(self, worker, clock, parameters)._replace(loss=float("nan"))

    monkeypatch.setattr(Quadratic, "step", broken)
    with pytest.raises(JobError, match="before any update: check the model's initial parameters") as caught:
        virtual(tmp_path / "run")
    assert "--learning-rate" not in str(caught.value)


def test_a_model_that_exits_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quadratic, "step", lambda *_: sys.exit(0))
    with pytest.raises(JobError, match=r"^the run failed in the model: it calls sys.exit\(0\)") as caught:
        virtual(tmp_path / "run")
    assert read_result(tmp_path / "run").error == str(caught.value)


def test_the_cause_of_a_failed_run_is_in_its_log_result_and_report(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="diverged") as caught:
        virtual(tmp_path / "run", learning_rate=1e20, options=Options(silent=True))
    line = str(caught.value)
    assert lines_of(tmp_path / "run" / "metrics.jsonl", "end")[-1]["error"] == line
    assert read_result(tmp_path / "run").error == line
    assert escape(f"Cause: {line}", quote=False)[:60] in (tmp_path / "run" / "report.html").read_text()


# --- profiles and failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["exponential:20", "lognormal:0.7", "homogeneous"])
def test_steps_of_a_profile_have_its_mean_and_repeat(text: str) -> None:
    profile = parse_profile(text)
    drawn = np.array([profile.seconds(0.05, 3, worker, clock) for worker in range(20) for clock in range(500)])
    assert drawn.mean() == pytest.approx(0.05, rel=0.03)
    assert profile.seconds(0.05, 3, 7, 11) == profile.seconds(0.05, 3, 7, 11)
    assert len(set(drawn)) == (1 if text == "homogeneous" else len(drawn))


def test_mixed_machines_are_those_of_the_thesis() -> None:
    steps = [parse_profile("mixed").seconds(1.0, 0, worker, 0) for worker in range(18)]
    assert steps == [1.0] * 5 + [2.0] * 2 + [4.0] * 2 + [1.0] * 5 + [2.0] * 2 + [4.0] * 2


def test_a_trace_gives_the_times_of_the_run_s_steps_again_and_again(tmp_path: Path) -> None:
    run = virtual(tmp_path / "run", workers=2, batch_size=20, profile=parse_profile("lognormal:0.5"), steps=5)
    logged = run.pushes()
    times = logged.loc[logged["worker"] == 1, "step_s"].to_list()
    trace = parse_profile(f"trace:{tmp_path / 'run'}")
    assert [trace.seconds(9.0, 0, 3, clock) for clock in range(2 * len(times))] == times * 2


@pytest.mark.parametrize(
    "text",
    [
        *["one-slow", "one-slow:0", "one-slow:x", "exponential:-1", "nope", "mixed:3", "lognormal:inf"],
        "trace",
    ],
)
def test_a_profile_that_cannot_be_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match="--profile") as refused:
        parse_profile(text)
    assert "\n" not in str(refused.value)
    assert len(PROFILES) == 6


@pytest.mark.parametrize("place", ["/nowhere", __file__])
def test_a_trace_without_a_run_is_an_error_of_the_data(place: str) -> None:
    with pytest.raises(DataError, match=f"{place} contains no run with pushes"):
        parse_profile(f"trace:{place}")


@pytest.mark.parametrize("text", ["worker@1+1", "worker:1@1", "server:0@1+1", "worker:1@1.2.3+1", ""])
def test_a_failure_that_cannot_be_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match="--failures"):
        parse_failures(text)


# --- real gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 100])
def test_dealing_gives_each_row_to_one_worker_and_rows_to_all(shards: Path, count: int) -> None:
    found = open_shards(str(shards))
    dealt = deal(found, count)
    ids = np.concatenate([rows.ids for rows in dealt])
    held = np.concatenate([load_worker(found, shard).ids for shard in range(2)])
    assert sorted(ids) == sorted(held)
    assert all(len(rows) for rows in dealt)
    if count == 2:
        for worker, rows in enumerate(dealt):
            np.testing.assert_array_equal(rows.ids, load_worker(found, worker).ids)
    if count == 5:  # more workers than shards: each sees one shard
        assert [set(rows.ids >= 2000) for rows in dealt] == [{False}, {True}] * 2 + [{False}]


def test_more_workers_than_rows_are_refused(shards: Path) -> None:
    with pytest.raises(UsageError, match="--workers 300"):
        deal(open_shards(str(shards)), 300)


@pytest.mark.parametrize(
    ("protocol", "own"),
    [
        ("bsp", {}),
        ("asp", {}),
        ("k-asp", {"k": 2}),
        ("k-batch-asp", {"k": 3}),
        ("k-batch-bsp", {"k": 2}),
        ("n-softsync", {}),
        ("dssp", {}),
        ("downpour", {"push_every": 2}),
    ],
)
def test_a_replay_of_a_virtual_run_ends_with_its_bits(shards: Path, tmp_path: Path, protocol: str, own: Any) -> None:
    """With mini-batches, augmentation, dropout and BatchNorm of the model, a worker that dies, and servers that go back."""
    real = {"compute": "real", "model": "cnn", "shards": str(shards), "workers": 3, "batch_size": 12, "steps": 6}
    done = virtual(tmp_path / "run", protocol, **HARD | real | own | {"servers": 2, "bandwidth_mbps": None})
    again = replay(done.output)
    assert again.pushes == 18 or protocol == "downpour"
    assert again.is_equal
    assert done.final_accuracy is not None
    assert not np.array_equal(again.replayed, np.zeros_like(again.replayed))


def test_a_replay_notices_another_seed(tmp_path: Path) -> None:
    done = virtual(tmp_path / "run")
    config = json.loads((done.output / "config.json").read_bytes())
    config["config"]["run"]["seed"] = 5
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert not replay(done.output).is_equal
    with pytest.raises(JobError, match="differ"):
        main(["--replay", str(done.output)])


def test_every_example_of_an_exact_batch_counts_the_same(tmp_path: Path) -> None:
    """Workers of 11, 10 and 10 examples: an update of bsp is the mean over all 31, as a loop computes it."""
    values: dict[str, Any] = {"workers": 3, "batch_size": 31, "worker_batch": "exact", "steps": 5, "momentum": 0.0}
    done = virtual(tmp_path / "run", "bsp", recipe="constant", **values)
    curvature, weights = np.geomspace(1, 0.01, 64), np.ones(64)
    for step in range(5):
        noise = [generator(0, Purpose.TOY, worker, step).standard_normal(64, np.float32) for worker in range(3)]
        drawn = sum(size * part / np.sqrt(size) for size, part in zip((11, 10, 10), noise, strict=True))
        weights -= 0.1 * (curvature * weights + drawn / 31)
    np.testing.assert_allclose(final(done)[:64], weights, rtol=1e-5, atol=1e-5)
    assert replay(done.output).is_equal


def test_a_run_that_was_made_longer_replays(tmp_path: Path) -> None:
    """Its rate fell at the end of the shorter run, and again at the end of the longer one."""
    virtual(tmp_path, steps=20)
    longer = virtual(tmp_path, steps=40, options=Options(silent=True, report=False, resume=True))
    assert longer.updates == 160
    assert replay(tmp_path).is_equal


def test_a_resumed_run_of_downpour_replays(tmp_path: Path) -> None:
    """A worker and servers die, workers differ in speed, and the learning rate falls on the copies too."""
    values = HARD | {"workers": 3, "servers": 2}
    virtual(tmp_path, "downpour", steps=23, **values)
    longer = virtual(tmp_path, "downpour", steps=60, options=Options(silent=True, report=False, resume=True), **values)
    used = longer.pushes()
    steps = [Downpour().local_steps(clock) for clock in used["clock"]]
    assert set(steps) == {1, 5}
    assert 3 * 60 <= sum(steps) < 3 * 60 + 5
    assert replay(tmp_path).is_equal


def test_a_new_run_is_no_shorter_than_a_push_of_downpour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue a run that an earlier version has begun nevertheless. The default suits runs of any length."""
    for steps, most in ((3, 5), (8, 8)):
        with pytest.raises(UsageError) as refused:
            virtual(tmp_path / "new", "downpour", steps=steps, push_every=9)
        assert str(refused.value) == (
            f"--push-every 9 exceeds the steps of each worker in the run, {steps}: give at most {most}"
        )
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Downpour, "check_steps", lambda self, steps: None)
        virtual(tmp_path / "old", "downpour", steps=1, push_every=9)
    longer = virtual(tmp_path / "old", "downpour", steps=3, push_every=9, options=RESUME)
    assert longer.examples >= 3 * 40
    assert virtual(tmp_path / "whole", "downpour", steps=9, push_every=9).examples >= 9 * 40
    assert virtual(tmp_path / "short", "downpour", steps=1).examples >= 40


def test_each_start_tells_the_configuration_of_its_updates() -> None:
    """The third start found the newest checkpoint broken; the fourth began with a crash of the servers."""

    def start(steps: int, threads: int, resumed_from: int | None, **more: Any) -> LogEvent:
        plan = {"threads_per_worker": threads}
        return StartEvent(config=make_config(steps=steps).to_json(), plan=plan, resumed_from=resumed_from, **more)

    events = [
        start(20, 1, None),
        GenerationEvent(generation=1, version=0),
        start(30, 2, 40),
        GenerationEvent(generation=2, version=40),
        start(40, 3, 50),
        GenerationEvent(generation=3, version=45),
        start(50, 8, 60, simulated={"compute": "quadratic"}),
        RollbackEvent(from_version=70, to_version=55),
    ]
    found = configurations(events)
    assert [(first, config.run.steps, config.processes.threads) for first, config in found] == [
        (1, 20, 1),
        (41, 30, 2),
        (46, 40, 3),
        (56, 50, 1),
    ]
    assert configurations([*events[:1], start(30, 1, 0)])[0][1].run.steps == 30


# --- the command line ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--compute", "real"], "give --shards"),
        (["--compute", "quadratic"], "give --workers N"),
        (["--compute", "quadratic", "--workers", "9", "--batch-size", "8"], "at least 9"),
        (["--compute", "none", "--workers", "2", "--failures", "worker:2@1+1"], "workers 0..1"),
        (["--compute", "none", "--workers", "2", "--protocol", "k-bsp", "--k", "3"], "--k 3"),
        (["--compute", "none", "--workers", "2", "--sampling", "bernoulli"], "--compute real"),
    ],
)
def test_an_impossible_simulation_is_one_line_without_leftovers(tmp_path: Path, flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        main([*flags, "--output", str(tmp_path / "run"), "--steps", "1"])
    assert not (tmp_path / "run").exists()


def test_replaying_what_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no run"):
        main(["--replay", str(tmp_path)])


class Killed(Exception):
    """The process of a virtual run ends, and nothing is tidied up."""


def kill_at(second: float, monkeypatch: pytest.MonkeyPatch, output: Path, **values: Any) -> None:
    handle = Engine._handle

    def killed(engine: Engine, event: Any) -> None:
        if engine.now >= second:
            raise Killed
        handle(engine, event)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_handle", killed)
        patched.setattr("trainer.simulation.run.conclude", lambda *_, **__: None)
        with pytest.raises(Killed):
            virtual(output, **values)


def test_a_killed_and_resumed_run_counts_gradients_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was logged after the last checkpoint is void; the virtual clock goes on, and a failure befalls once."""
    values: dict[str, Any] = {"steps": 40, "failures": parse_failures("worker:1@0.5+0.3")}
    kill_at(1.55, monkeypatch, tmp_path, **values)
    result = virtual(tmp_path, options=Options(silent=True, report=False, resume=True), **values)
    pushes = result.pushes()
    assert len(pushes) == result.updates == 160
    assert replay(tmp_path).is_equal
    events = read_events(tmp_path / "metrics.jsonl")
    assert [event.kind for event in events].count("restart") == 1
    assert [event.time for event in events] == sorted(event.time or 0.0 for event in events)


def epoch_means(output: Path) -> list[tuple[float | None, float | None]]:
    live = surviving_events(read_events(output / "metrics.jsonl"))
    return [(event.epoch, event.loss) for event in live if isinstance(event, EpochEvent)]


def test_epoch_means_count_each_gradient_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the servers went back within the epoch, or the run was killed there and resumed."""
    values: dict[str, Any] = {"protocol": "bsp", "epoch_checkpoints": True, "checkpoint_every_s": 0.35}
    whole = virtual(tmp_path / "whole", **values)
    virtual(tmp_path / "crashed", failures=parse_failures("server@1.65+0.5"), **values)
    kill_at(1.65, monkeypatch, tmp_path / "killed", **values)
    virtual(tmp_path / "killed", options=Options(silent=True, report=False, resume=True), **values)
    means = epoch_means(tmp_path / "whole")
    pushes = whole.pushes()
    for epoch, loss in means:
        assert epoch
        assert loss == pytest.approx(pushes[(pushes["version"] - 1) // 10 == epoch - 1]["loss"].mean(), rel=1e-5)
    for other in ("crashed", "killed"):
        back_to = [event["version"] for event in lines_of(tmp_path / other / "metrics.jsonl", "generation")][1:]
        assert all(version % 10 for version in back_to), "within an epoch"
        assert epoch_means(tmp_path / other) == means


def test_models_of_equal_parameters_are_equal_files(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that nobody disturbed, and of one that was killed and resumed."""
    values: dict[str, Any] = {"compute": "real", "model": "cnn", "shards": str(shards), "workers": 2, "protocol": "bsp"}
    values |= {"batch_size": 12, "steps": 12, "epoch_checkpoints": True, "checkpoint_every_s": 0.35}
    whole = virtual(tmp_path / "whole", **values)
    kill_at(0.95, monkeypatch, tmp_path / "killed", **values)
    killed = virtual(tmp_path / "killed", options=Options(silent=True, report=False, resume=True), **values)
    assert sum(isinstance(event, StartEvent) for event in killed.events()) == 2
    for name in ("model.safetensors", "best.safetensors"):
        one, other = (sha256((run.output / name).read_bytes()).hexdigest() for run in (whole, killed))
        assert one == other, name


@pytest.mark.parametrize("exchange", ["parameter-server", "d-psgd"])
def test_fewer_workers_resume_without_failures_of_others(tmp_path: Path, exchange: str) -> None:
    """A resume must repeat the list of failures, which may name workers that the run no longer has."""
    values: dict[str, Any] = {"exchange": exchange, "failures": parse_failures("worker:3@0.2+0.1,worker:3@2+0.1")}
    virtual(tmp_path, steps=10, **values)
    result = virtual(tmp_path, options=RESUME, steps=30, **values | {"workers": 2})
    assert (result.num_workers, result.restarts["worker"]) == (2, 1)


@pytest.mark.parametrize("field", ["bandwidth_mbps", "step_ms", "latency_ms"])
def test_an_option_that_makes_times_infinite_is_refused(field: str) -> None:
    value = 1e-320 if field == "bandwidth_mbps" else 1e308
    with pytest.raises(UsageError, match=rf"--{field.replace('_', '-')} must be .*, got {re.escape(str(value))}"):
        SimulationSettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["exponential:1e-320", "one-slow:1e308", "lognormal:1e200", "one-slow:0"])
def test_a_profile_that_makes_times_infinite_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"must be a positive number of 1e-100 to 1e\+100, got"):
        parse_profile(text)


def test_two_deaths_of_a_worker_last_as_long_as_the_longer(tmp_path: Path) -> None:
    for name, script in (("later", "worker:0@1+0.5,worker:0@1.2+2"), ("sooner", "worker:0@1+2.2,worker:0@1.2+0.3")):
        pushes = virtual(tmp_path / name, steps=60, failures=parse_failures(script)).pushes()
        seconds = pushes.loc[pushes["worker"] == 0, "seconds"]
        assert not seconds.between(1.05, 3.25).any()


def test_a_dead_server_writes_no_checkpoint(tmp_path: Path) -> None:
    values: dict[str, Any] = {"steps": 60, "profile": parse_profile("one-slow:12"), "checkpoint_every_s": 1.0}
    virtual(tmp_path, failures=parse_failures("server@2.05+1.5"), **values)
    (rollback,) = lines_of(tmp_path / "metrics.jsonl", "rollback")
    assert rollback["to_version"] < rollback["from_version"]


@pytest.mark.parametrize(
    "flags", [["--servers", "100"], ["--compare", "asp,k-bsp:9"], ["--compare", "asp", "--loss", "nan"]]
)
def test_what_cannot_be_simulated_is_refused_before_a_run_is_logged(tmp_path: Path, flags: list[str]) -> None:
    toy = ["--compute", "quadratic", "--workers", "4", "--batch-size", "4", "--steps", "4", "--quiet"]
    with pytest.raises(UsageError):
        main([*toy, *flags, "--output", str(tmp_path / "run")])
    assert not list(tmp_path.rglob("metrics.jsonl"))
