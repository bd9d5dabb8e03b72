"""Runs with a switch that are resumed with other workers: where they switch, with which momentum, and on which rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.two_stages import AspThenBsp, TwoHalves
from tests.support.virtual_runs import QUIET, RESUME, final, virtual
from tests.unit.test_cohorts import ROWS, assert_whole_passes, entries_of, run
from tests.unit.test_stages import ProcessKilled, kill_after
from trainer import Result
from trainer.checkpoints.decisions import read_switch
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import read_state, versions
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.comparison.measurements import sent_bytes
from trainer.config import Config, RunFacts
from trainer.coordination.cohorts import CheckpointProgress, Cohort, Cohorts, CohortSize, next_cohort
from trainer.coordination.passes import WORD
from trainer.data.holdout import is_held_out
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.evaluation.evaluator import Evaluator
from trainer.exchange import EXCHANGES
from trainer.leader.leader import Leader
from trainer.plan import plan
from trainer.regroup import departure_obstacle
from trainer.rules import begin_cohort
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.run import StageEvent
from trainer.runlog.kinds.training import PassEvent
from trainer.runlog.run_record import read_record
from trainer.server.slice_server import SliceServer
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay
from trainer.stages import build_stages

WAYS: dict[str, dict[str, Any]] = {
    "alpha": {"exchange": "strategy-switch", "alpha": 0.5, "servers": 2},
    "fraction": {"exchange": "sync-switch", "fraction": 0.4},
}
EPOCHS = 6
CHANGE = replace(RESUME, batch_size_given=True)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kind in (TwoHalves, AspThenBsp):
            patch.setitem(EXCHANGES, kind.name, kind)
        patch.setattr(prune, "__defaults__", (1000, WAITING))  # all checkpoints are kept
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    parts = [rows_of(size, 10 + number, 100 * number) for number, size in enumerate(ROWS)]
    return str(write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS))


# --- when the run switches --------------------------------------------------------------------------------------------

CHANGES = st.lists(st.tuples(st.integers(1, 9), st.integers(9, 60), st.integers(0, 25)), min_size=1, max_size=3)
NUM_ROWS = 120


def regrouped_at(config: Config, workers: int, batch_size: int, steps: int) -> Config:
    """The configuration of a run whose workers have all made some steps since they began, and then change."""
    entries = config.cohorts.entries or (Cohort(3, config.data.batch_size),)
    last = entries[-1]
    later = replace(config, data=replace(config.data, batch_size=batch_size))
    accepted = last.accepted + steps * last.workers
    cohort = next_cohort(
        last,
        size=CohortSize(workers, batch_size),
        progress=CheckpointProgress(
            last.version + steps, accepted, dict.fromkeys(range(last.workers), last.clock + steps)
        ),
        turn=last.turn,
        left_out=0,
        steps_per_epoch=(config.steps_per_epoch(NUM_ROWS), later.steps_per_epoch(NUM_ROWS)),
    )
    return replace(later, cohorts=Cohorts((*entries, cohort)))


@given(
    share=st.sampled_from([0.0, 0.0625, 0.29, 0.5, 0.9, 1.0]),
    length=st.sampled_from([{"epochs": 1}, {"epochs": 5}, {"epochs": 8}, {"steps": 37}, {"steps": 80}]),
    changes=CHANGES,
)
def test_the_switch_keeps_its_share_of_the_epochs(
    share: float, length: dict[str, int], changes: list[tuple[int, int, int]]
) -> None:
    """Within a step for --fraction and a whole epoch for --alpha; at once if the present workers begin after it."""
    for exchange, flag in (("sync-switch", "fraction"), ("strategy-switch", "alpha")):
        values: dict[str, Any] = {flag: share, **length}
        config = make_config(model="cnn", batch_size=24, exchange=exchange, **values)
        for workers, batch_size, steps in changes:
            config = regrouped_at(config, workers, batch_size, steps)
        cohort = config.cohorts.present
        per_epoch = config.steps_per_epoch(NUM_ROWS)
        total = Fraction(config.steps_per_worker(NUM_ROWS) - cohort.clock + cohort.epoch_steps, per_epoch)
        unit = Fraction(1, per_epoch) if flag == "fraction" else 1
        epoch = Fraction(str(share)) * total // unit * unit
        until = build_stages(config, cohort.workers, NUM_ROWS)[0].until
        if share == 1 or epoch >= total:
            assert until is None
            continue
        assert until is not None
        begun = Fraction(cohort.epoch_steps, per_epoch)
        reached = begun + Fraction(until - cohort.accepted, cohort.workers * per_epoch)
        assert reached == max(epoch, begun)


def test_the_end_of_a_rule_keeps_its_epoch() -> None:
    """The last epoch but one, whatever the workers; at their first checkpoint if that is over."""
    config = make_config(model="logistic", exchange="strategy-switch", epochs=6, batch_size=24)
    for workers, batch_size, steps, left in ((5, 30, 7, 15), (2, 12, 14, 3), (3, 24, 3, 0)):
        config = regrouped_at(config, workers, batch_size, steps)
        first = build_stages(config, workers, NUM_ROWS)[0]
        assert first.by_rule
        assert first.until == config.cohorts.present.accepted + left * workers


# --- runs in virtual time ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(shards: str, registered: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A run of three workers by each way, with a checkpoint after nearly every update."""
    folder = tmp_path_factory.mktemp("whole")
    return {way: short(shards, folder / way, QUIET, way=way) for way in WAYS}


