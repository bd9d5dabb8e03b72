"""Modules of users in one process, as a notebook loads them again and again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import UsageError
from trainer.models.own import load_function
from trainer.models.own_optimiser import probe, slots_of

OPTIMISER = "import torch\n\n\ndef make(parameters):\n    return torch.optim.SGD(parameters, 0.1, momentum={})\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, for a module ``noted``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("noted", None)


def value() -> int:
    """Return what the function of the module returns."""
    result: int = load_function("--model", "noted:make")()
    return result


def test_an_edited_module_is_loaded_again(folder: Path) -> None:
    for number in (1, 22):  # equal lengths and times of change would do for Python's own cache
        (folder / "noted.py").write_text(f"def make():\n    return {number}\n")
        assert value() == number
        assert value() == number
    module = sys.modules["noted"]
    assert value() == 22
    assert sys.modules["noted"] is module


def test_a_module_of_another_folder_takes_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "one"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "noted.py").write_text(f"def make():\n    return {len(name)}{name == 'two':d}\n")
        monkeypatch.chdir(folder / name)
        assert value() == (31 if name == "two" else 30)


def test_an_edit_that_fails_is_one_line(folder: Path) -> None:
    (folder / "noted.py").write_text("def make():\n    return 1\n")
    assert value() == 1
    (folder / "noted.py").write_text("def make(:\n")
    with pytest.raises(UsageError, match=r"^--model noted:make: the import of noted fails: SyntaxError"):
        value()


def test_an_edited_optimiser_has_the_state_it_needs(folder: Path) -> None:
    for momentum, arrays in ((0, ()), (0.9, ("momentum_buffer",))):
        (folder / "noted.py").write_text(OPTIMISER.format(momentum))
        assert slots_of("noted:make") == 1
        assert probe("noted:make").arrays == arrays
