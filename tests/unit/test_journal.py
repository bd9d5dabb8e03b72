"""What server 0 logs of a run, second by second, from a coordinator that does as it is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.coordination.orders import Measured, Record
from trainer.coordination.passes import Passes
from trainer.runlog.journal import Journal


def test_a_speed_is_of_the_time_that_was_trained_not_of_the_wait_for_the_end(tmp_path: Path) -> None:
    coordinator: Any = SimpleNamespace(
        started=True,
        finished=False,
        records=[],
        version=0,
        num_workers=1,
        rate=lambda _: 0.1,
        budget=SimpleNamespace(epoch=0.0, position=SimpleNamespace(accepted=0)),
        members=[SimpleNamespace(clock=0)],
        passes=Passes(1, {}),
    )
    journal = Journal(tmp_path, coordinator, 0, 0.0)

    def push(now: float) -> None:
        coordinator.records = [Record(0, 0, 0, 0, 0, Measured(100, 1.0, 10, 0.1), accepted=True)]
        journal.note(None, now)

    for tick in range(11):  # 1,000 images a second for 1.1 s
        push(tick / 10)
    journal.flush(1.1)
    push(1.2)
    coordinator.finished = True
    push(1.25)
    journal.flush(3.0)  # the rest of the last checkpoint was waited for
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event["images_per_s"] for event in events] == pytest.approx([1000.0, 1000.0])
    assert events[-1]["seconds"] == 1.25
