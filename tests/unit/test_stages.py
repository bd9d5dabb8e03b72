"""Runs with stages: the pure rules of a switch, and switches in virtual time held against plain runs and plain loops."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from tests.support.configs import make_config
from tests.support.references import RUNS, undocumented_below, unlisted
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.two_stages import NeighboursThenServers, TwoHalves
from trainer import Options, Result
from trainer.checkpoints.decisions import SwitchDecision, read_switch, write_decision
from trainer.checkpoints.prune import prune, roll_back
from trainer.checkpoints.read import newest, read_slice_range, read_state, read_vector, whole
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import mark_evaluated, write_model, write_state
from trainer.config import Config, Data, RunSpec
from trainer.coordination.momentum import Momentum, heavy_ball, look_ahead
from trainer.coordination.switch import carry_momentum
from trainer.coordination.switch_rule import mean_change
from trainer.exchange import EXCHANGES
from trainer.flags import build_parser, config_of
from trainer.leader.leader import Leader
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.result import read_result
from trainer.simulate import main, simulate
from trainer.simulation.engine import Engine
from trainer.simulation.failures import parse_failures
from trainer.simulation.options import SimulationSettings
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay
from trainer.stages import build_stages, stage_after

QUIET = Options(silent=True, report=False)
WORKERS, ROWS, BATCH = 4, 400, 40  # ten steps an epoch
TOY: dict[str, Any] = {"model": "cnn", "batch_size": BATCH, "steps": 30}


def config_from(*words: str) -> Config:
    return config_of(command_line.parse(build_parser(), ["--shards", "s", "--output", "o", "--steps", "20", *words]))


def virtual(output: Path, protocol: str = "asp", options: Options = QUIET, **values: Any) -> Result:
    """A toy run of four workers with the default rates of its protocols."""
    machines: dict[str, Any] = {"compute": "quadratic", "workers": WORKERS, "rows": ROWS}
    machines |= {key: values.pop(key) for key in list(values) if key in SimulationSettings.__dataclass_fields__}
    config = make_config("", output, protocol=protocol, **TOY | values)
    return simulate(config, SimulationSettings(**machines), options)


def final(result: Result) -> np.ndarray:
    root = result.output / "checkpoints"
    version = newest(root, verify=True)
    assert version is not None
    return read_vector(root, version)


def bits_of(result: Result) -> tuple[bytes, bytes]:
    """All that happened, and the parameters that came of it."""
    return (result.output / "pushes.csv").read_bytes(), final(result).tobytes()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXCHANGES, TwoHalves.name, TwoHalves)
        yield


# --- momentum ---------------------------------------------------------------------------------------------------------


def test_a_discarded_momentum_takes_its_look_ahead_with_it() -> None:
    """The oracle keeps parameters and momentum apart: v = d v + u, then p -= c v; servers hold p - s v."""
    m, size, n, rounds = 0.9, 2, 6, 1.5
    rule = look_ahead(m, size, n, rounds)
    decay = m ** (size / n)
    step = (1 - decay) / (1 - m)
    ahead = (1 - m**rounds) / (1 - m) * decay
    rng = np.random.default_rng(0)
    parameters, velocity = rng.normal(size=5), np.zeros(5)
    held, momentum = parameters.copy(), np.zeros(5)
    for _ in range(7):
        update = rng.normal(size=5)
        velocity = decay * velocity + update
        parameters = parameters - step * velocity
        momentum = rule.decay * momentum + update
        held = held - rule.at_once * update - rule.share * momentum
    np.testing.assert_allclose(held, parameters - ahead * velocity, rtol=1e-12)
    values, left = carry_momentum(held, momentum, rule, heavy_ball(m), 0.0)
    np.testing.assert_allclose(values, parameters, rtol=1e-12)
    assert not left.any()
    other = look_ahead(0.5, 1, 3)
    ahead = (1 - 0.5**rounds) / (1 - 0.5) * 0.5 ** (1 / 3)
    values, left = carry_momentum(held, momentum, rule, other, 0.25)
    np.testing.assert_allclose(left, velocity / 4, rtol=1e-12)
    np.testing.assert_allclose(values, parameters - ahead * velocity / 4, rtol=1e-12)


@pytest.mark.parametrize("rule", [heavy_ball(0.9), look_ahead(0.95, 1, 4)])
def test_a_kept_momentum_under_the_same_rule_changes_no_bit(rule: Momentum) -> None:
    rng = np.random.default_rng(1)
    values, momentum = rng.normal(size=7).astype(np.float32), rng.normal(size=5).astype(np.float32)
    moved, kept = carry_momentum(values, momentum, rule, rule, 1.0)
    assert (moved.tobytes(), kept.tobytes()) == (values.tobytes(), momentum.tobytes())
    moved, _ = carry_momentum(values, momentum, look_ahead(0.95, 1, 4), rule, 0.0)
    assert moved[5:].tobytes() == values[5:].tobytes(), "statistics have no momentum"
    assert moved.dtype == np.float32


# --- the stages of a configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "steps", "switch"),
    [(0.5, 20, 10), (0.29, 100, 29), (0.0625, 100, 6), (0.01, 20, 0), (0.0, 20, 0), (1.0, 20, None)],
)
def test_a_fraction_of_the_steps_is_bsp(fraction: float, steps: int, switch: int | None) -> None:
    config = make_config(model="cnn", exchange="sync-switch", fraction=fraction, steps=steps)
    first, second = build_stages(config, WORKERS, ROWS)
    assert first.until == (None if switch is None else switch * WORKERS)
    assert second.until is None
    assert [stage.config.protocol.name for stage in (first, second)] == ["bsp", "asp"]
    assert stage_after((first, second), 0, 0).number == (switch == 0)


def test_each_stage_has_the_defaults_of_its_protocol() -> None:
    stages = build_stages(make_config(model="cnn", exchange="sync-switch", steps=20), WORKERS, ROWS)
    for stage, protocol in zip(stages, ("bsp", "asp"), strict=True):
        assert stage.config == make_config(model="cnn", protocol=protocol, steps=20)
    given = build_stages(make_config(exchange="sync-switch", learning_rate=0.3, momentum=0.5), WORKERS, ROWS)
    assert {(stage.config.learning_rate, stage.config.coefficient) for stage in given} == {(0.3, 0.5)}


def test_a_stage_never_goes_back_to_an_earlier_one() -> None:
    """A run that has switched is resumed with twice the steps: its switch would be later, but it stays switched."""
    config = make_config(model="cnn", exchange="sync-switch", steps=40)
    stages = build_stages(config, WORKERS, ROWS)
    assert stage_after(stages, 0, 40).number == 0
    assert stage_after(stages, 1, 40).number == 1
    assert stage_after(stages, 0, 80).number == 1
    assert stage_after(stages, 0, 40, has_ended=True).number == 1


def test_a_configuration_with_stages_is_saved_without_defaults() -> None:
    config = config_from("--exchange", "sync-switch", "--fraction", "0.25")
    assert config.optimiser.learning_rate is None
    assert config.essentials()["--fraction"] == 0.25


def test_a_comparison_of_protocols_has_no_stages(tmp_path: Path) -> None:
    words = ["--compute", "none", "--workers", "2", "--steps", "3", "--output", str(tmp_path / "o")]
    with pytest.raises(UsageError, match="leave out --exchange sync-switch"):
        main([*words, "--exchange", "sync-switch", "--compare", "asp"])


@pytest.mark.parametrize(
    ("alpha", "steps", "switch"), [(0.3, 100, 30), (0.29, 100, 20), (0.5, 25, 10), (0.0, 20, 0), (1.0, 25, None)]
)
def test_alpha_of_the_whole_epochs_is_all_reduce(alpha: float, steps: int, switch: int | None) -> None:
    """Ten steps are an epoch."""
    same: dict[str, Any] = {"model": "cnn", "steps": steps, "batch_size": BATCH}
    config = make_config(exchange="strategy-switch", alpha=alpha, servers=2, **same)
    first, second = build_stages(config, WORKERS, ROWS)
    assert first.until == (None if switch is None else switch * WORKERS)
    assert first.config == make_config(exchange="all-reduce", **same)
    assert second.config == make_config(protocol="asp", servers=2, **same)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--alpha", "2"], "--alpha must be at least 0 and at most 1, got 2.0"),
        (["--alpha", "some"], "--alpha must be auto or a number from 0 to 1, got 'some'"),
        (
            ["--no-epoch-checkpoints"],
            "--alpha auto evaluates every epoch: leave out --no-epoch-checkpoints, or give --alpha SHARE",
        ),
        (
            ["--alpha", "0.5", "--tolerance", "0.1"],
            "--exchange all-reduce has no --tolerance: leave it out, or use parameter-server",
        ),
        (
            ["--collective", "torch"],
            "--exchange strategy-switch has no --collective torch: leave it out, or use all-reduce",
        ),
    ],
)
def test_a_switch_that_cannot_be_is_refused_in_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_from("--exchange", "strategy-switch", *words)
    assert str(refused.value) == line


def test_paper_evaluations_are_allowed_where_no_rule_reads_them() -> None:
    for words in (["--switch-on", "holdout"], ["--alpha", "0.5"]):
        config = config_from("--exchange", "strategy-switch", "--evaluation-mode", "paper", *words)
        assert config.run.evaluation_mode == "paper"


def test_a_stage_with_models_of_the_workers_is_refused() -> None:
    line = "--exchange neighbours-then-servers cannot have a stage of d-psgd: a stage begins with one model"
    with pytest.raises(UsageError, match=line):
        Config(data=Data(shards="s"), run=RunSpec(output="o", steps=20), exchange=NeighboursThenServers())


def test_alpha_auto_needs_evaluations(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--compute quadratic has none: give --alpha SHARE"):
        virtual(tmp_path / "toy", exchange="strategy-switch")
    shards = write_shards(tmp_path / "set", [rows_of(20, 2), rows_of(20, 3, 2000)], None)
    with pytest.raises(UsageError, match="which the shard set lacks"):
        by_rule(shards, tmp_path / "run")


# --- virtual time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "plain"), [(0.0, "parameter-server"), (1.0, "all-reduce")])
def test_an_alpha_of_0_or_1_has_the_bits_of_one_exchange(tmp_path: Path, alpha: float, plain: str) -> None:
    """No rate and no momentum is given, so that every run has the defaults of its protocol, and a stage its own."""
    common: dict[str, Any] = {"profile": parse_profile("lognormal:0.5"), "latency_ms": 3.0, "bandwidth_mbps": 0.5}
    switched = virtual(tmp_path / "switch", exchange="strategy-switch", alpha=alpha, **common)
    alone = virtual(tmp_path / "plain", exchange=plain, **common)
    given = json.loads((tmp_path / "switch" / "config.json").read_text())["config"]["optimiser"]
    assert (given["learning_rate"], given["momentum"]) == (None, None)
    assert bits_of(switched) == bits_of(alone)
    assert switched.stages == alone.stages
    assert switched.stages[0]["exchange"] == plain


def test_all_reduce_then_asp_has_the_parameters_of_sync_switch(tmp_path: Path) -> None:
    """Both have the same updates; only messages take another time."""
    common: dict[str, Any] = {"profile": parse_profile("one-slow:3"), "steps": 40}
    switched = virtual(tmp_path / "run", exchange="strategy-switch", alpha=0.6, servers=2, **common)
    other = virtual(tmp_path / "other", exchange="sync-switch", fraction=0.5, **common)
    assert final(switched).tobytes() == final(other).tobytes()
    assert [(stage["exchange"], stage["first_epoch"]) for stage in switched.stages] == [
        ("all-reduce", 0),
        ("parameter-server", 2),
    ]
    slow = virtual(tmp_path / "slow", exchange="strategy-switch", alpha=0.6, servers=2, latency_ms=20.0, **common)
    assert slow.seconds
    assert switched.seconds
    assert slow.seconds > switched.seconds


def by_rule(shards: Path, output: Path, options: Options = QUIET, **values: Any) -> Result:
    """A run of six epochs whose rule decides; one of the values may be alpha instead."""
    common: dict[str, Any] = {"model": "logistic", "epochs": 6, "batch_size": 10, "threads": 1}
    common |= {} if "alpha" in values else {"switch_threshold": 3.0, "switch_window": 3}
    config = make_config(shards, output, exchange="strategy-switch", **common | values)
    return simulate(config, SimulationSettings(), options)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("stages"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


def checkpoint(root: Path, version: int, stage: int = 0) -> None:
    """An evaluated checkpoint of two parameters."""
    values = np.zeros(2, np.float32)
    write_model(folder_of(root, version), version, values, values, 1)
    state = RunState(version, version, 0, 1, version / 10, version // 10, False, {0: version}, 0.0, 1, 2, 0, "")
    write_state(folder_of(root, version), replace(state, stage=stage))
    mark_evaluated(root, state, version / 100, 1.0)


def test_a_late_decision_takes_the_run_back_once(tmp_path: Path) -> None:
    """Four epochs were trained and evaluated since the one that the rule chooses."""
    for version in (10, 20, 30, 40, 50):
        checkpoint(tmp_path, version)
    write_decision(tmp_path, SwitchDecision(10, 1, 1, 0.5))
    prune(tmp_path, by_rule=True)
    assert whole(tmp_path) == [10, 40, 50]
    assert roll_back(tmp_path, 2, by_rule=True) == (10, 2)
    assert whole(tmp_path) == [10]
    checkpoint(tmp_path, 20, stage=1)
    (tmp_path / "generations.json").write_text("[[1, 0]]")
    assert roll_back(tmp_path, 3, by_rule=True) == (20, 3)
    prune(tmp_path, keep=1)
    assert whole(tmp_path) == [20]


def test_a_void_or_damaged_decision_counts_for_nothing(tmp_path: Path) -> None:
    for version in (10, 20):
        checkpoint(tmp_path, version)
    write_decision(tmp_path, SwitchDecision(10, 7, 1, 0.5))
    assert read_switch(tmp_path) is None, "of another generation"
    write_decision(tmp_path, SwitchDecision(15, 1, 1, 0.5))
    assert read_switch(tmp_path) is None, "of a checkpoint that is not there"
    (tmp_path / "switch.json").write_text('{"version": ')
    assert read_switch(tmp_path) is None
    assert roll_back(tmp_path, 2, by_rule=True) == (20, 2)


def test_a_decision_for_a_damaged_checkpoint_is_made_anew(tmp_path: Path) -> None:
    """The run would go back to the newest checkpoint for ever, as long as the decision is there."""
    for version in (10, 20):
        checkpoint(tmp_path, version)
    write_decision(tmp_path, SwitchDecision(10, 1, 1, 0.5))
    slice_file = next(folder_of(tmp_path, 10).glob("slice-*"))
    slice_file.write_bytes(b"?" * 8 + slice_file.read_bytes()[8:])
    assert roll_back(tmp_path, 2, by_rule=True) == (20, 2)
    assert read_switch(tmp_path) is None


def epoch_by_the_rule(losses: Sequence[float | None], window: int, threshold: float) -> int:
    """The oracle: the formula over the losses of all epochs."""
    values = np.array(losses, np.float64)
    changes = 100 * np.abs(np.diff(values)) / values[:-1]
    means = np.convolve(changes, np.ones(window) / window, "valid")
    return window + 1 + int(np.flatnonzero(means < threshold)[0])


def evaluated(done: Result) -> list[EvaluationEvent]:
    return [event for event in done.events() if isinstance(event, EvaluationEvent)]


@pytest.mark.slow
def test_the_rule_switches_by_the_losses_in_the_log(tmp_path: Path, shards: Path) -> None:
    done = by_rule(shards, tmp_path / "run")
    epoch = epoch_by_the_rule([event.loss_alone() for event in evaluated(done)], 3, 3.0)
    assert 4 <= epoch < 6
    assert [(stage["protocol"], stage["first_epoch"]) for stage in done.stages] == [("bsp", 0), ("asp", epoch)]
    assert "less than 3 %" in done.stages[1]["reason"]
    fixed = by_rule(shards, tmp_path / "fixed", alpha=(epoch + 0.5) / 6)
    assert final(done).tobytes() == final(fixed).tobytes()
    assert bits_of(by_rule(shards, tmp_path / "again")) == bits_of(done)
    assert replay(done.output).is_equal
    assert unlisted(tmp_path / "run", RUNS) == set()
    assert undocumented_below(tmp_path) == {}


def test_the_rule_reads_the_loss_without_its_l2_term(tmp_path: Path, shards: Path) -> None:
    """Give a large penalty, so that the sum of both changes too much to decide yet."""
    done = by_rule(shards, tmp_path / "run", weight_decay=0.3, epochs=6, switch_threshold=0.5)
    events = evaluated(done)
    matrices = [array for array in done.weights().values() if array.ndim > 1]
    assert events[-1].l2 == pytest.approx(0.15 * sum(float((array**2).sum()) for array in matrices), rel=1e-5)
    epoch = epoch_by_the_rule([event.loss_alone() for event in events], 3, 0.5)
    assert [stage["first_epoch"] for stage in done.stages] == [0, epoch]
    assert mean_change([event.loss or 0 for event in events[:epoch]], 3) > 0.5


def test_a_run_whose_rule_never_decides_is_all_reduce(tmp_path: Path, shards: Path) -> None:
    """It waits for the evaluation of the last epoch but one, and then continues with the same bits."""
    common: dict[str, Any] = {"model": "logistic", "epochs": 5, "batch_size": 10, "threads": 1}
    done = by_rule(shards, tmp_path / "run", epochs=5, switch_threshold=1e-6)
    plain = simulate(
        make_config(shards, tmp_path / "plain", exchange="all-reduce", **common), SimulationSettings(), QUIET
    )
    assert final(done).tobytes() == final(plain).tobytes()
    assert [stage["exchange"] for stage in done.stages] == ["all-reduce"]
    assert done.rollbacks == 0


@pytest.fixture(scope="module")
def calm_by_rule(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing kills."""
    return by_rule(shards, tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.slow
# The switch comes after 4 epochs of 11 steps of 2 workers: 88 pushes, after which the workers join again.
@pytest.mark.parametrize("events", [66, 87, 88, 89])
def test_a_killed_run_by_the_rule_resumes_with_its_bits(
    calm_by_rule: Result, tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    with monkeypatch.context() as patched:
        kill_after(patched, events)
        with pytest.raises(ProcessKilled):
            by_rule(shards, tmp_path / "run")
    again = by_rule(shards, tmp_path / "run", replace(QUIET, resume=True))
    assert final(again).tobytes() == final(calm_by_rule).tobytes()
    assert again.stages == calm_by_rule.stages
    assert replay(again.output).is_equal


@pytest.mark.slow
def test_a_longer_run_switches_where_the_shorter_one_ended(tmp_path: Path, shards: Path) -> None:
    """The rate is constant, so that an epoch does not depend on the length of the run."""
    whole_run = by_rule(shards, tmp_path / "whole", recipe="constant")
    epoch = int(whole_run.stages[1]["first_epoch"])
    short = by_rule(shards, tmp_path / "run", epochs=epoch, recipe="constant")
    assert len(short.stages) == 1
    (short.output / "result.json").unlink()  # as if killed before it was written
    by_rule(shards, tmp_path / "run", replace(QUIET, resume=True), epochs=epoch, recipe="constant")
    longer = by_rule(shards, tmp_path / "run", replace(QUIET, resume=True), recipe="constant")
    assert longer.stages == whole_run.stages
    assert final(longer).tobytes() == final(whole_run).tobytes()
    losses, expected_losses = ({event.epoch: event.loss for event in evaluated(run)} for run in (longer, whole_run))
    assert losses == expected_losses


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "protocol"), [(0.0, "asp"), (1.0, "bsp")])
def test_a_fraction_of_0_or_1_has_the_bits_of_one_protocol(tmp_path: Path, fraction: float, protocol: str) -> None:
    common: dict[str, Any] = {"profile": parse_profile("lognormal:0.5"), "servers": 2}
    switched = virtual(tmp_path / "switch", exchange="sync-switch", fraction=fraction, **common)
    plain = virtual(tmp_path / "plain", protocol, **common)
    assert bits_of(switched) == bits_of(plain)
    assert [stage["protocol"] for stage in switched.stages] == [protocol]
    assert switched.stages == [{**plain.stages[0], "reason": "start of the run"}]


