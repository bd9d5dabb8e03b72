"""The end of a long run: its log is summed up and drawn in bounded memory, as the whole log would be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.configs import make_config
from tests.support.made_up_run import MadeUpRun, eventful_run
from trainer.report.history import incidents, worker_rows
from trainer.run_files import CONFIG, METRICS, PUSHES, REPORT, RESULT
from trainer.runlog.events import COLUMNS
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent
from trainer.runlog.kinds.training import EpochEvent, TrainEvent
from trainer.runlog.read import read_events, read_pushes, surviving_events
from trainer.runlog.result import REPORTED, summarise
from trainer.runlog.thinned import ThinnedLog, thinned, thinned_log

WORKERS, SECONDS, ROWS, BLOCK = 140, 21_600, 2_500_000, 100_000
MOST_BYTES = 600_000_000
# The largest memory of the child itself: ru_maxrss would be at least that of the process that started it.
CHILD = """
import json, sys
from pathlib import Path
from trainer.config import Config
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.lifecycle.ends import conclude
from trainer.options import Options
from trainer.transport.status import RunStatus

config = Config.from_json(json.loads(Path(sys.argv[1]).read_text()))
home = Folders.from_home(Path(config.run.output))
status = RunStatus(ready=True, finished=True, diverged=None, seconds=21600.0, version=5)
conclude(WorkFolder(home), Options(silent=True), status, "finished")
facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(1024 * int(facts["VmHWM"].split()[0]))
"""


def train(number: int) -> LogEvent:
    workers = [{"index": 0, "clock": number, "images": 10, "step_s": 0.1}]
    measured: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "learning_rate", "images_per_s"), 0.5)
    return TrainEvent(version=number, seconds=float(number), epoch=number / 10, workers=workers, **measured)


@pytest.mark.slow
def test_train_events_are_thinned_evenly_and_all_others_kept() -> None:
    log = [train(number) for number in range(10_000)]
    for number in range(0, 10_000, 500):
        log.insert(number + number // 500, EpochEvent(version=number))
    found = thinned(log)
    kept = [event.version for event in found if isinstance(event, TrainEvent)]
    assert sum(isinstance(event, EpochEvent) for event in found) == 20
    assert (kept[0], kept[-1]) == (0, 9_999)
    assert 1_000 <= len(kept) <= 4_096
    assert kept == sorted(kept)
    assert max(np.diff(kept)) <= 4
    with_workers = [event for event in found if isinstance(event, TrainEvent) and event.workers]
    assert 128 <= len(with_workers) <= 512


def test_many_incidents_do_not_thin_a_log_at_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events before incidents stay, so that thinning again at once would drop nothing."""
    times: list[int] = []
    whole = ThinnedLog._thin

    def count(log: ThinnedLog) -> None:
        times.append(1)
        whole(log)

    monkeypatch.setattr(ThinnedLog, "_thin", count)
    log: list[LogEvent] = []
    for number in range(2_000):
        log += [train(number), RestartEvent(role="worker", index=0)] if number < 500 else [train(number)]
    found = thinned(log, 64)
    assert len(times) < 100
    versions = {event.version for event in found if isinstance(event, TrainEvent)}
    assert versions >= {*range(500), 1_999}
    assert len(versions) <= 500 + 64


def test_a_short_log_is_not_thinned() -> None:
    log = [train(number) for number in range(500)]
    assert thinned(log) == log


def test_exchanges_of_examples_are_not_kept() -> None:
    """Their ids are most of the log of a long run."""
    pool = PoolEvent(version=1, worker=0, round=1, clock=5, first=5)
    assert thinned([train(0), GossipEvent(version=1, round=1, ids={"0": [1, 2]}), pool, train(1)]) == [
        train(0),
        train(1),
    ]


@pytest.mark.slow
def test_a_roll_back_takes_thinned_events_back_as_well() -> None:
    log = [train(number) for number in range(6_000)]
    log.append(RollbackEvent(from_version=5_999, to_version=5_990))
    log += [train(number) for number in range(5_991, 12_000)]
    found = thinned(log)
    kept = [event.version for event in found if isinstance(event, TrainEvent)]
    assert kept == sorted(set(kept))
    [incident] = incidents(found)
    assert incident.seconds == 5_990.0


