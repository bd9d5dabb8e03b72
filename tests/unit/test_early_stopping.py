"""Early stopping: the pure rule, its decision in a file, and runs in virtual time held against shorter runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import change, make_config
from tests.support.references import RUNS, undocumented_below, unlisted
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Options, Result
from trainer.checkpoints.decisions import StopDecision, read_stop, stop_of, write_decision
from trainer.checkpoints.read import read_state, whole
from trainer.checkpoints.state import folder_of
from trainer.checkpoints.write import write_state
from trainer.coordination.cohorts import Cohort, Cohorts
from trainer.coordination.early_stopping import last_improvement, stops_now
from trainer.evaluation import evaluator
from trainer.home.place import listing
from trainer.leader import leader
from trainer.report.terminal import ending
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.run_folder import OWNED
from trainer.runlog.run_record import read_record
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.engine import Engine
from trainer.simulation.peers.engine import PeerEngine
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

CONFIG = make_config(patience=2, min_delta=0.05)


def stop_by_hand(losses: list[float], patience: int, min_delta: float) -> int | None:
    """Return the number of evaluations after which the loop of most trainers ends; None if it does not."""
    best = math.inf
    waited = 0
    for number, loss in enumerate(losses, 1):
        waited += 1
        if loss < best - min_delta:
            best = loss
            waited = 0
        if waited >= patience:
            return number
    return None


@pytest.mark.parametrize("patience", [1, 2, 5])
@pytest.mark.parametrize("min_delta", [0.0, 0.2])
def test_the_rule_ends_where_a_loop_with_a_counter_ends(patience: int, min_delta: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        losses = random.normal(size=12).cumsum().round(1).tolist()
        ends = [count for count in range(1, 13) if stops_now(losses[:count], patience, min_delta)]
        assert (ends[0] if ends else None) == stop_by_hand(losses, patience, min_delta)


def test_a_loss_that_is_not_finite_is_no_improvement() -> None:
    assert last_improvement([math.nan, math.inf]) is None
    assert stops_now([math.nan, math.nan], 2)
    assert last_improvement([math.nan, 2.0, math.nan, 1.9], 0.05) == 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("early"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


def run(shards: Path | str, output: Path, options: Options = QUIET, **values: Any) -> Result:
    """A run whose rate is constant, so that its first epochs do not depend on its length."""
    common: dict[str, Any] = {"model": "logistic", "batch_size": 10, "threads": 1, "recipe": "constant"}
    settings = SimulationSettings(
        **{key: values.pop(key) for key in ("compute", "profile", "rows", "workers") if key in values}
    )
    return simulate(make_config(shards, output, **common | values), settings, options)


def stopped(shards: Path, output: Path, options: Options = QUIET, **values: Any) -> Result:
    """A run of at most twelve epochs that ends early."""
    return run(shards, output, options, **{"epochs": 12, "patience": 2, "min_delta": 0.1} | values)


def losses_of(done: Result) -> dict[float, float]:
    """Return the losses without the L2 term, by epoch."""
    return {event.epoch or 0: event.loss_alone() for event in done.events() if isinstance(event, EvaluationEvent)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"protocol": "bsp", "servers": 2},
        {"protocol": "asp"},
        {"protocol": "ssp", "staleness_bound": 2},
        {"protocol": "k-bsp", "k": 1, "stop": "local"},
        {"protocol": "n-softsync", "softsync": 1},
        {"exchange": "all-reduce"},
        {"exchange": "d-psgd", "topology": "ring"},
        {"exchange": "matcha", "topology": "ring"},
        {"exchange": "sync-switch", "fraction": 0.1},
        {"exchange": "strategy-switch", "alpha": 0.1},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_a_stopped_run_is_the_shorter_run(shards: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    done = stopped(shards, tmp_path / "run", **values)
    stop = done.early_stop
    assert stop, "it should have ended early"
    losses = losses_of(done)
    assert stop["epoch"] == stop_by_hand(list(losses.values()), 2, 0.1) == len(losses) < 12
    assert losses[stop["best_epoch"]] == stop["best_loss"]
    assert (done.cause, done.rollbacks, done.converged) == ("finished", 0, False)
    assert done.class_accuracy, "the final model is evaluated by class"
    # A switch comes after a share of the run's length, and a worker with steps of its own ends at that length.
    if not values.keys() & {"fraction", "alpha", "stop"}:
        short = run(shards, tmp_path / "short", epochs=stop["epoch"], **values)
        assert final(done).tobytes() == final(short).tobytes()
        assert done.weights().keys() == short.weights().keys()
    else:
        again = stopped(shards, tmp_path / "again", **values)
        assert final(again).tobytes() == final(done).tobytes()
        assert (again.output / "pushes.csv").read_bytes() == (done.output / "pushes.csv").read_bytes()
    assert stopped(shards, tmp_path / "run", **values).early_stop == stop, "a finished run is not trained again"
    assert replay(done.output).is_equal


class ProcessKilled(BaseException):
    pass


def kill_at(patch: pytest.MonkeyPatch, events: int | None) -> None:
    """Kill the run after a number of events; None: when it has rolled back for its end, before that is logged."""
    handle = Engine._handle
    count = 0

    def counted(engine: Engine, event: Any) -> None:
        nonlocal count
        count += 1
        if count == events:
            raise ProcessKilled
        handle(engine, event)

    def killed(*arguments: Any) -> None:
        raise ProcessKilled

    patch.setattr(Engine, "_handle", counted)
    if events is None:
        patch.setattr(leader, "log_early_stop", killed)


@pytest.mark.slow
@pytest.mark.parametrize("events", [40, 60, None])
def test_a_killed_run_stops_where_it_would_have(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int | None
) -> None:
    calm = stopped(shards, tmp_path / "calm", protocol="bsp")
    with monkeypatch.context() as patched:
        kill_at(patched, events)
        with pytest.raises(ProcessKilled):
            stopped(shards, tmp_path / "run", protocol="bsp")
    again = stopped(shards, tmp_path / "run", RESUME, protocol="bsp")
    assert again.early_stop == calm.early_stop
    assert final(again).tobytes() == final(calm).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["parameter-server", "d-psgd"])
def test_a_resume_with_more_patience_trains_on(shards: Path, tmp_path: Path, exchange: str) -> None:
    values: dict[str, Any] = {"exchange": exchange} | ({"topology": "ring"} if exchange == "d-psgd" else {})
    done = stopped(shards, tmp_path / "run", **values)
    for other in ({"patience": 12}, {"epochs": 13}):
        with pytest.raises(UsageError, match="ended early; --resume continues with another --patience"):
            stopped(shards, tmp_path / "run", **values | other)
    same = stopped(shards, tmp_path / "run", RESUME, epochs=13, **values)
    assert same.early_stop == done.early_stop, "a larger length alone changes nothing"
    assert same.updates == done.updates
    written = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(
        UsageError, match=r"ends early: --workers 3 --batch-size .* need another --patience, or none, too"
    ):
        stopped(shards, tmp_path / "run", RESUME, workers=3, **values)
    assert (tmp_path / "run" / "config.json").read_bytes() == written
    longer = stopped(shards, tmp_path / "run", RESUME, patience=12, **values)
    plain = run(shards, tmp_path / "plain", epochs=12, **values)
    assert longer.early_stop is None
    assert longer.updates == plain.updates > done.updates
    if exchange == "d-psgd":
        assert final(longer).tobytes() == final(plain).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["parameter-server", "d-psgd"])
def test_a_longer_run_stops_where_the_shorter_one_ended(shards: Path, tmp_path: Path, exchange: str) -> None:
    values: dict[str, Any] = {"exchange": exchange} | ({"topology": "ring"} if exchange == "d-psgd" else {})
    whole_run = stopped(shards, tmp_path / "whole", **values)
    assert whole_run.early_stop
    short = stopped(shards, tmp_path / "run", epochs=whole_run.early_stop["epoch"], **values)
    assert short.early_stop is None
    (short.output / "result.json").unlink()  # as if killed before it was written
    again = stopped(shards, tmp_path / "run", RESUME, epochs=whole_run.early_stop["epoch"], **values)
    assert again.updates == short.updates
    longer = stopped(shards, tmp_path / "run", RESUME, **values)
    assert longer.early_stop == whole_run.early_stop
    assert final(longer).tobytes() == final(whole_run).tobytes()
    assert losses_of(longer) == losses_of(whole_run)


@pytest.mark.parametrize(
    "values",
    [
        {"exchange": "sync-switch", "fraction": 0.25},
        {"exchange": "strategy-switch", "alpha": 0.25},
        {"exchange": "strategy-switch", "switch_window": 1, "switch_threshold": 1e6},
    ],
    ids=["fraction", "alpha", "rule"],
)
def test_a_run_that_ends_at_its_switch_does_not_switch(shards: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """The switch would move the parameters by the momentum that it keeps, and the evaluated model would be lost."""
    own: dict[str, Any] = {"epochs": 8, "switch_momentum": "keep"} | values
    done = stopped(shards, tmp_path / "run", **own | {"patience": 1, "min_delta": 9})
    assert done.early_stop, "it should have ended early"
    assert done.early_stop["epoch"] == 2
    assert [stage["protocol"] for stage in done.stages] == ["bsp"]
    assert final(done).tobytes() == final(run(shards, tmp_path / "bsp", protocol="bsp", epochs=2)).tobytes()
    assert replay(done.output).is_equal
    longer = run(shards, tmp_path / "run", RESUME, **own)
    assert [stage["protocol"] for stage in longer.stages] == ["bsp", "asp"]
    assert replay(done.output).is_equal


def test_a_run_that_improves_is_not_stopped(shards: Path, tmp_path: Path) -> None:
    done = run(shards, tmp_path / "run", epochs=3, patience=3)
    plain = run(shards, tmp_path / "plain", epochs=3)
    assert done.early_stop is None
    assert final(done).tobytes() == final(plain).tobytes()
    assert not (tmp_path / "run" / "checkpoints" / "stop.json").exists()


@pytest.mark.slow
def test_the_end_is_told_and_its_checkpoint_kept(shards: Path, tmp_path: Path) -> None:
    done = stopped(shards, tmp_path / "run", Options(silent=True))
    stop = done.early_stop
    assert stop
    root = done.output / "checkpoints"
    assert read_state(root, whole(root)[-1]).final
    assert unlisted(tmp_path / "run", RUNS) == set()
    assert undocumented_below(tmp_path) == {}
    line = f"after epoch {stop['epoch']}: 2 epochs without an improvement of the loss on the evaluation rows (without"
    assert line in ending(vars(done), done.output, None)
    assert line in (tmp_path / "run" / "report.html").read_text()
    assert (root / "stop.json").exists()
    assert [name for name in listing(done.output) if not OWNED.fullmatch(name)] == []  # --overwrite may delete them


def test_a_decision_counts_for_its_options_and_history(shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "run", epochs=2)
    root = tmp_path / "run" / "checkpoints"
    version = whole(root)[-1]
    decision = StopDecision(version, read_state(root, version).generation, 2, 2, 0.05, 1, 1.5)
    write_decision(root, decision)
    assert stop_of(root, CONFIG) == decision
    assert stop_of(root, change(CONFIG, patience=3)) is None
    assert stop_of(root, change(CONFIG, patience=None, min_delta=0.0)) is None
    write_decision(root, replace(decision, version=version + 1))
    assert read_stop(root) is None, "of a checkpoint that is not there"
    (root / "stop.json").write_text('{"version": ')
    assert read_stop(root) is None


def decide_for(root: Path, version: int) -> None:
    """Write the decision of an evaluator that was late."""
    write_decision(root, StopDecision(version, read_state(root, version).generation, 3, 5, 0.0, 1, 1.5))


def test_a_late_decision_is_obeyed_before_workers_change(shards: Path, tmp_path: Path) -> None:
    """The run has gone on after the decision. A resume with its own workers ends it with the checkpoint of the decision."""
    run(shards, tmp_path / "run", epochs=4, patience=5)
    root = tmp_path / "run" / "checkpoints"
    earlier = whole(root)[-2]
    decide_for(root, earlier)
    with pytest.raises(UsageError, match=r"a run that --patience ends early: .*need another --patience, or none, too"):
        run(shards, tmp_path / "run", RESUME, epochs=6, patience=5, workers=3)
    done = run(shards, tmp_path / "run", RESUME, epochs=6, patience=5)
    assert done.early_stop
    assert done.early_stop["epoch"] == 3
    assert whole(root)[-1] == earlier


def test_a_decision_does_not_outlive_its_options(shards: Path, tmp_path: Path) -> None:
    """Otherwise a later resume with the first options would void all that was trained in between."""
    run(shards, tmp_path / "run", epochs=4, patience=5)
    root = tmp_path / "run" / "checkpoints"
    earlier = whole(root)[-2]
    decide_for(root, earlier)
    run(shards, tmp_path / "run", RESUME, epochs=5, patience=6)
    done = run(shards, tmp_path / "run", RESUME, epochs=6, patience=5)
    assert done.early_stop is None
    assert whole(root)[-1] > earlier


def test_a_decision_without_its_checkpoint_ends_no_run(shards: Path, tmp_path: Path) -> None:
    """The run continues from a newer checkpoint, and the evaluator decides again."""
    run(shards, tmp_path / "run", epochs=4, patience=5)
    root = tmp_path / "run" / "checkpoints"
    earlier = whole(root)[-2]
    decide_for(root, earlier)
    [path] = folder_of(root, earlier).glob("slice*")
    path.write_bytes(bytes(path.stat().st_size))
    done = run(shards, tmp_path / "run", RESUME, epochs=6, patience=5)
    assert done.early_stop is None
    assert set(losses_of(done)) == set(range(1, 7))
    assert read_stop(root) is None


@pytest.mark.parametrize("exchange", ["parameter-server", "d-psgd"])
def test_a_checkpoint_damaged_after_its_decision_ends_no_run(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    """The run repeats the epoch from an earlier checkpoint, and ends with it, as a run of that length does."""
    values: dict[str, Any] = {"exchange": exchange, "topology": "ring"} if exchange == "d-psgd" else {"protocol": "bsp"}
    decisions: list[StopDecision] = []

    def decide_and_damage(root: Path, decision: StopDecision) -> None:
        write_decision(root, decision)
        decisions.append(decision)
        if len(decisions) == 1:
            for path in folder_of(root, decision.version).iterdir():
                if path.name != "state.json":
                    path.write_bytes(bytes(path.stat().st_size))

    finish = PeerEngine._finish
    ends: list[tuple[float, float]] = []

    def watched(engine: PeerEngine, worker: int) -> None:
        ends.append((engine.now, engine.peers[worker].step_end))
        finish(engine, worker)

    monkeypatch.setattr(PeerEngine, "_finish", watched)
    monkeypatch.setattr(evaluator, "write_decision", decide_and_damage)
    values["profile"] = parse_profile("lognormal:1")  # the workers are in different rounds
    done = stopped(shards, tmp_path / "run", **values)
    assert len(decisions) == 2
    assert done.early_stop
    assert decisions[0].epoch == decisions[1].epoch == done.early_stop["epoch"] < 12
    short = run(shards, tmp_path / "short", epochs=done.early_stop["epoch"], **values)
    assert final(done).tobytes() == final(short).tobytes()
    assert all(now == end for now, end in ends), "a step that the roll-back has made void did not end"


def test_a_decision_before_other_workers_is_void(shards: Path, tmp_path: Path) -> None:
    """A checkpoint before them may be there still, but a run that goes back to it has other rows."""
    run(shards, tmp_path / "run", epochs=4, patience=5)
    run(shards, tmp_path / "run", RESUME, epochs=6, patience=5, workers=3)
    root = tmp_path / "run" / "checkpoints"
    config = read_record(tmp_path / "run").config
    last = whole(root)[-1]
    decide_for(root, last)
    assert stop_of(root, config)
    for begin in (last, last + 1):
        next_workers = Cohort(2, 10, begin, config.cohorts.present.accepted, ends=(0, 0, 0), turn=9)
        assert stop_of(root, replace(config, cohorts=Cohorts((*config.cohorts.entries, next_workers)))) is None


def test_a_refused_resume_leaves_the_result(shards: Path, tmp_path: Path) -> None:
    """The model of the program has another size than that of the checkpoint."""
    done = run(shards, tmp_path / "run", epochs=1)
    root = tmp_path / "run" / "checkpoints"
    state = read_state(root, whole(root)[-1])
    write_state(folder_of(root, state.version), replace(state, num_buffers=state.num_buffers + 8))
    before = {name: (done.output / name).read_bytes() for name in ("result.json", "config.json")}
    with pytest.raises(
        DataError, match=r"the model or the version of the program has changed; choose another --output"
    ):
        run(shards, tmp_path / "run", RESUME, epochs=2)
    assert {name: (done.output / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"min_delta": 0.1}, "--min-delta 0.1 is for early stopping: give --patience EPOCHS, or leave it out"),
        ({"patience": 2, "epoch_checkpoints": False}, "--patience 2 evaluates every epoch"),
        ({"patience": 0}, "--patience"),
    ],
)
def test_options_without_evaluations_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_config(**values)


def test_early_stopping_needs_evaluation_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--patience 2 reads the loss of evaluations, --compute quadratic has none"):
        run("", tmp_path / "toy", epochs=2, patience=2, compute="quadratic", workers=2, rows=100)
    bare = write_shards(tmp_path / "set", [rows_of(20, 2), rows_of(20, 3, 2000)], None)
    with pytest.raises(UsageError, match="--patience 2 reads the loss on evaluation rows, which the shard set lacks"):
        run(bare, tmp_path / "run", epochs=2, patience=2)
    with pytest.raises(UsageError, match=r"--patience 2 reads the loss of predictions, .*: leave it out, or give no"):
        run(bare, tmp_path / "run", epochs=2, patience=2, evaluation_mode="paper")