def trained_by_a_loop(switch: int, steps: int) -> np.ndarray:
    """The oracle: four equally fast workers on the quadratic toy loss, bsp for ``switch`` steps, then asp.

    asp is the textbook's: each worker computes at the parameters that it got with its last push. The look-ahead rule
    keeps the parameters and their shift apart."""
    curvature = np.geomspace(1, 0.01, 64)
    model = make_config(model="cnn").model

    def gradient(values: np.ndarray, worker: int, clock: int) -> np.ndarray:
        noise = generator(0, Purpose.TOY, worker, clock).standard_normal(64, np.float32)
        found: np.ndarray = curvature * values + noise / np.sqrt(BATCH // WORKERS)
        return found

    def rate(accepted: int) -> float:
        return float(0.1 ** sum(accepted >= share * steps * WORKERS for share in (0.75, 0.9)) / WORKERS)

    values, velocity = np.ones(64), np.zeros(64)
    for clock in range(switch):
        total = sum(gradient(values, worker, clock) for worker in range(WORKERS))
        velocity = 0.9 * velocity + model.learning_rate * rate(clock * WORKERS) * total
        values = values - velocity
    m = model.stale_momentum
    decay = m ** (1 / WORKERS)
    ahead = (1 - m**1.5) / (1 - m) * decay
    velocity = np.zeros(64)
    pulled = [values] * WORKERS
    for clock in range(switch, steps):
        for worker in range(WORKERS):
            update = (
                model.stale_learning_rate * rate(clock * WORKERS + worker) * gradient(pulled[worker], worker, clock)
            )
            velocity = decay * velocity + update
            values = values - (1 - decay) / (1 - m) * velocity
            pulled[worker] = values - ahead * velocity
    last: np.ndarray = pulled[-1]
    return last


def test_a_switch_in_the_middle_is_a_loop_of_bsp_then_asp(tmp_path: Path) -> None:
    done = virtual(tmp_path / "run", exchange="sync-switch", fraction=0.4)
    np.testing.assert_allclose(final(done), trained_by_a_loop(12, 30), rtol=1e-4, atol=1e-5)
    assert [(stage["protocol"], stage["first_epoch"]) for stage in done.stages] == [("bsp", 0), ("asp", 1.2)]
    assert done.rollbacks == 0
    assert done.examples == 30 * BATCH


def as_start_of(run: Path, bsp: Result, asp: Config, momentum: float) -> None:
    """Turn the last checkpoint of a bsp run into the only one of an asp run that has not ended."""
    shutil.copytree(str(bsp.output), run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"config": asp.to_json()}))
    root = run / "checkpoints"
    version = newest(root)
    assert version is not None
    state = read_state(root, version)
    values, velocity = read_slice_range(root, version, 0, state.total)
    shutil.rmtree(root)
    write_model(folder_of(root, version), version, values, velocity * momentum)
    kept = replace(state, generation=0, final=False, num_servers=1, identity=asp.identity())
    write_state(folder_of(root, version), kept)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"cause": "interrupted"}))


