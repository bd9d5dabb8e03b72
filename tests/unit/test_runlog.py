"""What the log of a run is read back and summed up to."""

from __future__ import annotations

import io
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from tests.support.configs import make_config
from tests.support.full_disk import limited_files
from trainer.coordination.orders import Record, StepMeasurements
from trainer.home import place
from trainer.home.place import append_lines, blocks
from trainer.leader.status import with_log
from trainer.options import Options
from trainer.report.terminal import ending
from trainer.run_files import METRICS, PUSHES
from trainer.runlog import read
from trainer.runlog.events import COLUMNS, log_event, log_pushes, write_refused_lines
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.parse import event_from_json
from trainer.runlog.kinds.run import ConvergedEvent, EndEvent, GenerationEvent, RestartEvent, RollbackEvent, StartEvent
from trainer.runlog.kinds.training import EpochEvent, PassEvent
from trainer.runlog.lines import RefusedLines
from trainer.runlog.read import best, read_events, read_pushes, surviving_events
from trainer.runlog.result import summarise
from trainer.simulate import simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.options import SimulationSettings
from trainer.simulation.profiles import parse_profile
from trainer.transport.status import RunStatus


def test_events_are_read_in_order_and_torn_lines_cost_no_whole_one(tmp_path: Path) -> None:
    log = tmp_path / METRICS
    assert read_events(log) == []
    log.write_bytes(
        b'{"event": "start", "time": 1}\n'
        b'\n{"event": "train", "ti{"event": "eval", "version": 3}\n'
        b'{"event": "tr\xff\n'
        b"[1]\n3\n"
        b'{"event": "end", "time": 2}\n{"event": "late'
    )
    assert read_events(log) == [StartEvent(time=1), EvaluationEvent(version=3), EndEvent(time=2)]


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_event(tmp_path, "epoch", epoch=1)
    size = (tmp_path / METRICS).stat().st_size
    with limited_files(2 * size + 9):
        for epoch in (2, 3, 4):
            log_event(tmp_path, "epoch", epoch=epoch)
        with pytest.raises(OSError, match=METRICS):
            write_refused_lines(tmp_path)
    assert logged_epochs(tmp_path) == [1, 2]
    write_refused_lines(tmp_path)
    assert logged_epochs(tmp_path) == [1, 2, 3, 4]
    log_event(tmp_path, "epoch", epoch=5)
    assert logged_epochs(tmp_path) == [1, 2, 3, 4, 5]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 5  # a line that was cut off is taken back
    assert [message.partition(": ")[0] for message in caplog.messages] == [f"{tmp_path / METRICS} was not written"]


def test_a_run_is_finished_only_with_its_whole_log(tmp_path: Path) -> None:
    status = RunStatus(ready=True, finished=True, diverged=None)
    assert with_log(status, tmp_path) == status
    with limited_files(9):
        log_event(tmp_path, "epoch", epoch=1)
        waiting = with_log(status, tmp_path)
    assert not waiting.finished
    assert str(waiting.trouble).startswith("the log was not written: ")
    assert with_log(status, tmp_path) == status
    assert logged_epochs(tmp_path) == [1]


def logged_epochs(folder: Path) -> list[float | None]:
    return [event.epoch for event in read_events(folder / METRICS) if isinstance(event, EpochEvent)]


def test_a_refused_header_of_the_pushes_stays_the_first_line(tmp_path: Path) -> None:
    pushes = [(0.5, Record(step, 0, step, step, 0, StepMeasurements(8, 1.5, 4, 0.01), True)) for step in range(3)]
    with limited_files(20):
        log_pushes(tmp_path, 1, pushes[:1])
        log_pushes(tmp_path, 1, pushes[1:2])
    log_pushes(tmp_path, 1, pushes[2:])
    lines = (tmp_path / PUSHES).read_text().splitlines()
    assert lines[0] == COLUMNS
    assert [line.split(",")[1] for line in lines[1:]] == ["0", "1", "2"]


