"""What server 0 logs of a run, second by second, from a coordinator that does as it is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.coordination.orders import Record, StepMeasurements
from trainer.coordination.passes import Passes
from trainer.runlog.journal import Journal


def coordinator_of(num_workers: int) -> Any:
    return SimpleNamespace(
        started=True,
        finished=False,
        records=[],
        version=0,
        num_workers=num_workers,
        rate=lambda _: 0.1,
        budget=SimpleNamespace(epoch=0.0, position=SimpleNamespace(accepted=0)),
        members=[SimpleNamespace(clock=0) for _ in range(num_workers)],
        passes=Passes(num_workers, {}),
    )


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_refused_gradients_count_for_their_workers_alone(tmp_path: Path) -> None:
    """K-BSP with K=1 of 3 workers: one gradient of three makes the update."""
    coordinator = coordinator_of(3)
    journal = Journal(tmp_path, coordinator, 0, 0.0)

    def push(worker: int, staleness: int, loss: float, correct: int, *, accepted: bool) -> Record:
        return Record(1, worker, 0, 0, staleness, StepMeasurements(100, loss, correct, 0.1), accepted=accepted)

    coordinator.records = [
        push(0, 0, 1.0, 10, accepted=True),
        push(1, 5, 9.0, 90, accepted=False),
        push(2, 5, 9.0, 90, accepted=False),
    ]
    journal.note(None, 0.0)
    journal.flush(1.0)
    coordinator.records = [push(1, 5, 9.0, 90, accepted=False)]
    journal.note(None, 1.5)
    journal.flush(2.0)
    names = ("images_per_s", "loss", "accuracy", "staleness_mean", "staleness_max")
    found = [[event[name] for name in names] for event in events_in(tmp_path)]
    assert found == [[100.0, 1.0, 0.1, 0.0, 0], [0.0, None, None, None, None]]
    assert [[worker["index"] for worker in event["workers"]] for event in events_in(tmp_path)] == [[0, 1, 2], [1]]


def test_a_speed_is_of_training_time_without_the_wait_at_the_end(tmp_path: Path) -> None:
    coordinator = coordinator_of(1)
    journal = Journal(tmp_path, coordinator, 0, 0.0)

    def push(now: float) -> None:
        coordinator.records = [Record(0, 0, 0, 0, 0, StepMeasurements(100, 1.0, 10, 0.1), accepted=True)]
        journal.note(None, now)

    for tick in range(11):  # 1,000 images a second for 1.1 s
        push(tick / 10)
    journal.flush(1.1)
    push(1.2)
    coordinator.finished = True
    push(1.25)
    journal.flush(3.0)  # the rest of the last checkpoint was waited for
    events = events_in(tmp_path)
    assert [event["images_per_s"] for event in events] == pytest.approx([1000.0, 1000.0])
    assert events[-1]["seconds"] == 1.25


def test_the_last_part_of_a_second_is_logged_at_the_end(tmp_path: Path) -> None:
    """The process may end at once, and its counter of images is the sum of these events."""
    coordinator = coordinator_of(1)
    journal = Journal(tmp_path, coordinator, 0, 0.0)
    for now in (0.0, 1.1, 1.3):
        coordinator.records = [Record(0, 0, 0, 0, 0, StepMeasurements(100, 1.0, 10, 0.1), accepted=True)]
        coordinator.finished = now == 1.3
        journal.note(None, now)
        journal.flush(now)
    journal.flush(1.31)
    images = [worker["images"] for event in events_in(tmp_path) for worker in event["workers"]]
    assert images == [200, 100]
