"""Exchanges among neighbours on real processes: the bits of virtual time, through interruptions; lost workers return."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.configs import make_config
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import RunFolder, Training, train_here, until
from trainer import Options, Result
from trainer.checkpoints.read import newest, read_state
from trainer.checkpoints.state import folder_of
from trainer.runlog.run_record import read_record
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings
from trainer.simulation.replay import replay

VALUES: dict[str, Any] = {"batch_size": 24, "learning_rate": 0.02, "threads": 1, "device": "cpu"}
Start = Callable[..., Training]


@pytest.fixture
def start(sets: dict[int, Path], tmp_path: Path) -> Iterator[Start]:
    """Starts a run of four workers as a command does, in one folder."""
    started: list[Training] = []

    def begin(*flags: object) -> Training:
        started.append(Training(sets[4], tmp_path / "run", *common(), *flags))
        return started[-1]

    yield begin
    for run in started:
        run.end()


def common() -> tuple[object, ...]:
    return (*flags_of(VALUES), "--no-report", "--quiet")


def flags_of(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def virtual_end(shards: Path, output: Path, workers: int | None = None, **values: Any) -> Result:
    """The end in virtual time; with workers a run in the folder resumes with them."""
    config = make_config(shards, output, protocol="bsp", **VALUES | values)
    options = Options(silent=True, report=False, resume=workers is not None)
    return simulate(config, SimulationSettings(workers=workers), options)


def weights(output: Any) -> bytes:
    return bytes((Path(output) / "model.safetensors").read_bytes())


def consensus(run: RunFolder) -> list[tuple[Any, ...]]:
    return [
        tuple(event[key] for key in ("epoch", "distance", "sent_bytes", "replicas"))
        for event in run.events("consensus")
    ]


def test_real_processes_have_virtual_times_bits(sets: dict[int, Path], tmp_path: Path) -> None:
    values: dict[str, Any] = {"exchange": "matcha", "model": "cnn", "epochs": 2, "every": 2, "order": "grad-then-avg"}
    done = virtual_end(sets[4], tmp_path / "virtual", **values)
    run = train_here(sets[4], tmp_path / "run", *flags_of(VALUES | values), "--quiet")
    assert weights(tmp_path / "run") == weights(done.output)
    assert consensus(run) == consensus(RunFolder(tmp_path / "virtual"))
    columns = ["version", "worker", "clock", "version_pulled", "staleness", "examples", "loss", "correct", "accepted"]
    virtual_pushes = RunFolder(tmp_path / "virtual").pushes()
    assert run.pushes()[columns].equals(virtual_pushes[columns])
    assert "Distance of the models" in (tmp_path / "run" / "report.html").read_text()
    assert replay(tmp_path / "run").is_equal


SLOW_CNN = """
import time
from pathlib import Path
from trainer.models.networks.cnn import ConvNet

class SlowCNN(ConvNet):
    def forward(self, images):
        if Path(__file__).with_name("slow").exists():
            time.sleep(0.1)
        return super().forward(images)

def build(image_shape, num_classes):
    return SlowCNN(image_shape, num_classes)
"""


@pytest.fixture
def slow_cnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A --model whose steps are slow while there is a file ``slow``. No two tests have modules of the same name."""
    module = re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{module}.py").write_text(SLOW_CNN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "slow").touch()
    return f"{module}:build"


@pytest.mark.full
def test_a_run_resumes_with_other_workers(sets: dict[int, Path], tmp_path: Path, start: Start, slow_cnn: str) -> None:
    """Compare the bits with those of the same change in virtual time. After another change, kill a worker."""
    # The length of a run does not change the rate, so that the first part in virtual time may be shorter.
    values: dict[str, Any] = {"exchange": "matcha", "model": slow_cnn, "recipe": "constant"}
    flags = (*flags_of(values), "--checkpoint-every-s", 0.3, "--no-epoch-checkpoints")
    first = start(*flags, "--steps", 60)
    until(lambda: newest(first.output / "checkpoints"), "a checkpoint")
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 1, first.said()
    version = newest(first.output / "checkpoints")
    assert version
    assert version < 60
    (tmp_path / "slow").unlink()
    second = train_here(sets[4], first.output, *common(), *flags, "--steps", 60, "--resume", "--workers", 6)
    virtual_end(sets[4], tmp_path / "virtual", **values, steps=version)
    expected = virtual_end(sets[4], tmp_path / "virtual", workers=6, **values, steps=60)
    assert weights(second.output) == weights(expected.output)
    assert consensus(second) == consensus(RunFolder(tmp_path / "virtual"))
    assert replay(second.output).is_equal
    assert all(event["fingerprint"] == event["expected"] for event in second.events("pass"))
    (tmp_path / "slow").touch()
    third = start(*flags, "--steps", 120, "--resume", "--workers", 3)
    third.wait_for_updates(65)
    third.send("worker-1")
    until(lambda: third.events("newcomer"), "it takes part again")
    (tmp_path / "slow").unlink()
    assert third.wait() == 0, third.said()
    result = third.result()
    assert (result["cause"], result["updates"], result["rollbacks"]) == ("finished", 120, 0)
    assert result["restarts"]["worker"] == 1
    cohorts = read_record(third.output).config.cohorts.entries
    assert [(each.workers, each.version) for each in cohorts] == [(4, 0), (6, version), (3, 60)]
    assert replay(third.output).is_equal


@pytest.mark.full
def test_the_others_go_on_without_a_frozen_worker(start: Start) -> None:
    """It is replaced, and trains to the end with the others. The run never rolls back."""
    steps = 800
    run = start("--exchange", "d-psgd", *SLOW, "--steps", steps)
    run.wait_for_updates(50)
    run.send("worker-1", signal.SIGSTOP)
    assert run.wait() == 0, run.said()
    result = run.result()
    assert (result["cause"], result["rollbacks"]) == ("finished", 0)
    assert result["restarts"]["worker"] == 1
    pushes = run.pushes()
    rounds = pushes[pushes["worker"] == 1]["clock"]
    assert rounds.max() == steps - 1
    missed = set(range(steps)) - set(rounds)
    assert missed
    others = pushes[(pushes["worker"] != 1) & pushes["clock"].isin(missed)]
    assert len(others) == 3 * len(missed)
    assert np.isfinite(run.vector()).all()
    assert replay(run.output).is_equal  # although its last rounds may not be in the log
    # The passes without it lack rows, the later ones do not.
    passes = [event["fingerprint"] == event["expected"] for event in run.events("pass")]
    assert passes[0]
    assert not all(passes)
    assert passes[-1]
    # It has reported the ends of the passes that it missed, or the last passes of the others would wait for its own.
    largest = max(event["rows"] for event in run.events("loaded"))
    assert run.events("pass")[-1]["last"] == steps * (VALUES["batch_size"] // 4) // largest


@pytest.mark.full
def test_the_death_of_server_0_rolls_all_workers_back(start: Start) -> None:
    run = start("--exchange", "matcha", *SLOW, "--steps", 300, "--checkpoint-every-s", 0.2)
    until(lambda: newest(run.output / "checkpoints"), "a checkpoint")
    run.send("server-0")
    assert run.wait() == 0, run.said()
    assert run.result()["cause"] == "finished"
    assert run.result()["restarts"]["server"] == 1
    assert len(run.pushes()) == 4 * 300
    assert replay(run.output).is_equal
    folder = folder_of(run.output / "checkpoints", 300)
    assert read_state(run.output / "checkpoints", 300).parts.keys() == {path.name for path in folder.glob("replicas-*")}
