"""The records that a supervisor keeps of a run: its progress, trouble with its disk, and its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import JobError
from tests.support.configs import make_config
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import mark_evaluated, write_model, write_state
from trainer.config import RunFacts
from trainer.home.folders import Folders
from trainer.launch.disk_watch import SPACE_WAIT_S, DiskWatch
from trainer.launch.end_watch import FAR_LOOK_S, EndWatch
from trainer.launch.role_progress import RoleProgress
from trainer.options import Role
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.training import TrainEvent

FACTS = RunFacts(2, 100, 10, 0)
TRAIN = TrainEvent(
    version=1, loss=None, accuracy=None, seconds=1.0, epoch=0.1, learning_rate=None, images_per_s=None, workers=[]
)
STATE = RunState(4, 4, 48, 1, 0.5, None, False, {0: 2, 1: 2}, 1.0, 1, 10, 0, "")


def save(root: Path, state: RunState) -> None:
    folder, zeros = folder_of(root, state.version), np.zeros(10, np.float32)
    write_model(folder, state.version, zeros, zeros, state.generation)
    write_state(folder, state)


def test_a_worker_is_judged_by_its_own_clock(tmp_path: Path) -> None:
    progress = RoleProgress(tmp_path)
    for clock in (3, 2):  # the second one after a roll-back
        progress.note(replace(TRAIN, workers=[{"index": 0, "clock": clock}]))
    progress.reach(7)
    progress.reach(6)
    roles = (Role("worker", 0), Role("worker", 1), Role("server", 0))
    assert [progress.measure(role) for role in roles] == [3, -1, 7]


def test_marks_and_events_count_for_the_evaluator(tmp_path: Path) -> None:
    """Count the marks too: without evaluation rows, there are no events."""
    progress = RoleProgress(tmp_path)
    assert progress.measure(Role("evaluator")) == -1
    for version in (4, 8):
        save(tmp_path, replace(STATE, version=version))
    mark_evaluated(tmp_path, replace(STATE, version=4))
    assert progress.measure(Role("evaluator")) == 4
    progress.note(EvaluationEvent(time=0.0, version=6, epoch=1.0, loss=0.5, accuracy=0.9))
    assert progress.measure(Role("evaluator")) == 6
    assert progress.evaluation == {"eval_accuracy": 0.9, "eval_loss": 0.5, "eval_epoch": 1.0}


def test_trouble_in_training_is_reported_once_for_each_text(tmp_path: Path) -> None:
    lines: list[str] = []
    disk = DiskWatch(Folders.from_home(tmp_path), lines.append)
    for trouble in (None, "a", "a", "b", None, "b"):
        disk.note_training(trouble)
    assert [line[0] for line in lines] == ["a", "b", "b"]


def test_a_trained_run_waits_for_space_and_then_ends(tmp_path: Path) -> None:
    lines: list[str] = []
    save(tmp_path / "checkpoints", STATE)
    disk = DiskWatch(Folders.from_home(tmp_path), lines.append)
    disk.note_trained("No space left on device", 10.0)
    disk.note_trained(None, 11.0)  # space has come and gone: the wait begins again
    assert not disk.is_stuck
    disk.note_trained("No space left on device", 12.0)
    disk.note_trained("No space left on device", 12.0 + SPACE_WAIT_S)
    assert disk.is_stuck
    assert len(lines) == 2
    assert f"waiting for space on {tmp_path}" in lines[0]
    with pytest.raises(JobError, match=r"30 minutes after its end No space .* at version 4 .*--resume"):
        disk.note_trained("No space left on device", 13.0 + SPACE_WAIT_S)
    disk.stop_waiting()
    assert not disk.is_stuck


@pytest.mark.parametrize(
    ("accepted", "final", "converged_steps", "has_ended"),
    [  # of 2 workers with 8 steps each
        (16, True, None, True),
        (16, False, None, False),
        (14, True, None, False),
        (4, True, 8, True),
        (4, False, 8, False),
        (4, True, 6, False),
    ],
)
def test_the_final_checkpoint_of_the_present_length_ends_a_run(
    tmp_path: Path, accepted: int, final: bool, converged_steps: int | None, has_ended: bool
) -> None:
    watch = EndWatch(make_config(steps=8, batch_size=12), FACTS, Folders.from_home(tmp_path))
    assert not watch.has_ended(1.0), "it has no checkpoint"
    save(tmp_path / "checkpoints", replace(STATE, accepted=accepted, final=final, converged_steps=converged_steps))
    assert watch.has_ended(1.0) == has_ended


def test_with_own_lengths_the_last_worker_ends_a_run(tmp_path: Path) -> None:
    watch = EndWatch(make_config(steps=8, batch_size=12, stop="local"), FACTS, Folders.from_home(tmp_path))
    for clock, has_ended in ((7, False), (8, True)):
        save(tmp_path / "checkpoints", replace(STATE, final=True, clocks={0: 8, 1: clock}))
        assert watch.has_ended(1.0) == has_ended


def test_a_remote_home_is_read_rarely(tmp_path: Path) -> None:
    """Look once per FAR_LOOK_S for an end that is there all the time."""
    (tmp_path / "work").mkdir()
    folders = Folders(tmp_path, tmp_path / "work", source="0")
    assert not folders.is_local
    save(tmp_path / "checkpoints", replace(STATE, accepted=16, final=True))
    watch = EndWatch(make_config(steps=8, batch_size=12), FACTS, folders)
    looks = [watch.has_ended(FAR_LOOK_S * quarter / 4) for quarter in range(4, 13)]
    assert looks == [True, False, False, False, True, False, False, False, True]