def test_a_switch_equals_a_bsp_run_continued_by_hand_as_asp(tmp_path: Path) -> None:
    """Heavy-ball momentum and a constant rate, so that a bsp run of half the length is the first half of a longer one."""
    same: dict[str, Any] = {"recipe": "constant", "momentum_rule": "heavy-ball", "learning_rate": 0.01}
    same |= {"profile": parse_profile("one-slow:3"), "stop": "global"}
    for way, factor in (("reset", 0.0), ("keep", 1.0), ("scale", 1 / WORKERS)):
        momentum = 0.8
        switched = virtual(
            tmp_path / way, exchange="sync-switch", fraction=0.5, switch_momentum=way, momentum=momentum, **same
        )
        bsp = virtual(tmp_path / f"{way}-bsp", "bsp", steps=15, momentum=momentum, **same)
        others = {key: value for key, value in same.items() if key != "profile"}
        asp = make_config("", tmp_path / f"{way}-asp", protocol="asp", momentum=momentum, **TOY | others)
        as_start_of(tmp_path / f"{way}-asp", bsp, asp, factor)
        by_hand = virtual(
            tmp_path / f"{way}-asp", "asp", Options(silent=True, report=False, resume=True), momentum=momentum, **same
        )
        assert final(switched).tobytes() == final(by_hand).tobytes(), way
        assert (
            final(switched).tobytes() != final(virtual(tmp_path / f"{way}-plain", momentum=momentum, **same)).tobytes()
        )


