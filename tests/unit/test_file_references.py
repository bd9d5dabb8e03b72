"""Every key that the product writes is in pipeline/FILES.md or trainer/FILES.md.

The commands of the READMEs, which tests/clusters/test_readme.py runs, have the files of real sets and runs looked up in the
same way."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.shardset import contract, parts
from pipeline.quality.agreement import LabelAgreement
from pipeline.quality.metrics import ChiSquare, Quality, ShardQuality
from pipeline.quality.report import comparison_row
from pipeline.quality.verdict import Verdict
from tests.support.configs import make_config
from tests.support.references import ROOT, RUNS, SETS, events, names, undocumented, undocumented_below, unlisted
from tests.support.sources import modules, nodes
from trainer import Options
from trainer.checkpoints.state import EvaluationMark, RunState
from trainer.comparison.measurements import Measurements
from trainer.data.follow import Stretch
from trainer.plan import RunPlan
from trainer.runlog.events import COLUMNS
from trainer.runlog.result import Result
from trainer.simulate import simulate
from trainer.simulation.options import SimulationSettings

LEDGERS = ROOT / "conf" / "study" / "results"


def written_keys(source: Any) -> set[str]:
    """Return the string keys of all dict literals in the source of a function or a module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def parts_of_names(document: str, heading: str) -> set[str]:
    """Return every part of the documented names: ``eval``, ``files`` and ``sha256`` of ``eval.files[].sha256``."""
    return {part for name in names(document, heading) for part in re.split(r"\[\]\.|\.", name)}


@pytest.mark.parametrize("kind", [kind for kind in {**vars(parts), **vars(contract)}.values() if is_dataclass(kind)])
def test_every_key_of_a_manifest_is_documented(kind: Any) -> None:
    """kind: a manifest or a part of one."""
    keys = {field.metadata.get("key", field.name) for field in fields(kind)} - {""}
    assert keys
    assert keys <= parts_of_names(SETS, "manifest.json") | {"params"}


def test_every_key_of_a_comparison_is_documented() -> None:
    assert written_keys(comparison_row) <= names(SETS, "compare.json")


@pytest.mark.parametrize(
    ("kind", "document", "heading", "hidden"),
    [
        (Quality, SETS, "quality.json", {"feature_means"}),
        (ChiSquare, SETS, "quality.json", set()),
        (ShardQuality, SETS, "quality.json", set()),
        (LabelAgreement, SETS, "quality.json", set()),
        (Verdict, SETS, "quality.json", set()),
        (RunPlan, RUNS, "plan", set()),
        (Result, RUNS, "result.json", {"output", "staleness", "passes", "restarts"}),
        (RunState, RUNS, "checkpoints", set()),
        (EvaluationMark, RUNS, "checkpoints", set()),
        (Stretch, RUNS, "followed", set()),
        (Measurements, RUNS, "comparison.json", {"seconds", "evaluated_s"}),
    ],
)
def test_every_field_of_a_written_class_is_documented(kind: Any, document: str, heading: str, hidden: set[str]) -> None:
    """hidden: fields that are not written, or that are documented value by value."""
    written = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    assert set(written) - hidden <= parts_of_names(document, heading)


def logged_events() -> Iterator[tuple[str, set[str]]]:
    """Yield the kind and the keyword arguments of every call of log_event in the trainer."""
    for path in [path for path in modules() if path.is_relative_to(ROOT / "trainer")]:
        for node in nodes(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "log_event":
                kind = node.args[1]
                assert isinstance(kind, ast.Constant), f"{path} logs an event without a literal kind"
                yield str(kind.value), {keyword.arg for keyword in node.keywords if keyword.arg}


def test_every_event_and_its_keys_are_documented() -> None:
    found = list(logged_events())
    assert {kind for kind, _ in found} == events().keys()
    for kind, keys in found:
        assert keys <= events()[kind], kind


def test_every_column_of_pushes_is_documented() -> None:
    assert set(COLUMNS.split(",")) == names(RUNS, "pushes.csv")


def test_a_run_writes_nothing_that_is_not_documented(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", batch_size=40, steps=10)
    simulate(config, SimulationSettings(compute="quadratic", workers=4, rows=400), Options(silent=True, report=False))
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert undocumented_below(tmp_path) == {}
    assert unlisted(tmp_path / "run", RUNS) == set()


@pytest.mark.slow
def test_ledgers_of_our_studies_have_documented_keys_only() -> None:
    for path in LEDGERS.glob("*/plan.json"):
        assert undocumented(path) == set()
        assert undocumented(path.parent / "ledger.jsonl") == set()


def test_an_unknown_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"rows": 1, "image": {"shape": [], "new": 1}, "workers": [{"index": 0, "size": 2}]}')
    assert undocumented(path) == {"image.new", "workers[].size"}
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "pass", "time": 0.0, "new": 1}\n{"event": "sleep", "time": 0.0}\n')
    assert undocumented(path) == {"pass.new", "sleep.event", "sleep.time"}
