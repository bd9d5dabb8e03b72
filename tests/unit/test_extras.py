"""The commands without the optional dependencies of pyproject.toml: --help works, the rest is one line with the extra."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pipeline import __main__ as pipeline_commands
from pipeline.core.extras import EXTRAS
from pipeline.core.provenance import DISTRIBUTION
from pipeline.entry import COMMANDS, PROGRAMS
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
from tests.support.configs import make_config
from trainer.run_files import CONFIG, METRICS
from trainer.runlog.run_record import RunRecord

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
    "predict": ("trainer", ("sharding", "predict", "begun", "--input", "images", "--output", "table.parquet")),
    "export": ("trainer", ("sharding", "export", "begun", "--as", "torchscript", "--to", "model.pt")),
    "report": ("trainer", ("sharding", "report", "begun")),
    "runs": ("trainer", ("sharding", "runs", "begun")),
    "topology": ("trainer", ("sharding", "topology", "ring", "--workers", 4)),
    "benchmark": ("benchmark", ("sharding", "benchmark", "--output", "figures")),
    "train.py": ("trainer", (JOBS["train.py"], *TRAINING)),
    "benchmark.py": ("benchmark", (JOBS["benchmark.py"], "--output", "figures")),
}
# The commands of the trainer that need no extra, and how their output begins.
NEED_NONE: Mapping[str, tuple[Command, str]] = {"workers": (("sharding", "workers", "begun"), "begun: 3 workers\n")}
# The commands that need an extra beside the trainer, which `make demo` installs.
BESIDE_TRAINER: Mapping[str, tuple[str, Command]] = {
    "study": NEEDS["study"],
    "benchmark": NEEDS["benchmark"],
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
    """The folder of the commands, which holds a run that has begun."""
    folder = tmp_path_factory.mktemp("extras")
    record = RunRecord(make_config(), num_workers=3, rows=1000, shards="f00d")
    (folder / "begun").mkdir()
    (folder / "begun" / CONFIG).write_text(json.dumps(record.to_json()))
    (folder / "begun" / METRICS).touch()
    return folder


def assert_untouched(folder: Path) -> None:
    """Fail if a command has written: it must end before any work."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    assert sorted(names) == ["begun", f"begun/{CONFIG}", f"begun/{METRICS}"]


@pytest.fixture(scope="module")
def without_extras(folder: Path) -> dict[str, Ended]:
    """Every command's help, and the commands that need an extra, where no extra is installed."""
    needing = {name: command for name, (_, command) in NEEDS.items()}
    others = {name: command for name, (command, _) in NEED_NONE.items()}
    return run_without(MODULES, {**HELP, **needing, **others}, folder)


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
    assert_untouched(folder)


@pytest.mark.parametrize("name", NEED_NONE)
def test_a_command_works_without_any_extra(without_extras: dict[str, Ended], folder: Path, name: str) -> None:
    result = without_extras[name]
    assert (result.code, result.err) == (0, "")
    assert result.out.removeprefix(f"{folder}/").startswith(NEED_NONE[name][1])


def test_every_command_of_the_trainer_has_a_case() -> None:
    """The others import none of its packages, which tests/unit/test_boundaries.py checks."""
    jobs = {name for name, path in JOBS.items() if "from trainer" in path.read_text()}
    assert set(PROGRAMS) | jobs == (set(NEEDS) | set(NEED_NONE)) & {*COMMANDS, *JOBS}
    assert set(COMMANDS) == set(PROGRAMS) | set(pipeline_commands.COMMANDS)


@pytest.mark.parametrize("name", BESIDE_TRAINER)
def test_an_extra_beside_the_trainer_is_one_line(with_trainer: dict[str, Ended], folder: Path, name: str) -> None:
    assert_names_extra(with_trainer[name], BESIDE_TRAINER[name][0])
    assert_untouched(folder)


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