def test_a_switch_between_equal_stages_changes_no_bit(tmp_path: Path) -> None:
    plain = virtual(tmp_path / "plain", "bsp", servers=3)
    kept = virtual(tmp_path / "kept", exchange="two-halves", switch_momentum="keep", servers=3)
    assert final(kept).tobytes() == final(plain).tobytes()
    reset = virtual(tmp_path / "reset", exchange="two-halves", servers=3)
    assert final(reset).tobytes() != final(plain).tobytes()


# A step takes 0.1 s, so that the switch is at 1.5 s.
@pytest.mark.parametrize("crash_s", [0.05, 1.35, 1.45, 1.5, 1.55, 2.9])
def test_a_crash_near_the_switch_changes_no_bit(tmp_path: Path, crash_s: float) -> None:
    """Resume a run whose stages are both reproducible, while a worker is away during the switch."""
    calm = virtual(tmp_path / "calm", exchange="two-halves", servers=2)
    failures = parse_failures(f"server@{crash_s}+0.3,worker:1@1.42+0.5")
    hit = virtual(tmp_path / "hit", exchange="two-halves", servers=2, failures=failures, checkpoint_every_s=0.4)
    assert final(hit).tobytes() == final(calm).tobytes()
    assert hit.stages == calm.stages
    assert hit.rollbacks == 1


