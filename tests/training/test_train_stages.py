"""Runs with a switch on real processes: the same bits through kills at the switch, and the rule of Strategy-Switch."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from tests.support.configs import make_config
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import RunFolder, train_here, until
from tests.support.two_stages import AllReduceThenServers, TwoHalves
from trainer import Options
from trainer.exchange import EXCHANGES
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings
from trainer.simulation.replay import replay

FLAGS: tuple[Any, ...] = (
    *("--model", "logistic", "--batch-size", 24, "--threads", 1, "--device", "cpu", "--quiet", "--no-report"),
)
STEPS = ("--steps", 60, "--servers", 2)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (TwoHalves, AllReduceThenServers):
        monkeypatch.setitem(EXCHANGES, kind.name, kind)


@pytest.fixture(scope="module")
def plain(sets: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The parameters where a run of bsp without a switch ends."""
    return (
        train_here(sets[3], tmp_path_factory.mktemp("plain") / "run", *FLAGS, *STEPS, "--protocol", "bsp")
        .vector()
        .tobytes()
    )


def has_begun(output: Path, number: int) -> bool:
    """Return whether the log of a run says that a stage has begun. number: of the stage."""
    log = output / "metrics.jsonl"
    return log.exists() and any(event["stage"] == number for event in RunFolder(output).events("stage"))


def kill_at_the_switch(output: Path, role: str, number: int) -> threading.Thread:
    """Kill a process of this one's as soon as the log says that a stage has begun. number: of the stage."""

    def kill() -> None:
        until(lambda: has_begun(output, number), f"stage {number}")
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name() == role:
                    os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("exchange", "role"),
    [
        (AllReduceThenServers.name, "worker-1"),
        pytest.param(AllReduceThenServers.name, "server-0", marks=pytest.mark.full),
        pytest.param(TwoHalves.name, "server-1", marks=pytest.mark.full),
    ],
)
def test_a_kill_at_the_switch_changes_no_bit(
    sets: dict[int, Path], plain: bytes, tmp_path: Path, exchange: str, role: str
) -> None:
    """Both stages make the updates of bsp, and momentum is kept, so that the run equals one of bsp without a switch."""
    killer = kill_at_the_switch(tmp_path / "run", role, 1)
    run = train_here(
        sets[3], tmp_path / "run", *FLAGS, *STEPS, "--exchange", exchange, "--switch-momentum", "keep",
    )  # fmt: skip
    killer.join()
    assert run.vector().tobytes() == plain
    assert [stage["reason"] for stage in run.result()["stages"]] == ["start of the run", "half of the steps"]
    assert sum(run.result()["restarts"].values()) >= 1
    assert replay(tmp_path / "run").is_equal


def damage_at_the_switch(output: Path) -> threading.Thread:
    """Damage the checkpoint of the switch, and kill server 1, so that the run rolls back behind the switch."""

    def damage() -> None:
        until(lambda: has_begun(output, 1), "stage 1")
        server = next(child for child in psutil.Process().children(recursive=True) if child.name() == "server-1")
        # Without its slice no later checkpoint is complete.
        server.suspend()
        for path in (output / "checkpoints" / "00000030").glob("slice-*"):
            os.truncate(path, 100)
        server.kill()

    thread = threading.Thread(target=damage, daemon=True)
    thread.start()
    return thread


@pytest.mark.full
def test_a_roll_back_behind_the_switch_repeats_it(sets: dict[int, Path], tmp_path: Path) -> None:
    """The servers hand the run back to all-reduce, which trains up to the switch again."""
    damage = damage_at_the_switch(tmp_path / "run")
    run = train_here(
        sets[3], tmp_path / "run", *FLAGS, *SLOW, *STEPS, "--exchange", AllReduceThenServers.name,
        "--no-epoch-checkpoints",
    )  # fmt: skip
    damage.join()
    (rollback,) = run.events("rollback")
    assert rollback["from_version"] >= 30 > rollback["to_version"]
    assert [event["version"] for event in run.events("stage") if event["stage"] == 1] == [30, 30]
    assert [stage["reason"] for stage in run.result()["stages"]] == ["start of the run", "half of the steps"]
    assert replay(tmp_path / "run").is_equal


