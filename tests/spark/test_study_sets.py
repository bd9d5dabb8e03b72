"""The shard sets of a study, as the process that makes them does, on the tests' Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.datasets.derive import Derivation
from tests.conftest import make_rows, write_binary
from trainer.study.run import make_sets


def task_of(source: Path, folder: Path) -> dict[str, Any]:
    """A set of two workers out of the first 100 rows, at half the side."""
    derived: dict[str, Any] = {"source": str(source), "target": str(folder / "derived"), "evaluation": None}
    derived["derivation"] = Derivation(rows=100, shrink=2).params()
    places = ["--input", str(folder / "derived"), "--output", str(folder / "set")]
    return {"derive": derived, "shard": ["--strategy", "random", *places, "--workers", "2", "--no-report"]}


def test_a_task_derives_the_data_and_shards_them(spark: SparkSession, tmp_path: Path) -> None:
    source = write_binary(tmp_path / "in", *make_rows(160), files=1)
    make_sets.make(task_of(source, tmp_path))
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["num_workers"], manifest["image"]["shape"]) == (100, 2, [3, 16, 16])


def test_a_task_that_cannot_be_done_is_a_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_sets, "task_of_parent", lambda: [task_of(tmp_path / "nowhere", tmp_path)])
    assert make_sets.main() == 3
    assert "nowhere does not exist" in capsys.readouterr().out.splitlines()[-1]