class ProcessKilled(Exception):
    """The end of a virtual run at once."""


def kill_after(patched: pytest.MonkeyPatch, events: int) -> None:
    """Let the next virtual run die after a number of events."""
    handle = Engine._handle
    left = [events]

    def handle_and_die(engine: Engine, event: Any) -> None:
        handle(engine, event)
        left[0] -= 1
        if not left[0]:
            raise ProcessKilled

    patched.setattr(Engine, "_handle", handle_and_die)


@pytest.fixture(scope="module")
def calm(registered: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing kills."""
    return virtual(tmp_path_factory.mktemp("calm") / "run", exchange="two-halves")


@pytest.mark.parametrize("events", [1, 20, 57, 60, 61, 62, 64, 65, 100])
def test_a_killed_run_resumes_in_the_right_stage(
    calm: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    """The kill comes after a number of events; the switch is at the 60th push, after which the workers join again."""
    with monkeypatch.context() as patched:
        kill_after(patched, events)
        with pytest.raises(ProcessKilled):
            virtual(tmp_path / "run", exchange="two-halves")
    again = virtual(tmp_path / "run", exchange="two-halves", options=Options(silent=True, report=False, resume=True))
    assert final(again).tobytes() == final(calm).tobytes()
    assert again.stages == calm.stages
    assert again.updates == 30
    assert replay(again.output).is_equal


# --- stragglers -------------------------------------------------------------------------------------------------------


def with_rule(output: Path, profile: str = "one-slow:4", options: Options = QUIET, **values: Any) -> Result:
    """A run whose bsp a worker ends that is at least three times as slow as the others in its last five steps."""
    rule: dict[str, Any] = {"straggler": 3.0, "straggler_window": 5, "profile": parse_profile(profile)}
    return virtual(output, exchange="sync-switch", options=options, **rule | values)


SWITCHED = [("bsp", 0, "start of the run"), ("asp", 0.5, "worker 0 was a straggler: 4 times the median over 5 steps")]


def stages_of(done: Result) -> list[tuple[str, float, str]]:
    return [(stage["protocol"], stage["first_epoch"], stage["reason"]) for stage in done.stages]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_straggler_ends_bsp_before_the_fraction(tmp_path: Path, fraction: float) -> None:
    """Five of ten steps an epoch are enough; the run is the one whose fraction says the same."""
    done = with_rule(tmp_path / "run", fraction=fraction)
    assert stages_of(done) == SWITCHED
    assert bits_of(with_rule(tmp_path / "again", fraction=fraction)) == bits_of(done)
    fixed = virtual(tmp_path / "fixed", exchange="sync-switch", fraction=0.17, profile=parse_profile("one-slow:4"))
    assert bits_of(fixed) == bits_of(done)
    assert done.rollbacks == 0
    assert replay(done.output).is_equal


@pytest.mark.parametrize(
    ("profile", "values"),
    [
        ("homogeneous", {}),
        ("one-slow:4", {"straggler": None}),
        ("one-slow:4", {"straggler": 4.1}),
        ("one-slow:4", {"straggler_window": 16}),
        ("one-slow:4", {"straggler_window": 15}),
    ],
)
def test_without_a_straggler_the_fraction_ends_bsp(tmp_path: Path, profile: str, values: dict[str, Any]) -> None:
    done = with_rule(tmp_path / "run", profile, **values)
    assert stages_of(done) == [SWITCHED[0], ("asp", 1.5, "fraction 0.5 of the steps")]
    plain = virtual(tmp_path / "plain", exchange="sync-switch", profile=parse_profile(profile))
    assert bits_of(done) == bits_of(plain)


def test_a_straggler_in_the_last_step_ends_no_stage(tmp_path: Path) -> None:
    done = with_rule(tmp_path / "run", straggler_window=30, fraction=1.0)
    assert stages_of(done) == SWITCHED[:1]
    longer = with_rule(
        tmp_path / "run", straggler_window=30, fraction=1.0, steps=40, options=replace(QUIET, resume=True)
    )
    assert [stage for _, stage, _ in stages_of(longer)] == [0, 3.1]


def test_a_resumed_run_keeps_the_straggler_of_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill it when the checkpoint is written and asp has not begun. Nobody would be a straggler after that."""

    def die(leader: Leader) -> None:
        raise ProcessKilled

    with monkeypatch.context() as patched:
        patched.setattr(Leader, "_enter_next_stage", die)
        with pytest.raises(ProcessKilled):
            with_rule(tmp_path / "run")
    monkeypatch.setattr("trainer.coordination.stragglers.find_straggler", lambda step_s, factor: None)
    again = with_rule(tmp_path / "run", options=replace(QUIET, resume=True))
    assert stages_of(again) == SWITCHED


# The switch is at the 20th push, after which the workers join again; there is a checkpoint every second update.
@pytest.mark.parametrize("events", [1, 12, 19, 20, 21, 24])
def test_a_killed_run_resumes_to_the_same_straggler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int
) -> None:
    calm = with_rule(tmp_path / "calm", checkpoint_every_s=0.5)
    with monkeypatch.context() as patched:
        kill_after(patched, events)
        with pytest.raises(ProcessKilled):
            with_rule(tmp_path / "run", checkpoint_every_s=0.5)
    again = with_rule(tmp_path / "run", checkpoint_every_s=0.5, options=replace(QUIET, resume=True))
    assert stages_of(again) == SWITCHED
    assert (again.updates, again.examples) == (calm.updates, calm.examples)
    assert replay(again.output).is_equal


