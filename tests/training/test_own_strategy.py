"""A strategy of a user's own: one class and one registry line make a command, checks, a manifest and an identity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.spark.shipping import PACKAGE
from pipeline.strategies import STRATEGIES
from tests.conftest import make_rows, write_binary
from tests.support.application import Ended, run_program

PROGRAM = """
import sys
from dataclasses import dataclass
from typing import ClassVar

from pipeline.__main__ import main
from pipeline.core.specs import option
from pipeline.strategies import STRATEGIES, FitResult, Grouping, Strategy
from pipeline.strategies.base import row_counts


@dataclass(frozen=True)
class Runs(Grouping):
    length: int

    def workers(self, ids, groups, ranks, table):
        return ids // self.length % table.num_workers


@dataclass(frozen=True)
class Mine(Strategy):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "runs of rows in turn"
    my_flag: int = option(5, "rows of a run", metavar="ROWS", least=1)

    def fit(self, context):
        return FitResult(Runs(self.my_flag), row_counts(context))


STRATEGIES[Mine.name] = Mine
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(PROGRAM)
    return path


def start(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}
    command = [sys.executable, str(program), "shard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def start_here(program: Path, *arguments: object) -> Ended:
    """The same in this process, on its Spark session. The registry is afterwards what it was."""
    with mock.patch.dict(STRATEGIES):
        return run_program(program, "shard", *arguments)


@pytest.mark.full
def test_a_strategy_of_ones_own_runs_by_name_with_its_own_flag(
    spark: SparkSession, program: Path, tmp_path: Path
) -> None:
    source = write_binary(tmp_path / "cifar", *make_rows(20, pixels=192), files=1)
    output = tmp_path / "o"
    flags = ["--input", source, "--output", output, "--workers", 2, "--no-report", "--quiet"]
    flags += ["--format", "cifar10-binary", "--image-shape", "3x8x8", "--strategy", "mine"]
    done = start(program, *flags, "--my-flag", 3)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["strategy"], manifest["params"], manifest["asked"]) == ("mine", {"my_flag": 3}, {"my_flag": 3})
    ids = [pq.read_table(output / worker["files"][0]["path"])["id"].to_pylist() for worker in manifest["workers"]]
    assert ids == [[0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19], [3, 4, 5, 9, 10, 11, 15, 16, 17]]

    again = start_here(program, *flags, "--my-flag", 4)
    assert (again.code, again.err.count("error: ")) == (2, 1), again.err
    assert "already holds a committed set (mine for 2 workers)" in again.err
    assert json.loads((output / "manifest.json").read_text()) == manifest

    replaced = start_here(program, *flags, "--my-flag", 4, "--overwrite")
    assert replaced.code == 0, replaced.err
    assert json.loads((output / "manifest.json").read_text())["identity"] != manifest["identity"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--strategy", "mine", "--my-flag", "0"], "--my-flag must be at least 1, got 0"),
        (["--strategy", "random", "--my-flag", "3"], "--strategy random has no --my-flag 3: leave it out, or use mine"),
        (["--strategy", "mine", "--clusters", "3"], "--strategy mine has no --clusters 3: leave it out, or use"),
        ([], "the following arguments are required: --strategy"),
    ],
)
def test_a_wrong_flag_of_a_strategy_is_one_line_before_spark_starts(
    program: Path, tmp_path: Path, flags: list[str], line: str
) -> None:
    done = start(program, "--input", "x", "--output", tmp_path / "o", "--workers", 2, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"error: {line}")


def test_help_names_the_strategy_and_its_flag(program: Path) -> None:
    text = " ".join(start(program, "--help-all").stdout.split())
    assert "mine runs of rows in turn" in text
    assert "--my-flag ROWS mine: rows of a run (default: 5)" in text
