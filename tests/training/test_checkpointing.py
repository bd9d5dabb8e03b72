"""Checkpoints while a run goes on: slow disks, disks that refuse, histories that were left, numbers that are none."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.tiers import only
from tests.support.trainer_runs import Training
from trainer.checkpoints.read import newest
from trainer.run_files import CHECKPOINTS

BAD = """
import torch

class Bad(torch.nn.Module):
    def __init__(self, numbers, classes):
        super().__init__()
        self.linear = torch.nn.Linear(numbers, classes)
        self.linear.bias.register_hook(self.last)
        self.steps = 0

    def last(self, gradient):
        self.steps += 1
        return gradient * float("nan") if self.steps == 30 else gradient

    def forward(self, images):
        return self.linear(images.flatten(1))

def build(image_shape, num_classes):
    channels, height, width = image_shape
    return Bad(channels * height * width, num_classes)
"""


@pytest.fixture(scope="module")
def shards(sets: dict[int, Path]) -> Path:
    """The shard set for one worker."""
    return sets[1]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad_model_of_a_test.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'models'}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("servers", only([2], [1, 2]))
def test_a_last_update_that_is_no_number_ends_a_run_as_diverged(
    shards: Path, tmp_path: Path, models: None, servers: int
) -> None:
    """The last numbers of the model are the bias: they are server 1's, where there is one."""
    flags = ("--model", "bad_model_of_a_test:build", "--batch-size", 24, "--threads", 1, "--no-report", "--steps", 30)
    run = Training(shards, tmp_path / "run", *flags, "--protocol", "bsp", "--servers", servers, "--learning-rate", 0.01)
    try:
        assert run.wait() == 1, run.said()
        lines = [line for line in run.said().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert "diverged" in lines[0]
        assert f"server {servers - 1}" in lines[0]
        assert run.result()["cause"] == "failed"
        assert np.isfinite(run.vector()).all()
        assert newest(run.output / CHECKPOINTS, verify=True) in range(30)
    finally:
        run.end()