def test_a_cut_off_line_stays_if_another_process_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut-off line cannot be taken back then. It is repeated, behind the other process's line."""
    path = tmp_path / METRICS

    class SharedFile(io.FileIO):
        """A file on a disk with room for nine bytes, to which another process appends at once."""

        def write(self, lines: Any) -> int:
            written = super().write(lines[:9])
            super().write(b"\nother\n")
            return written

    with monkeypatch.context() as patch:
        patch.setattr(place, "open", lambda number, *_, **__: SharedFile(number, "ab"), raising=False)
        rest = append_lines(path, b"first\nsecond\n")
    assert rest == b"second\n"
    assert append_lines(path, rest) == b""
    assert path.read_bytes() == b"first\nsec\nother\nsecond\n"


def test_lines_beyond_the_memory_for_them_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = RefusedLines(max_bytes=12)
    path = tmp_path / "away" / METRICS
    for number in range(4):
        refused.append(path, b"line%d\n" % number)
    assert [message.partition(": ")[2] for message in caplog.messages][1:] == ["lines of the log are lost from now on"]
    path.parent.mkdir()
    refused.append(path, b"line4\n")
    assert path.read_bytes() == b"line0\nline1\nline4\n"


def test_going_back_voids_what_came_after() -> None:
    log: list[LogEvent] = [
        StartEvent(),
        EvaluationEvent(version=10),
        EpochEvent(version=12),
        RestartEvent(role="server", index=0),
        RollbackEvent(from_version=12, to_version=10),
        EvaluationEvent(version=20),
        EndEvent(cause="interrupted"),
        StartEvent(resumed_from=15),
        EvaluationEvent(version=20, accuracy=1),
    ]
    assert surviving_events(log) == [log[i] for i in (0, 1, 3, 4, 6, 7, 8)]
    assert surviving_events([log[1], StartEvent()]) == [StartEvent()]


def test_late_events_of_a_discarded_history_do_not_count() -> None:
    log: list[LogEvent] = [
        GenerationEvent(generation=5, version=0),
        EvaluationEvent(generation=5, version=10),
        GenerationEvent(generation=8, version=10),
        EvaluationEvent(generation=5, version=20),
        EvaluationEvent(generation=5, version=10),
        GenerationEvent(generation=9, version=30),
        EvaluationEvent(generation=5, version=20),
        EvaluationEvent(generation=8, version=20),
    ]
    assert surviving_events(log) == [log[i] for i in (0, 1, 2, 4, 5, 7)]


def test_the_best_evaluation_is_the_earliest_of_equals() -> None:
    evaluated = [EvaluationEvent(version=v, accuracy=a) for v, a in ((1, 0.5), (2, None), (3, 0.75), (4, 0.75))]
    assert best(evaluated) == evaluated[2]
    assert best([]) is None


def test_without_an_accuracy_the_lowest_loss_is_best() -> None:
    """Logs of older versions have accuracy 0 for real targets; a resumed run has both."""
    losses = (3.0, 1.0, None, float("nan"), 1.0, 2.0)
    for accuracy in (None, 0.0):
        evaluated = [EvaluationEvent(version=v, accuracy=accuracy, loss=loss) for v, loss in enumerate(losses)]
        assert best(evaluated) == evaluated[1]
    mixed = [EvaluationEvent(version=1, accuracy=0.0, loss=1.0), EvaluationEvent(version=2, accuracy=None, loss=0.5)]
    assert best(mixed) == mixed[1]


def test_a_run_on_real_targets_is_told_by_its_losses() -> None:
    losses = {1: 2.0, 2: 0.5, 3: 1.0}
    log = [EvaluationEvent(version=v, epoch=v, loss=loss) for v, loss in losses.items()]
    result = summarise(log, pushes_of([(1, 0, 0, 1)]))
    assert (result["best_loss"], result["best_epoch"], result["final_loss"]) == (0.5, 2.0, 1.0)
    assert (result["best_accuracy"], result["final_accuracy"]) == (None, None)
    assert "loss  1.0000, best 0.5000" in ending(result, Path("run"), None)
    nothing = ending(summarise([], pushes_of([])), Path("run"), None)
    assert "not evaluated" in nothing


