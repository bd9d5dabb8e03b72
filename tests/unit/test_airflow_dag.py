"""The parameters of conf/airflow/sharding_dag.py without Airflow, whose modules are replaced by mocks.

tests/clusters/test_airflow.py runs the DAG in a real Airflow."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.clusters import ROOT

DAG = ROOT / "conf" / "airflow" / "sharding_dag.py"
DAY = "{{ data_interval_start | ds }}"
PLACES = {name: f"/lake/{name}/{{ds}}" for name in ("raw", "shards", "run")} | {"project": "/opt", "workers": 2}
Load = Callable[..., dict[str, Any]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A function that runs the program beside files of parameters, and returns its names."""
    sdk = MagicMock(RetryPolicy=object)
    for name in ("airflow.sdk.exceptions", "airflow.providers.apache.spark.operators.spark_submit", "jinja2"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)

    def run(**files: str) -> dict[str, Any]:
        program = tmp_path / DAG.name
        program.write_text(DAG.read_text())
        for name, text in files.items():
            (tmp_path / f"{name}.toml").write_text(text)
        return runpy.run_path(str(program)) | {"sdk": sdk}

    return run


def toml(**values: Any) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**PLACES, **values}.items()]
    return "\n".join([*lines, "start_date = 2026-01-01"])


@pytest.mark.parametrize("name", ["train", "flags"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "--epochs {{ var.value.epochs }} --x={{ a['b c'] }}",
            ["--epochs", "{{ var.value.epochs }}", "--x={{ a['b c'] }}"],
        ),
        ("--model 'wide resnet' --at /x/{ds}", ["--model", "wide resnet", "--at", f"/x/{DAY}"]),
        (["--at", "/x y/{ds}", "{{ds}}"], ["--at", f"/x y/{DAY}", "{{ds}}"]),
    ],
)
def test_flags_are_split_as_by_a_shell(load: Load, tmp_path: Path, name: str, value: Any, words: list[str]) -> None:
    parameters = load(sharding=toml(**{name: value}))["Parameters"].read(tmp_path / "sharding.toml")
    assert parameters.words(name) == words


def test_a_broken_file_leaves_the_dags_of_others(load: Load) -> None:
    """The broken one's has an id of its own, or its runs would count as those of the repaired file."""
    names = load(sharding=toml(), **{"sharding b": "raw = ["}, sharding_c=toml())
    assert {"sharding", "sharding b.broken", "sharding_c"} <= names.keys()
    made = {call.kwargs["dag_id"]: call.kwargs["doc_md"] for call in names["sdk"].dag.call_args_list}
    assert made.keys() == {"sharding", "sharding_b.broken", "sharding_c"}
    assert made["sharding_b.broken"].startswith("sharding b.toml: ")
    assert made["sharding"] == made["sharding_c"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schedule": "@hourly"}, "schedule = '@hourly' is not @daily"),
        ({"schedule": "0 0,12 * * *"}, "schedule = '0 0,12"),
        ({"schedule": "0 0 * * * *"}, "schedule = '0 0 "),
        ({"train": 3}, "train = 3 is neither"),
        ({"train": "--model 'x"}, "No closing quotation"),
        ({"flags": [1]}, "flags = "),
    ],
)
def test_parameters_that_cannot_be_are_one_line(load: Load, values: dict[str, Any], words: str) -> None:
    names = load(sharding=toml(**values))
    (problem,) = [call.kwargs["doc_md"] for call in names["sdk"].dag.call_args_list]
    assert problem.startswith("sharding.toml: ")
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize("schedule", ["@daily", "@weekly", "30 2 * * *", "0 0 * * 1-5"])
def test_a_schedule_of_days_is_accepted(load: Load, tmp_path: Path, schedule: str) -> None:
    names = load(sharding=toml(schedule=schedule))
    assert names["Parameters"].read(tmp_path / "sharding.toml").schedule == schedule