def printed_plan(text: str) -> tuple[list[str], int]:
    """Return the stages that a start prints before it trains, and the number of updates."""
    (updates,) = re.findall(r"steps per worker, ([\d,]+) updates", text)
    return re.findall(r"^ *(stage \d) ", text, re.MULTILINE), int(updates.replace(",", ""))


@pytest.mark.parametrize(
    ("events", "stages", "updates"),
    [(12, ["stage 1", "stage 2"], 15 + 60), (20, ["stage 2"], 5 + 100), (24, ["stage 2"], 5 + 100)],
)
def test_a_resume_prints_the_stages_that_are_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    events: int,
    stages: list[str],
    updates: int,
) -> None:
    """Plan 15 updates of bsp by the fraction; a straggler ends it with the 5th, after 20 of 120 gradients."""
    with monkeypatch.context() as patched:
        kill_after(patched, events)
        with pytest.raises(ProcessKilled):
            with_rule(tmp_path / "run", checkpoint_every_s=0.5, options=Options(report=False))
    assert printed_plan(capsys.readouterr().out) == (["stage 1", "stage 2"], 15 + 60)
    with_rule(tmp_path / "run", checkpoint_every_s=0.5, options=Options(report=False, resume=True))
    assert printed_plan(capsys.readouterr().out) == (stages, updates)


