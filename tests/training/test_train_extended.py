"""A protocol and a model of somebody else's: a class in a file and a line in the registry, through the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trainer_runs import ROOT
from tests.unit.test_import_path import hide
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.result import read_result

MINE = '''
from dataclasses import dataclass
from typing import ClassVar

from pipeline.core.specs import option
from trainer.models import MODELS
from trainer.models.base import ModelSpec
from trainer.protocols import PROTOCOLS
from trainer.protocols.base import Protocol


@dataclass(frozen=True)
class Pairs(Protocol):
    """An update takes so many gradients, whoever they are of."""

    name: ClassVar[str] = "pairs"
    summary: ClassVar[str] = "an update takes several gradients"
    synchronous: ClassVar[bool] = False
    pair_size: int = option(1, "gradients in an update", metavar="P", least=1)

    def update_size(self, num_workers: int) -> int:
        return self.pair_size


@dataclass(frozen=True)
class Tiny(ModelSpec):
    name: ClassVar[str] = "tiny"
    width: int = option(4, "of the hidden layer", metavar="W", least=1)

    def make(self, shape, num_outputs):
        from torch import nn

        features = shape[0] * shape[1] * shape[2]
        return nn.Sequential(nn.Flatten(), nn.Linear(features, self.width), nn.Linear(self.width, num_outputs))


PROTOCOLS[Pairs.name] = Pairs
MODELS[Tiny.name] = Tiny
'''
PROGRAM = """
import mine
from pipeline.core.program import execute
from trainer.__main__ import main
execute(main, interrupted="")
"""


@pytest.fixture(scope="module")
def shards(sets: dict[int, Path]) -> Path:
    """The shard set for two workers."""
    return sets[2]


def trainer(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(MINE)
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, str(folder / "program.py"), *map(str, flags)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_new_protocol_and_a_new_model_train_by_their_own_flags(shards: Path, tmp_path: Path) -> None:
    common = (
        "--shards",
        shards,
        "--output",
        tmp_path / "run",
        "--steps",
        6,
        "--batch-size",
        24,
        "--quiet",
        "--no-report",
    )
    done = trainer(tmp_path, *common, "--protocol", "pairs", "--pair-size", 2, "--model", "tiny", "--width", 5)
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "run")
    assert (result.protocol, result.model, result.updates) == ("pairs", "tiny", 6)
    pushes = result.pushes()
    assert set(pushes.groupby("version")["clock"].count()) == {2}
    assert result.weights()["1.weight"].shape[0] == 5
    start = next(event for event in result.events() if isinstance(event, StartEvent))
    assert start.config["protocol"] == {"name": "pairs", "pair_size": 2}
    again = trainer(
        tmp_path, *common, "--protocol", "pairs", "--pair-size", 1, "--model", "tiny", "--width", 5, "--resume"
    )
    assert again.returncode == 2
    assert "--pair-size 2, not 1" in again.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--protocol", "pairs", "--pair-size", 0), "--pair-size must be at least 1, got 0"),
        (("--protocol", "asp", "--pair-size", 2), "--protocol asp has no --pair-size 2: leave it out, or use pairs"),
        (
            ("--model", "cnn", "--width", 3),
            "--model cnn has no --width 3: leave it out, or use wrn16_4, wrn28_10, tiny",
        ),
    ],
)
def test_its_flags_are_checked_like_all_others(tmp_path: Path, flags: tuple[object, ...], line: str) -> None:
    done = trainer(tmp_path, "--shards", "s", "--output", tmp_path / "run", "--steps", 1, *flags)
    assert (done.returncode, done.stderr.strip()) == (2, f"error: {line}")


def test_help_tells_of_it(tmp_path: Path) -> None:
    text = " ".join(trainer(tmp_path, "--protocol", "pairs", "--help").stdout.split())
    assert "pairs an update takes several gradients" in text
    assert "--pair-size P pairs: gradients in an update (default: 1)" in text


OWN_MODEL = """
from layers_of_a_test import layer

def build(image_shape, num_classes):
    return layer(image_shape, num_classes)
"""
LAYERS = """
import torch

def layer(image_shape, num_classes):
    channels, height, width = image_shape
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * height * width, num_classes))
"""


@pytest.mark.full
def test_files_named_like_modules_are_no_harm_beside_a_model(shards: Path, tmp_path: Path) -> None:
    """The model of a user's own and what it imports come from the working folder, and nothing else does."""
    hide(tmp_path, "pipeline", "torch", "numpy", "matplotlib", "socket", "json", "multiprocessing")
    (tmp_path / "model_of_a_test.py").write_text(OWN_MODEL)
    (tmp_path / "layers_of_a_test.py").write_text(LAYERS)
    run = ("--shards", shards, "--output", tmp_path / "run", "--steps", 3, "--batch-size", 24)
    command = [sys.executable, "-m", "trainer", *map(str, run), "--model", "model_of_a_test:build"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()
