"""The fields of a manifest and their JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet, materialize_command
from pipeline.core.shardset.parts import Input, Labels
from pipeline.core.storage.store import Store
from tests.campaigns.fuzz_kinds import make_set


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """The JSON object of a set with every part but a stream."""
    make_set(tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "manifest.json").read_bytes())
    return found


def test_a_manifest_that_is_read_and_written_is_the_same(values: dict[str, Any]) -> None:
    manifest = Manifest.from_json(values)
    written = manifest.to_json()
    assert Manifest.from_json(json.loads(json.dumps(written))) == manifest
    for key in values.keys() - {"input", "eval", "generations"}:  # of which the file lacks some keys
        assert written[key] == values[key]
    assert {key: written["input"][key] for key in values["input"]} == values["input"]


def test_optional_keys_are_not_written() -> None:
    written = Manifest(num_workers=0, workers=[]).to_json()
    assert not {"stream", "generations", "absent", "evaluation"} & written.keys()
    assert (written["format_version"], written["eval"], written["model"]) == (1, None, None)


@pytest.mark.parametrize("place", ["", "input", "image", "labels", "eval", "assignment", "workers", "neighbourhoods"])
def test_unknown_keys_are_ignored(place: str, values: dict[str, Any]) -> None:
    known = Manifest.from_json(values)
    part = values[place] if place else values
    (part[0] if isinstance(part, list) else part)["since_version_9"] = {"x": 1}
    assert Manifest.from_json(values) == known


def test_absent_keys_have_defaults_and_names() -> None:
    manifest = Manifest.from_json({"num_workers": 1, "workers": [{"files": []}], "labels": {"num_classes": 3}})
    assert (manifest.input, manifest.ratios, manifest.assignment) == (Input(), None, None)
    assert manifest.labels == Labels(columns=["label"], num_classes=3)
    assert {"input", "eval", "seed", "assignment"} <= manifest.absent
    assert not {"workers", "labels", "evaluation", "absent", "format_version"} & manifest.absent
    manifest.require("workers", "labels")
    with pytest.raises(ValueError, match="it lacks 'image'"):
        manifest.require("labels", "image", "eval")


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ({"uri": "table:a"}, "sharding materialize --assignment u --input table:a --id-column NAME --output u-shards"),
        ({"uri": "table:a", "id_column": "k"}, "sharding materialize --assignment u --input table:a --output u-shards"),
        ({"uri": "dataframe:input"}, "(assignment='u', ...) from the same DataFrame and id_column"),
        ({"uri": "dataframe:input", "id_column": "k"}, "(assignment='u', ...) from the same DataFrame"),
    ],
)
def test_the_command_for_an_assignment_names_no_known_column(
    origin: dict[str, str], advice: str, values: dict[str, Any]
) -> None:
    """The manifests of older versions lack the column."""
    manifest = Manifest.from_json(values | {"input": origin})
    assert materialize_command(ShardSet(Store(), "u", manifest)).endswith(advice)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("image", 3, "image is '3'"),
        ("image", {"shape": [1, 2, 3]}, "image: it lacks 'dtype'"),
        ("labels", {"columns": ["label"]}, "labels: it lacks 'num_classes'"),
        ("seconds", {"scan": "fast"}, "seconds is"),
        ("neighbourhoods", [{"size": 1}], "neighbourhoods: it lacks 'sparse'"),
        ("neighbourhoods", {"size": 1}, "neighbourhoods is"),
        ("workers", [{"files": [], "label_histogram": 7}], r"workers\[0\].label_histogram is '7'"),
        ("eval", {"rows": 1}, "eval has no list of files"),
        ("model", {"files": None}, "model has no list of files"),
        ("stream", {"window_first": "x"}, "stream.window_first is 'x'"),
        ("params", [], "params is"),
        ("input", {"id_column": 7}, "input.id_column is '7'"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, fault: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=fault):
        Manifest.from_json(values | {key: value})
