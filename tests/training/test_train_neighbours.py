"""Exchanges among neighbours on real processes: the bits of virtual time, through interruptions; lost workers return."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.configs import make_config
from tests.support.trainer_runs import RunFolder, Training, train_here, until
from trainer import Options, Result
from trainer.checkpoints.read import newest, read_state
from trainer.checkpoints.state import folder_of
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
        started.append(Training(sets[4], tmp_path / "run", *flags_of(VALUES), "--no-report", "--quiet", *flags))
        return started[-1]

    yield begin
    for run in started:
        run.end()


def flags_of(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def virtual_end(shards: Path, output: Path, **values: Any) -> Result:
    config = make_config(shards, output, protocol="bsp", **VALUES | values)
    return simulate(config, SimulationSettings(), Options(silent=True, report=False))


def weights(output: Any) -> bytes:
    return bytes((Path(output) / "model.safetensors").read_bytes())


def consensus(run: RunFolder) -> list[tuple[Any, ...]]:
    return [
        tuple(event[key] for key in ("epoch", "distance", "sent_bytes", "replicas"))
        for event in run.events("consensus")
    ]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"exchange": "d-psgd", "model": "cnn", "epochs": 2}, marks=pytest.mark.full),
        {"exchange": "matcha", "model": "cnn", "epochs": 2, "every": 2, "order": "grad-then-avg"},
    ],
)
def test_real_processes_have_virtual_times_bits(sets: dict[int, Path], tmp_path: Path, values: dict[str, Any]) -> None:
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


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_resumes_with_the_same_bits(
    sets: dict[int, Path], tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Interrupt a run whose steps are slow, so that it is far from its end, and finish it at full speed."""
    module = f"slow_cnn_{number}"
    (tmp_path / f"{module}.py").write_text(SLOW_CNN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    values: dict[str, Any] = {"exchange": "d-psgd", "model": f"{module}:build", "steps": 60}
    flags = (*flags_of(values), "--checkpoint-every-s", 0.3, "--no-epoch-checkpoints")
    (tmp_path / "slow").touch()
    first = start(*flags)
    until(lambda: newest(first.output / "checkpoints"), "a checkpoint")
    if number == signal.SIGTERM:
        first.process.send_signal(number)
        assert first.wait() == 1, first.said()
        assert "--resume continues" in first.said()
    else:
        first.end()
    version = newest(first.output / "checkpoints")
    assert version
    assert version < 60
    assert len(read_state(first.output / "checkpoints", version).memory["replicas"]["begun"]) == 4
    (tmp_path / "slow").unlink()
    resumed = start(*flags, "--resume")
    assert resumed.wait() == 0, resumed.said()
    assert weights(resumed.output) == weights(virtual_end(sets[4], tmp_path / "virtual", **values).output)
    assert resumed.result()["updates"] == 60


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_without_a_lost_worker(start: Start, number: int) -> None:
    """It is replaced, and trains to the end with the others. The run never rolls back."""
    steps = 2000
    run = start("--exchange", "d-psgd", "--model", "logistic", "--steps", steps)
    run.wait_for_updates(200)
    run.send("worker-1", number)
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
    run = start("--exchange", "matcha", "--model", "logistic", "--steps", 1000, "--checkpoint-every-s", 0.2)
    until(lambda: newest(run.output / "checkpoints"), "a checkpoint")
    run.send("server-0")
    assert run.wait() == 0, run.said()
    assert run.result()["cause"] == "finished"
    assert run.result()["restarts"]["server"] == 1
    assert len(run.pushes()) == 4 * 1000
    assert replay(run.output).is_equal
    folder = folder_of(run.output / "checkpoints", 1000)
    assert read_state(run.output / "checkpoints", 1000).parts.keys() == {
        path.name for path in folder.glob("replicas-*")
    }
