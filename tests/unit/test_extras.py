"""The commands without the optional dependencies of pyproject.toml: --help works, the rest is one line with the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pipeline.core.command_line import DISTRIBUTION
from pipeline.core.extras import EXTRAS
from tests.clusters.machine import ROOT
from tests.support.application import Ended
from tests.support.commands import (
    BATCH,
    HELP,
    JOBS,
    Command,
    assert_names_extra,
    assert_shows_help,
    plan_batch,
    read_batch,
)

pytestmark = pytest.mark.slow  # processes of its own

SHARDING = ("--input", "images", "--output", "set", "--workers", 2)
TRAINING = ("--shards", "shards", "--output", "run", "--epochs", 1)
MODULES = frozenset(module for modules in EXTRAS.values() for module in modules)
# The commands that need an extra, by the extra, with all that they require.
NEEDS: Mapping[str, tuple[str, Command]] = {
    "stratified.py --metrics-file": ("metrics", (JOBS["stratified.py"], *SHARDING, "--metrics-file", "job.prom")),
    "train": ("trainer", ("sharding", "train", *TRAINING)),
    "simulate": ("trainer", ("sharding", "simulate", *TRAINING)),
    "embed": ("trainer", ("sharding", "embed", "--input", "images", "--output", "table.parquet")),
    "study": ("study", ("sharding", "study", "quick", "--output", "study")),
    "train.py": ("trainer", (JOBS["train.py"], *TRAINING)),
    "benchmark.py": ("benchmark", (JOBS["benchmark.py"], "--output", "figures")),
}
# The commands that need an extra beside the trainer, which `make demo` installs.
BESIDE_TRAINER: Mapping[str, tuple[str, Command]] = {
    "study": NEEDS["study"],
    "benchmark.py": NEEDS["benchmark.py"],
    "train --launcher ray": ("ray", (*NEEDS["train"][1], "--launcher", "ray", "--hosts", 2)),
    "train --tensorboard": ("tensorboard", (*NEEDS["train"][1], "--tensorboard")),
    "train --metrics-port": ("metrics", (*NEEDS["train"][1], "--metrics-port", 0)),
    "simulate --tensorboard": ("tensorboard", (*NEEDS["simulate"][1], "--tensorboard")),
}


def run_without(modules: Iterable[str], commands: Mapping[str, Command], folder: Path) -> dict[str, Ended]:
    """Run commands in one process that finds no module of these names."""
    plan = plan_batch(commands.values(), modules, path=[ROOT])
    done = subprocess.run([sys.executable, BATCH, plan], cwd=folder, capture_output=True, text=True, check=False)
    return dict(zip(commands, read_batch(done), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extras")


@pytest.fixture(scope="module")
def without_extras(folder: Path) -> dict[str, Ended]:
    """Every command's help, and the commands that need an extra, where no extra is installed."""
    return run_without(MODULES, {**HELP, **{name: command for name, (_, command) in NEEDS.items()}}, folder)


@pytest.fixture(scope="module")
def with_trainer(folder: Path) -> dict[str, Ended]:
    """The commands that need an extra beside the trainer, where that one is installed."""
    hidden = MODULES - set(EXTRAS["trainer"])
    return run_without(hidden, {name: command for name, (_, command) in BESIDE_TRAINER.items()}, folder)


@pytest.mark.parametrize("name", HELP)
def test_help_needs_no_extra(without_extras: dict[str, Ended], name: str) -> None:
    assert_shows_help(without_extras[name])


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_extra_is_one_line(without_extras: dict[str, Ended], folder: Path, name: str) -> None:
    assert_names_extra(without_extras[name], NEEDS[name][0])
    assert not list(folder.iterdir()), "the command ended before any work"


@pytest.mark.parametrize("name", BESIDE_TRAINER)
def test_an_extra_beside_the_trainer_is_one_line(with_trainer: dict[str, Ended], folder: Path, name: str) -> None:
    assert_names_extra(with_trainer[name], BESIDE_TRAINER[name][0])
    assert not list(folder.iterdir()), "the command ended before any work"


def test_extras_are_those_of_pyproject() -> None:
    """Each extra names one module of every package that it installs."""
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(optional) - {"dev"}
    owners = packages_distributions()

    def packages(extra: str) -> set[str]:
        names = {re.match(r"[\w.-]+(\[[\w,-]+\])?", line)[0] for line in optional[extra]}  # type: ignore[index]
        inner = {name for name in names if name.startswith(f"{DISTRIBUTION}[")}
        below = [packages(part) for name in inner for part in name[len(DISTRIBUTION) + 1 : -1].split(",")]
        return (names - inner).union(*below)

    for extra, modules in EXTRAS.items():
        assert len(modules) == len(packages(extra))
        assert {owners[module][0].lower() for module in modules} == packages(extra)