@pytest.mark.full
def test_a_rule_that_never_decides_leaves_all_reduce(sets: dict[int, Path], tmp_path: Path) -> None:
    """The run waits for the evaluation of the last epoch but one, and then ends with the bits of bsp."""
    plain = train_here(sets[3], tmp_path / "plain", *FLAGS, "--protocol", "bsp", "--epochs", 3)
    rule = ("--exchange", "strategy-switch", "--switch-threshold", 1e-6)
    run = train_here(sets[3], tmp_path / "run", *FLAGS, *rule, "--epochs", 3)
    assert run.vector().tobytes() == plain.vector().tobytes()
    assert [stage["exchange"] for stage in run.result()["stages"]] == ["all-reduce"]
    assert run.result()["rollbacks"] == 0


RULE: dict[str, Any] = {"switch_window": 3, "switch_threshold": 5.0}


@pytest.mark.full
@pytest.mark.parametrize(
    "rule",
    [RULE | {"switch_on": "holdout"}, {}],
    ids=["holdout", "defaults"],
)
def test_the_rule_decides_on_real_processes_as_in_virtual_time(
    sets: dict[int, Path], tmp_path: Path, rule: dict[str, Any]
) -> None:
    """All-reduce has the same bits there, so that the losses and the epoch of the switch are the same."""
    words = [word for name, value in rule.items() for word in (f"--{name.replace('_', '-')}", value)]
    run = train_here(sets[3], tmp_path / "run", *FLAGS, "--exchange", "strategy-switch", *words, "--epochs", 8)
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "epochs": 8}
    virtual = simulate(
        make_config(sets[3], tmp_path / "virtual", exchange="strategy-switch", **values | rule),
        SimulationSettings(),
        Options(silent=True),
    )
    assert run.result()["stages"] == virtual.stages
    assert [stage["exchange"] for stage in virtual.stages] == ["all-reduce", "parameter-server"]
    assert replay(tmp_path / "run").is_equal


SLOW_WORKER = """
import time
from pathlib import Path

import torch

class Slow(torch.nn.Linear):
    def forward(self, rows):
        if Path("/proc/self/comm").read_text().startswith("worker-1"):
            time.sleep(0.15)
        return super().forward(rows)

def build(image_shape, num_classes):
    channels, height, width = image_shape
    return torch.nn.Sequential(torch.nn.Flatten(), Slow(channels * height * width, num_classes))
"""


def version_by_the_rule(pushes: pd.DataFrame, factor: float, window: int) -> int:
    """The oracle: the first update of bsp after which the last step times of three workers have a straggler."""
    medians = pushes.pivot(index="version", columns="worker", values="step_s").rolling(window).median().dropna()
    ratios = medians.max(axis=1) / medians.median(axis=1)
    return int(ratios.index[ratios >= factor][0])


def test_a_slow_worker_ends_bsp_on_real_processes(
    sets: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision follows from the times in the log, and all later updates have one gradient each."""
    (tmp_path / "slow_worker_of_a_test.py").write_text(SLOW_WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*FLAGS, "--model", "slow_worker_of_a_test:build", "--steps", 20]
    rule = ("--exchange", "sync-switch", "--fraction", 0.9, "--straggler", 3, "--straggler-window", 5)
    run = train_here(sets[3], tmp_path / "run", *flags, *rule)
    begun = run.events("stage")[1]
    assert begun["reason"].startswith("worker 1 was a straggler: ")
    assert begun["reason"].endswith(" times the median over 5 steps")
    assert [stage["protocol"] for stage in run.result()["stages"]] == ["bsp", "asp"]
    pushes = run.pushes()
    bsp = pushes[pushes["version"] <= begun["version"]]
    assert begun["version"] == version_by_the_rule(bsp, 3, 5)
    assert pushes[pushes["version"] > begun["version"]]["version"].is_unique
    assert len(pushes) == 20 * 3
    assert replay(tmp_path / "run").is_equal