updates = st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8)  # (accepted pushes, whether one is refused)
histories = st.lists(st.tuples(st.integers(0, 30), st.booleans(), updates))  # (back to, refused at once, updates)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(histories)
def test_pushes_that_a_rollback_took_away_are_dropped(
    tmp_path_factory: pytest.TempPathFactory, generations: Any
) -> None:
    """Against a history kept as it happens: a list that is cut at every roll-back."""
    lines, kept, version = [COLUMNS], [], 0
    clocks = itertools.count()  # a refused gradient that is computed again has a test of its own
    for generation, (back, refused_at_once, updates) in enumerate(generations):
        version = min(version, back)
        went_back = False
        rows = [(generation, version, 9, next(clocks), 0, 0, 10, 0.5, 3, 1.5, 0, 0.05, 0.001)] * refused_at_once
        kept += rows
        lines += [",".join(map(str, row)) for row in rows]
        for pushes, refused in updates:
            if not went_back:  # it shows in the file with the first push that was accepted
                kept = [row for row in kept if row[1] <= version]
                went_back = True
            version += 1
            rows = [(generation, version, w, 5, 0, 0, 10, 0.5, 3, 1.5, 1, 0.05, 0.001) for w in range(pushes)]
            rows += [(generation, version, 9, next(clocks), 0, 0, 10, 0.5, 3, 1.5, 0, 0.05, 0.001)] * refused
            kept += rows
            lines += [",".join(map(str, row)) for row in rows]
    path = tmp_path_factory.mktemp("pushes") / "pushes.csv"
    path.write_text("\n".join(lines) + "\n")
    found = read_pushes(path)
    assert [tuple(row) for row in found.itertuples(index=False)] == kept


def test_pushes_cut_off_by_a_crash_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pushes.csv"
    good = "0,1,0,0,0,0,10,nan,3,1.5,1,0.05,0.001"
    path.write_text(
        f"{COLUMNS}\n{good}\n0,2,1,0,0,2{good}\n0,2,1,0,x,2,10,0.5,3,2.5,1\n{good}\n0,3,1,0,0,2,10,0.5,3,2."
    )
    found = read_pushes(path)
    assert len(found) == 2
    assert found["loss"].isna().all()
    assert caplog.messages == [f"{path}: 2 damaged rows are left out of its 4"], "the cut-off end is none"
    read_pushes(path)
    assert len(caplog.messages) == 1, "once"
    assert read_pushes(tmp_path / "absent").columns.tolist() == COLUMNS.split(",")
    assert summarise([], read_pushes(tmp_path / "absent"))["updates"] == 0
    path.write_text("")
    assert len(read_pushes(path)) == 0


PUSH = (7, 1, 2, 3, 0, 0, 10, 0.5, 4, 1.5, 1, 0.05, 0.001)


def test_a_cut_off_generation_before_a_row_voids_no_push(tmp_path: Path) -> None:
    """An earlier version appended a row to the digits that a full disk had left of the row before."""
    path = tmp_path / "pushes.csv"
    rows = [f"1796000000000000,{version},0,0,0,0,10,0.5,3,1.5,1,0.05,0.001" for version in (1, 2, 3)]
    path.write_text(f"{COLUMNS}\n{rows[0]}\n17{rows[1]}\n{rows[2]}\n")
    assert read_pushes(path)["version"].tolist() == [1, 3]


