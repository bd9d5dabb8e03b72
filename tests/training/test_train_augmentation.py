"""Augmentation and normalisation of images in real workers: the bits of virtual time."""

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


@pytest.mark.parametrize(("option", "value"), [("augmentation", OWN), ("normalise", "image")])
def test_real_workers_change_images_as_in_virtual_time(
    sets: dict[int, Path], tmp_path: Path, option: str, value: str
) -> None:
    """A function's module is loaded in workers that are forked from the fork server; a mean image is read from its file."""
    flags = ("--model", "logistic", "--batch-size", 24, "--threads", 1, "--device", "cpu", "--steps", 20)
    rule = ("--protocol", "bsp", f"--{option}", value, "--quiet", "--no-report")
    run = train_here(sets[3], tmp_path / "run", *flags, *rule)
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "steps": 20, option: value}
    config = make_config(sets[3], tmp_path / "virtual", protocol="bsp", **values)
    simulate(config, SimulationSettings(), Options(silent=True, report=False))
    assert not (run.output / "rows").exists()
    assert run.vector().tobytes() == RunFolder(tmp_path / "virtual").vector().tobytes()