def test_a_thinned_log_sums_up_to_what_the_whole_one_does(tmp_path: Path) -> None:
    folder = eventful_run().save(tmp_path)
    events, pushes = read_events(folder / METRICS), read_pushes(folder / PUSHES)
    small = read_pushes(folder / PUSHES, REPORTED)
    for most in (16, 4_096):
        found = thinned(read_events(folder / METRICS), most)
        assert summarise(found, small) == summarise(events, pushes)
    assert incidents(found) == incidents(surviving_events(events))
    assert thinned_log(folder / METRICS) == surviving_events(events)
    rows, expected = worker_rows(events, small, 12), worker_rows(events, pushes, 12)
    assert pd.DataFrame(rows).drop(columns="loss").equals(pd.DataFrame(expected).drop(columns="loss"))
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in expected], rtol=1e-6)
    assert small["staleness"].nbytes * 2 == pushes["staleness"].nbytes


@pytest.mark.full
def test_the_end_of_a_long_run_takes_little_memory(tmp_path: Path) -> None:
    """Six hours of 140 workers, with 2.5 * 10^6 gradients: 0.2 GB of events and 0.17 GB of pushes. It takes 0.39 GB."""
    config = make_config("s", tmp_path, epochs=10)
    run = MadeUpRun(num_workers=WORKERS, epochs=10)
    (tmp_path / CONFIG).write_text(json.dumps(config.to_json()))
    write_events(tmp_path / METRICS, run.events[0])
    write_pushes(tmp_path / PUSHES)
    child = [sys.executable, "-c", CHILD, str(tmp_path / CONFIG)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_BYTES
    result = json.loads((tmp_path / RESULT).read_bytes())
    assert (result["updates"], result["examples"]) == (BLOCK, 10 * ROWS)
    assert (result["seconds"], result["cause"]) == (SECONDS, "finished")
    assert (tmp_path / REPORT).stat().st_size > 100_000
    for name in (METRICS, PUSHES):
        (tmp_path / name).unlink()  # pytest keeps the folders of some runs


def write_events(path: Path, start: dict[str, Any]) -> None:
    """A start and a ``train`` event each second, with an entry of each worker."""
    workers = [{"index": w, "clock": 71_000 + w, "images": 120, "step_s": 0.8123} for w in range(WORKERS)]
    about = {"learning_rate": 0.1, "images_per_s": 1234.5, "staleness_mean": 139.0, "staleness_max": 412}
    tail = json.dumps({**about, "workers": workers})[1:]
    with open(path, "w") as file:
        file.write(json.dumps(start) + "\n")
        for second in range(1, SECONDS + 1):
            where = {"event": "train", "time": 1e9 + second, "version": second, "seconds": float(second)}
            where |= {"accepted": second, "epoch": second / 2_160, "loss": 1.0, "accuracy": 0.5}
            file.write(json.dumps(where)[:-1] + ", " + tail + "\n")


def write_pushes(path: Path) -> None:
    """The same rows again and again."""
    rng, number = np.random.default_rng(0), np.arange(BLOCK)
    block = pd.DataFrame(
        {
            "generation": 1_700_000_000_000_000,
            "version": number + 1,
            "worker": number % WORKERS,
            "clock": number // WORKERS,
            "version_pulled": np.maximum(0, number - 139),
            "staleness": rng.poisson(139, BLOCK),
            "examples": 10,
            "loss": rng.random(BLOCK).round(6),
            "correct": 5,
            "seconds": (number * (SECONDS / BLOCK)).round(3),
            "accepted": 1,
            "step_s": 0.8123,
            "read_s": 0.0001,
        }
    )
    assert list(block.columns) == COLUMNS.split(",")
    data = block.to_csv(index=False, header=False).encode()
    with open(path, "wb") as file:
        file.write(f"{COLUMNS}\n".encode())
        for _ in range(ROWS // BLOCK):
            file.write(data)