@pytest.mark.slow
def test_a_resume_prints_the_stage_that_the_evaluations_chose(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill the run when its rule has decided, and the next stage has not begun."""

    def die(leader: Leader) -> None:
        raise ProcessKilled

    with monkeypatch.context() as patched:
        patched.setattr(Leader, "_enter_next_stage", die)
        with pytest.raises(ProcessKilled):
            by_rule(shards, tmp_path / "run")
    again = by_rule(shards, tmp_path / "run", Options(report=False, resume=True))
    assert printed_plan(capsys.readouterr().out) == (["stage 2"], again.updates)


def test_a_longer_run_stays_in_the_stage_that_it_reached(tmp_path: Path) -> None:
    virtual(tmp_path / "run", exchange="sync-switch", steps=20)
    longer = virtual(tmp_path / "run", exchange="sync-switch", steps=60, options=replace(QUIET, resume=True))
    assert [(stage["protocol"], stage["first_epoch"]) for stage in longer.stages] == [("bsp", 0), ("asp", 1)]
    assert longer.examples == 60 * BATCH


def test_a_longer_run_stays_switched_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill soon after the switch leaves its checkpoint, of the first stage, and a log in which the second has begun."""
    with monkeypatch.context() as patched:
        kill_after(patched, 70)
        with pytest.raises(ProcessKilled):
            virtual(tmp_path / "run", exchange="sync-switch")
    longer = virtual(tmp_path / "run", exchange="sync-switch", steps=60, options=replace(QUIET, resume=True))
    assert [stage["first_epoch"] for stage in longer.stages] == [0, 1.5]
    assert replay(longer.output).is_equal


@pytest.mark.parametrize("stop", ["global", "local"])
def test_every_gradient_of_both_stages_is_used_once(tmp_path: Path, stop: str) -> None:
    done = virtual(
        tmp_path / "run", exchange="sync-switch", fraction=0.3, stop=stop, profile=parse_profile("one-slow:2")
    )
    used = done.pushes()
    assert len(used) == 30 * WORKERS
    assert not used.duplicated(["worker", "clock"]).any()
    assert used["staleness"][: 9 * WORKERS].max() == 0
    assert used["staleness"][9 * WORKERS :].max() > 0
    if stop == "local":
        assert used.groupby("worker").size().tolist() == [30] * WORKERS


@pytest.mark.slow
def test_a_run_with_a_switch_is_replayed_and_documented(tmp_path: Path) -> None:
    options = Options(silent=True)
    done = virtual(
        tmp_path / "run", exchange="sync-switch", servers=2, options=options, profile=parse_profile("one-slow:2")
    )
    assert replay(done.output).is_equal
    assert undocumented_below(tmp_path) == {}
    assert unlisted(tmp_path / "run", RUNS) == set()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Stage 2, from epoch 1.5 on: asp by parameter-server (fraction 0.5 of the steps)." in page
    assert "by BSP, then ASP, 4 workers" in page
    assert read_result(done.output).stages == done.stages
