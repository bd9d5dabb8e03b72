"""Update rules with a state on real processes: the bits of virtual time, through kills and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import make_config
from tests.support.trainer_runs import RunFolder, Training, train_here
from trainer import Options
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings
from trainer.simulation.replay import replay

pytestmark = pytest.mark.full

FLAGS: tuple[Any, ...] = (
    *("--model", "logistic", "--batch-size", 24, "--threads", 1, "--device", "cpu", "--quiet", "--no-report"),
)


def test_real_processes_have_the_bits_of_virtual_time(sets: dict[int, Path], tmp_path: Path) -> None:
    optimiser = "tests.support.optimisers:adamw"
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "steps": 40, "optimiser": optimiser}
    config = make_config(sets[3], tmp_path / "virtual", protocol="bsp", **values)
    simulate(config, SimulationSettings(), Options(silent=True, report=False))
    expected = RunFolder(tmp_path / "virtual").vector().tobytes()
    rule = ("--steps", 40, "--optimiser", optimiser)
    servers = train_here(sets[3], tmp_path / "servers", *FLAGS, *rule, "--protocol", "bsp", "--servers", 2)
    assert servers.vector().tobytes() == expected
    reduced = train_here(sets[3], tmp_path / "reduced", *FLAGS, *rule, "--exchange", "all-reduce")
    assert reduced.vector().tobytes() == expected
    assert replay(reduced.output).is_equal


def test_a_kill_and_a_resume_change_no_bit(sets: dict[int, Path], tmp_path: Path, runs: list[Training]) -> None:
    """Read the state of Adam from a checkpoint of two servers."""
    flags = (
        *FLAGS,
        "--protocol",
        "bsp",
        "--servers",
        2,
        "--optimiser",
        "adam",
        "--checkpoint-every-s",
        0.2,
        "--recipe",
        "constant",
    )
    whole = train_here(sets[3], tmp_path / "whole", *flags, "--steps", 400)
    run = Training(sets[3], tmp_path / "run", *flags, "--steps", 200)
    runs.append(run)
    run.wait_for_updates(20)
    run.send("server-1")
    assert run.wait() == 0, run.said()
    resumed = train_here(sets[3], tmp_path / "run", *flags, "--steps", 400, "--resume")
    assert resumed.vector().tobytes() == whole.vector().tobytes()