def test_pushes_are_read_by_their_header(tmp_path: Path) -> None:
    path, names = tmp_path / "pushes.csv", COLUMNS.split(",")
    values = dict(zip(names, PUSH, strict=True)) | {"new": "text"}
    shuffled = sorted(values.keys() - {"step_s", "read_s"})
    path.write_text(",".join(shuffled) + "\n" + ",".join(str(values[name]) for name in shuffled) + "\n")
    found = read_pushes(path)
    assert found.columns.tolist() == names
    assert found.iloc[0, :-2].tolist() == list(PUSH[:-2])
    assert found[["step_s", "read_s"]].isna().all(axis=None)
    assert read_pushes(path, ["clock", "step_s"])["clock"].tolist() == [3]
    path.write_text("worker,version\n1,2\n")
    with pytest.raises(DataError, match=r"pushes\.csv has no column generation"):
        read_pushes(path)


@pytest.mark.parametrize("header", ["", "generation,version,wor", "generation,vers7,1,2\n"])
def test_pushes_without_their_header_are_read_by_position(tmp_path: Path, header: str) -> None:
    path, row = tmp_path / "pushes.csv", ",".join(map(str, PUSH)) + "\n"
    path.write_text((header + "\n" if header and not header.endswith("\n") else header) + row)
    assert [tuple(found) for found in read_pushes(path).itertuples(index=False)] == [PUSH]