def short(shards: str, output: Path, options: Any, workers: int | None = None, *, way: str, **values: Any) -> Result:
    common: dict[str, Any] = {"epochs": EPOCHS, "checkpoint_every_s": 0.05, "profile": parse_profile("lognormal:0.5")}
    return run(shards, output, options, workers, **WAYS[way] | common | values)


def cut_at(done: Result, output: Path, version: int) -> None:
    """Leave in another folder what a kill of a run after a checkpoint leaves."""
    shutil.copytree(str(done.output), output)
    for later in versions(output / "checkpoints"):
        if later > version:
            shutil.rmtree(folder_of(output / "checkpoints", later))
    (output / "result.json").unlink()


def switches_of(done: Result) -> list[StageEvent]:
    return [event for event in done.events() if isinstance(event, StageEvent) and event.stage]


def place_of(done: Result, place: str) -> int:
    """The version of a checkpoint in the middle of the first stage, at its end, or soon after it."""
    switch = switches_of(done)[-1].version
    earlier = [version for version in versions(done.output / "checkpoints") if version < switch]
    later = [version for version in versions(done.output / "checkpoints") if version > switch]
    return {"before": earlier[len(earlier) // 2], "at": switch, "after": later[0]}[place]


CASES = [
    pytest.param("alpha", 2, 24),
    pytest.param("fraction", 5, 30),
    pytest.param("alpha", 5, 30, marks=pytest.mark.full),
    pytest.param("alpha", 1, 11, marks=pytest.mark.full),
    pytest.param("fraction", 2, 24, marks=pytest.mark.full),
    pytest.param("fraction", 1, 11, marks=pytest.mark.full),
]


@pytest.mark.parametrize("place", ["before", "at", "after"])
@pytest.mark.parametrize(("way", "workers", "batch_size"), CASES)
def test_other_workers_continue_in_the_right_stage(
    way: str, place: str, workers: int, batch_size: int, shards: str, whole: dict[str, Result], tmp_path: Path
) -> None:
    """Each row is trained once a pass, and bsp lasts to the share of the epochs that the present workers find."""
    output = tmp_path / "run"
    version = place_of(whole[way], place)
    cut_at(whole[way], output, version)
    done = short(shards, output, CHANGE, workers, way=way, batch_size=batch_size)
    assert_whole_passes(output, EPOCHS - 2)
    assert (entries_of(output)[1]["version"], entries_of(output)[1]["left_out"]) == (version, 0)
    [switch] = {event.version for event in switches_of(done)}
    used = done.pushes().groupby("version").size()
    assert used.loc[:switch].tolist() == [3 if at <= version else workers for at in range(1, switch + 1)]
    assert (used.loc[switch + 1 :] == 1).all()
    epoch = done.stages[1]["first_epoch"]
    if way == "alpha":
        assert epoch == EPOCHS / 2
    elif place == "before":
        per_epoch = sum(ROWS) // batch_size
        assert epoch == pytest.approx(int(0.4 * EPOCHS * per_epoch) / per_epoch)
    else:
        assert epoch == whole[way].stages[1]["first_epoch"]
    assert replay(output).is_equal


@pytest.mark.parametrize("place", ["before", "at", "after"])
def test_the_same_workers_have_the_bits_of_a_whole_run(place: str, tmp_path: Path) -> None:
    """Both stages are bsp, of which no interruption changes a bit."""
    values: dict[str, Any] = {"model": "cnn", "exchange": "two-halves", "checkpoint_every_s": 0.05}
    done = virtual(tmp_path / "whole", **values)
    cut_at(done, tmp_path / "run", place_of(done, place))
    again = virtual(tmp_path / "run", options=CHANGE, **values)
    assert final(again).tobytes() == final(done).tobytes()
    assert again.stages == done.stages


@pytest.mark.parametrize("workers", [2, 6])
def test_only_present_workers_are_stragglers(workers: int, tmp_path: Path) -> None:
    """Three of five steps do not count for the workers that follow; a straggler that was found ends bsp at once."""
    rule: dict[str, Any] = {"straggler": 3.0, "straggler_window": 5, "profile": parse_profile("one-slow:4")}
    values: dict[str, Any] = {"model": "cnn", "exchange": "sync-switch", "checkpoint_every_s": 0.05} | rule
    done = virtual(tmp_path / "whole", **values)
    assert switches_of(done)[0].version == 5
    for version, switch in ((3, 8), (5, 5)):
        output = tmp_path / str(version)
        cut_at(done, output, version)
        later = virtual(output, options=CHANGE, workers=workers, **values)
        assert {event.version for event in switches_of(later)} == {switch}
        assert later.stages[1]["reason"] == "worker 0 was a straggler: 4 times the median over 5 steps"
        assert replay(output).is_equal
    config = read_record(tmp_path / "3").config
    assert begin_cohort(config, read_state(tmp_path / "3" / "checkpoints", 3)).stragglers == {}


def test_a_plan_is_of_the_rest_of_the_run() -> None:
    """Plan one and a half epochs of four steps by all-reduce; an update by asp has one gradient."""
    facts = RunFacts(5, sum(ROWS), 50, 0)
    config = make_config(model="logistic", batch_size=24, epochs=EPOCHS, **WAYS["alpha"])
    cohorts = Cohorts((Cohort(3, 24), Cohort(5, 24, 6, 18, 6, 1, 6, 6, (6, 6, 6))))
    found = plan(replace(config, cohorts=cohorts), facts)
    assert [text.split(":")[0] for text in found.stages] == [
        "to epoch 3 by all-reduce",
        "to epoch 6 by parameter-server",
    ]
    assert found.updates == 6 + 6 + 12 * 5
    cohorts = Cohorts((Cohort(3, 24), Cohort(5, 24, 24, 48, 20, 1, 16, 16, (20, 16, 12))))
    found = plan(replace(config, cohorts=cohorts), facts)
    assert (found.stages, found.exchange) == ((), "parameter-server")
    assert found.updates == 24 + 8 * 5


def test_sent_bytes_are_by_stage_and_workers(shards: str, whole: dict[str, Result], tmp_path: Path) -> None:
    """All-reduce sends 2 (n - 1) / n vectors for a gradient, and servers two."""
    done = whole["alpha"]
    cut_at(done, tmp_path / "run", place_of(done, "before"))
    later = short(shards, tmp_path / "run", CHANGE, 5, way="alpha")
    begin, switch = entries_of(tmp_path / "run")[1]["version"], switches_of(later)[0].version
    found = later.pushes()["version"].to_numpy()
    vectors = (found <= begin).sum() * 4 / 3 + ((found > begin) & (found <= switch)).sum() * 8 / 5
    vectors += 2 * (found > switch).sum()
    state = read_state(tmp_path / "run" / "checkpoints", found.max())
    config = read_record(tmp_path / "run").config
    assert sent_bytes(config, later, later.events(), found) == round(vectors * 4 * state.total)


def test_a_run_with_a_switch_continues_without_a_host(tmp_path: Path) -> None:
    """Unless both of its stages have the same bits whatever fails."""
    for exchange in ("strategy-switch", "sync-switch"):
        assert departure_obstacle(make_config(model="cnn", exchange=exchange), 2, has_followed=False) is None
    words = departure_obstacle(make_config(model="cnn", exchange="two-halves"), 2, has_followed=False)
    assert words == "with other workers a run of two-halves would end with other bits"


# --- momentum ---------------------------------------------------------------------------------------------------------

M = 0.9
FACTORS = {"reset": 0.0, "keep": 1.0, "scale": 1 / 2}


def ahead_of(workers: int) -> float:
    """Return how many times its momentum the parameters of asp with look-ahead are ahead: one round and a half."""
    return float((1 - M**1.5) / (1 - M) * M ** (1 / workers))


@pytest.mark.parametrize("way", FACTORS)
@pytest.mark.parametrize(
    ("exchange", "made_by", "version", "before", "after"),
    [
        pytest.param("sync-switch", 0, 8, 0, ahead_of(2), id="bsp to asp"),
        pytest.param("sync-switch", 1, 8, ahead_of(4), ahead_of(2), id="asp"),
        pytest.param("asp-then-bsp", 0, 8, ahead_of(4), 0, id="asp to bsp"),
        pytest.param("asp-then-bsp", 0, 9, ahead_of(2), 0, id="asp to bsp later"),
    ],
)
def test_two_workers_continue_with_the_momentum_of_four(
    exchange: str, made_by: int, version: int, before: float, after: float, way: str, tmp_path: Path
) -> None:
    """Parameters and momentum are apart in the oracle; a checkpoint has the parameters ahead of their momentum."""
    rng = np.random.default_rng(3)
    parameters, statistics, velocity = rng.normal(size=5), rng.normal(size=2), rng.normal(size=5)
    held = np.concatenate([parameters - before * velocity, statistics]).astype(np.float32)
    folder = folder_of(tmp_path, version)
    write_model(folder, version, held, velocity.astype(np.float32), 1)
    clocks = dict.fromkeys(range(4), 8)
    write_state(folder, RunState(version, 32, 0, 1, 0.8, None, False, clocks, 0.0, 1, 5, 2, "", stage=made_by))
    config = make_config(model="cnn", exchange=exchange, switch_momentum=way, momentum=M, batch_size=40, steps=16)
    cohorts = Cohorts((Cohort(4, 40), Cohort(2, 40, 8, 32, 8, 0, 8, 8, (8, 8, 8, 8))))
    facts = RunFacts(num_workers=2, rows=400, num_parameters=5, num_buffers=2)
    server = SliceServer(replace(config, cohorts=cohorts), facts, 0, tmp_path, lambda *_: None)
    server.load(1, version, 1)
    left = velocity if made_by else velocity * FACTORS[way]
    np.testing.assert_allclose(server.slice.momentum, left, rtol=1e-5)
    np.testing.assert_allclose(server.slice.values, np.concatenate([parameters - after * left, statistics]), rtol=1e-4)


# --- the rule of Strategy-Switch --------------------------------------------------------------------------------------

RULE: dict[str, Any] = {"exchange": "strategy-switch", "switch_threshold": 1.4, "switch_window": 2, "epochs": 9}
RULE |= {"learning_rate": 0.05, "checkpoint_every_s": 0.05}


def by_rule(shards: str, output: Path, options: Any = QUIET, workers: int | None = None, **values: Any) -> Result:
    return run(shards, output, options, workers, **RULE | values)


def assert_by_the_rule(done: Result, first: int = 1) -> int:
    """Check the epoch of the switch by the losses in the log, and return it. first: the first epoch that may decide."""
    losses = [event.loss_alone() for event in done.events() if isinstance(event, EvaluationEvent)]
    changes = 100 * np.abs(np.diff(losses)) / losses[:-1]
    means = np.convolve(changes, np.ones(2) / 2, "valid")
    epoch = next(number for number, mean in enumerate(means, 3) if mean < 1.4 and number >= first)
    assert [stage["first_epoch"] for stage in done.stages] == [0, epoch]
    return epoch


def interrupt(patched: pytest.MonkeyPatch, shards: str, output: Path) -> None:
    """Kill a run in its 27th step, two steps after the epoch at which the rule decides."""
    kill_after(patched, 3 * 27)
    with pytest.raises(ProcessKilled):
        by_rule(shards, output)


def test_the_rule_goes_on_with_other_workers(shards: str, tmp_path: Path) -> None:
    done = by_rule(shards, tmp_path / "whole")
    assert assert_by_the_rule(done) == 6
    cut_at(done, tmp_path / "run", 10)
    later = by_rule(shards, tmp_path / "run", CHANGE, 5)
    assert_by_the_rule(later)
    assert_whole_passes(tmp_path / "run", 5)
    assert replay(later.output).is_equal


def test_other_workers_begin_where_the_rule_has_decided(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader was killed before it went back there, and has left later checkpoints."""
    with monkeypatch.context() as patched:
        patched.setattr(Leader, "look_for_decision", lambda leader, now: None)
        interrupt(patched, shards, tmp_path / "run")
    assert read_switch(tmp_path / "run" / "checkpoints")
    assert versions(tmp_path / "run" / "checkpoints")[-1] > 24
    done = by_rule(shards, tmp_path / "run", CHANGE, 2)
    assert entries_of(tmp_path / "run")[1]["version"] == 24
    assert assert_by_the_rule(done) == 6
    assert replay(done.output).is_equal


def test_a_late_evaluation_decides_at_the_next_epoch(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The present workers cannot go back to a checkpoint of others, whose rows they have been dealt in part."""
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "handle", lambda evaluator, state: False)
        interrupt(patched, shards, tmp_path / "run")
    done = by_rule(shards, tmp_path / "run", CHANGE, 2)
    assert entries_of(tmp_path / "run")[1]["version"] > 24
    assert assert_by_the_rule(done, first=7) == 7
    assert replay(done.output).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("workers", [5, 3, pytest.param(2, marks=pytest.mark.full)])
def test_held_out_rows_stay_held_out(workers: int, shards: str, tmp_path: Path) -> None:
    """Every other row is trained once a pass, by its hash and by its id in the example ledger."""
    values: dict[str, Any] = {"switch_on": "holdout", "holdout_share": 0.2}
    done = by_rule(shards, tmp_path / "whole", **values)
    cut_at(done, tmp_path / "run", 6)
    later = by_rule(shards, tmp_path / "run", CHANGE, workers, batch_size=30, **values)
    config = read_record(tmp_path / "run").config
    parts = [load_worker(open_shards(shards), worker) for worker in range(3)]
    trained = [~is_held_out(rows.ids, config) for rows in parts]
    total = sum(int(hash_) for rows, kept in zip(parts, trained, strict=True) for hash_ in rows.hashes[kept])
    passes = [event for event in later.events() if isinstance(event, PassEvent)]
    assert {event.fingerprint for event in passes} == {f"{total % WORD:016x}"}
    assert [event.last for event in passes] == list(range(1, len(passes) + 1))
    files = sorted((tmp_path / "run" / "examples").iterdir())
    ids, counts = np.unique(
        np.concatenate([pq.read_table(file, columns=["id"])["id"].to_numpy() for file in files]), return_counts=True
    )
    assert set(ids) == {id_ for rows, kept in zip(parts, trained, strict=True) for id_ in rows.ids[kept].tolist()}
    assert counts.min() >= len(passes) > 6
    assert replay(later.output).is_equal


@pytest.mark.slow
def test_samplers_without_passes_draw_no_held_out_row(shards: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"switch_on": "holdout", "holdout_share": 0.2, "sampling": "recency"}
    cut_at(by_rule(shards, tmp_path / "whole", **values), tmp_path / "run", 6)
    later = by_rule(shards, tmp_path / "run", CHANGE, 5, **values)
    files = (tmp_path / "run" / "examples").iterdir()
    ids = np.concatenate([pq.read_table(file, columns=["id"])["id"].to_numpy() for file in files])
    assert not is_held_out(ids, read_record(tmp_path / "run").config).any()
    assert replay(later.output).is_equal


def test_too_many_workers_for_the_trained_rows_are_refused(shards: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"switch_on": "holdout", "holdout_share": 0.5, "batch_size": 114}
    by_rule(shards, tmp_path / "run", **values | {"epochs": 2})
    with pytest.raises(UsageError, match=r"worker \d+ would have no rows, the set has \d+ that are not held out"):
        by_rule(shards, tmp_path / "run", CHANGE, 100, **values)
