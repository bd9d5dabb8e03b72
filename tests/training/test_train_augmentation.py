"""An augmentation of the user's own in real workers: the bits of virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import make_config
from tests.support.trainer_runs import RunFolder, train_here
from trainer import Options
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings

pytestmark = pytest.mark.full

OWN = "tests.support.augmentations:brightness"


def test_real_workers_augment_as_in_virtual_time(sets: dict[int, Path], tmp_path: Path) -> None:
    """The function's module is loaded in workers that are forked from the fork server."""
    flags = ("--model", "logistic", "--batch-size", 24, "--threads", 1, "--device", "cpu", "--steps", 20)
    rule = ("--protocol", "bsp", "--augmentation", OWN, "--quiet", "--no-report")
    run = train_here(sets[3], tmp_path / "run", *flags, *rule)
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "steps": 20, "augmentation": OWN}
    config = make_config(sets[3], tmp_path / "virtual", protocol="bsp", **values)
    simulate(config, SimulationSettings(), Options(silent=True, report=False))
    assert run.vector().tobytes() == RunFolder(tmp_path / "virtual").vector().tobytes()