@pytest.mark.slow
def test_blocks_of_pushes_are_read_as_the_whole_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may begin with a damaged row, which is longer than the others."""
    path = tmp_path / "pushes.csv"
    rows = [f"{7 + at // 40},{at},2,3,0,0,10,0.5,4,1.5,1,0.05,0.001" for at in range(100)]
    rows[50] += ",1,2,3"
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    whole = read_pushes(path)
    assert whole["version"].tolist() == [at for at in range(100) if at != 50]
    for size in (1, 60, 61, 1000):
        monkeypatch.setattr(read, "blocks", partial(blocks, size=size))
        pd.testing.assert_frame_equal(read_pushes(path), whole)


def test_pushes_of_a_generation_that_was_left_do_not_count(tmp_path: Path) -> None:
    """Though the one after it has accepted none yet, and its own events are those of other times."""
    path = tmp_path / "pushes.csv"
    rows = [(7, version, *PUSH[2:]) for version in range(1, 6)] + [(9, 3, *PUSH[2:10], 0, *PUSH[11:])]
    path.write_text("\n".join([COLUMNS, *(",".join(map(str, row)) for row in rows)]) + "\n")
    assert len(read_pushes(path)) == 6, "nothing tells"
    for generation, version in ((7, 0), (8, 4), (9, 3)):
        log_event(tmp_path, "generation", generation=generation, version=version)
    found = read_pushes(path)
    assert list(zip(found["generation"], found["version"], strict=True)) == [(7, 1), (7, 2), (7, 3), (9, 3)]


def test_gradients_refused_after_a_checkpoint_count_once(tmp_path: Path) -> None:
    """They have the version of the checkpoint, to which the run goes back, as those that were refused before it have."""
    toy: dict[str, Any] = {"model": "resnet20", "protocol": "k-bsp", "k": 1, "batch_size": 40, "steps": 12}
    machines: dict[str, Any] = {
        "compute": "quadratic",
        "workers": 4,
        "rows": 200,
        "profile": parse_profile("lognormal:0.5"),
    }
    machines |= {"failures": parse_failures("server@1.6+0.5")}
    result = simulate(
        make_config("", tmp_path, **toy), SimulationSettings(**machines), Options(silent=True, report=False)
    )
    pushes = result.pushes()
    assert not pushes.duplicated(["worker", "clock"]).any()
    assert len(pushes) == 4 * 12 * 3, "every step of a worker, used or refused"
    assert result.rejected == (pushes["accepted"] == 0).sum() == 96


def test_the_end_of_an_epoch_is_logged_without_its_checkpoint(tmp_path: Path) -> None:
    machines = SimulationSettings(compute="quadratic", workers=4, rows=200)
    found = []
    for keeps in (True, False):
        config = make_config(
            "", tmp_path / str(keeps), protocol="bsp", batch_size=40, steps=12, epoch_checkpoints=keeps
        )
        result = simulate(config, machines, Options(silent=True, report=False))
        epochs = [event for event in result.events() if isinstance(event, EpochEvent)]
        assert [event.epoch for event in epochs] == [1, 2]
        found.append(([(event.version, event.loss) for event in epochs], result.running_train_loss))
    assert found[0] == found[1]


def test_passes_that_end_again_count_once() -> None:
    log: list[LogEvent] = [
        GenerationEvent(generation=0, version=0),
        PassEvent(first=1, last=1, version=3, fingerprint="a", expected="a"),
        PassEvent(first=2, last=3, version=5, fingerprint="a", expected="a"),
        GenerationEvent(generation=1, version=5),
        PassEvent(first=2, last=2, version=5, fingerprint="a", expected="a"),
        PassEvent(first=3, last=3, version=6, fingerprint="a", expected="a"),
    ]
    assert surviving_events(log) == [log[i] for i in (0, 1, 3, 4, 5)]


def pushes_of(rows: list[tuple[int, int, int, int]]) -> pd.DataFrame:
    """(version, worker, staleness, accepted) of ten examples each."""
    columns = COLUMNS.split(",")
    return pd.DataFrame([(0, v, w, v, 0, s, 10, 0.5, 3, 1.5, a, 0.05, 0.001) for v, w, s, a in rows], columns=columns)


def test_a_run_is_summed_up() -> None:
    log: list[dict[str, Any]] = [
        {
            "event": "start",
            "config": make_config(model="cnn", seed=4, servers=2).to_json(),
            "plan": {"num_workers": 3},
        },
        {"event": "epoch", "epoch": 1, "version": 2, "loss": 1.5, "accuracy": 0.25, "seconds": 1.0},
        {"event": "eval", "version": 2, "epoch": 1, "loss": 1.0, "accuracy": 0.75, "seconds": 1.0, "train_loss": 0.5},
        {"event": "restart", "role": "worker", "index": 1},
        {"event": "restart", "role": "worker", "index": 1},
        {"event": "restart", "role": "evaluator", "index": 0},
        {"event": "rollback", "from_version": 3, "to_version": 2},
        {"event": "epoch", "epoch": 2, "version": 4, "loss": 0.75, "accuracy": 0.5, "seconds": 2.0},
        {"event": "end", "cause": "finished", "seconds": 4.0, "updates": 4},
        {
            "event": "eval",
            "version": 4,
            "epoch": 2,
            "loss": None,
            "accuracy": 0.5,
            "seconds": 2.0,
            "train_accuracy": 1.0,
            "class_rows": [4, 0],
            "class_correct": [3, 0],
            "neighbourhood_rows": [1, 0, 3],
            "neighbourhood_correct": [0, 0, 3],
            "class_names": ["cat", "dog"],
            "confusion": [[3, 1], [0, 0]],
        },
    ]
    pushes = pushes_of([(1, 0, 0, 1), (2, 1, 1, 1), (2, 2, 9, 0), (3, 0, 1, 1), (4, 2, 2, 1)])
    assert summarise(list(map(event_from_json, log)), pushes) == {
        "protocol": "asp",
        "model": "cnn",
        "seed": 4,
        "num_workers": 3,
        "num_servers": 2,
        "stages": [{"exchange": "parameter-server", "protocol": "asp", "first_epoch": 0, "reason": "start of the run"}],
        "converged": False,
        "cause": "finished",
        "updates": 4,
        "examples": 40,
        "seconds": 4.0,
        "images_per_second": 10.0,
        "final_accuracy": 0.5,
        "final_loss": None,
        "class_accuracy": [0.75, None],
        "class_rows": [4, 0],
        "class_names": ["cat", "dog"],
        "weakest_accuracy": 0.75,
        "neighbourhood_accuracy": [0.0, None, 1.0],
        "neighbourhood_rows": [1, 0, 3],
        "weakest_neighbourhoods_accuracy": 0.0,
        "confusion": [[3, 1], [0, 0]],
        "best_accuracy": 0.75,
        "best_loss": 1.0,
        "best_epoch": 1.0,
        "train_accuracy": 1.0,
        "train_loss": None,
        "learned": None,
        "running_train_accuracy": 0.5,
        "running_train_loss": 0.75,
        "staleness": {"mean": 1.0, "max": 2, "histogram": {"0": 1, "1": 2, "2": 1}},
        "rejected": 1,
        "passes": {"whole": 0, "true": 0, "fingerprint": None, "expected": None},
        "restarts": {"worker": 2, "server": 0, "evaluator": 1},
        "rollbacks": 1,
        "evaluations_given_up": 0,
        "early_stop": None,
        "mixture": None,
        "simulated": None,
        "error": None,
    }


@pytest.mark.parametrize("name", ["version", "updates"])
def test_an_end_that_was_taken_back_does_not_count(name: str) -> None:
    """A failed run says how long it trained beyond its last checkpoint; ``updates``: as older versions said it."""
    log: list[dict[str, Any]] = [
        {"event": "start", "config": {}, "plan": None},
        {"event": "end", "cause": "failed", "seconds": 50.0, name: 5},
        {"event": "start", "config": {}, "plan": None, "resumed_from": 3},
        {"event": "end", "cause": "finished", "seconds": 40.0, name: 4},
    ]
    assert summarise(list(map(event_from_json, log)), pushes_of([(1, 0, 0, 1)]))["seconds"] == 40.0


@pytest.mark.parametrize(("version", "converged"), [(2, False), (4, True), (5, True), (None, True)])
def test_a_run_resumed_after_its_convergence_has_not_converged(version: int | None, converged: bool) -> None:
    """A log that lacks the last pushes, and one of an earlier version, have no later updates."""
    log = [
        StartEvent(),
        ConvergedEvent(version=version),
        StartEvent(resumed_from=5),
        EndEvent(cause="finished", updates=4),
    ]
    assert summarise(log, pushes_of([(2, 0, 0, 1), (4, 0, 0, 1), (5, 0, 0, 0)]))["converged"] is converged


def test_a_run_that_was_resumed_has_not_ended_by_its_earlier_end() -> None:
    log: list[dict[str, Any]] = [
        {"event": "start", "config": {}, "plan": None},
        {"event": "end", "cause": "interrupted", "seconds": 1.0},
        {"event": "start", "config": {}, "plan": None, "resumed_from": 3},
        {"event": "epoch", "version": 4, "seconds": 2.0},
    ]
    assert summarise(list(map(event_from_json, log)), pushes_of([(1, 0, 0, 1)]))["cause"] is None


def test_a_run_of_which_nothing_was_measured_is_summed_up_without_nan() -> None:
    text = json.dumps(summarise([], pushes_of([])), allow_nan=False)
    assert json.loads(text)["staleness"] == {"mean": None, "max": None, "histogram": {}}


def test_the_weakest_tenth_is_of_whole_classes_by_their_rows() -> None:
    """A tenth of the 20 classes that have rows is two classes, weighed by their rows."""
    rows = [0, 30, 10, *[10] * 18]
    correct = [0, 6, 4, *range(5, 11), *[10] * 12]
    event = {"event": "eval", "version": 1, "epoch": 1, "loss": 1.0, "accuracy": 0.5, "seconds": 1.0}
    log = [event_from_json(event | {"class_rows": rows, "class_correct": correct})]
    summary = summarise(log, pushes_of([]))
    assert summary["weakest_accuracy"] == (6 + 4) / (30 + 10)
    # As in the log of a set without a model, or of an older version.
    neighbourhoods = ("neighbourhood_accuracy", "neighbourhood_rows", "weakest_neighbourhoods_accuracy")
    assert [summary[key] for key in neighbourhoods] == [None] * 3
