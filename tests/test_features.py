"""Real-valued rows through the jobs: kept bit for bit, targets beside them, and refused where pixels are wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.datasets.features import feature_batch
from tests.application import run_job
from trainer.data.shards import load_eval, load_worker, open_shards

ROWS, FEATURES = 300, 7


def write(folder: Path, features: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None) -> Path:
    folder.mkdir()
    labels = (np.arange(len(features)) % 3).astype(np.int32)
    table = pa.Table.from_batches([feature_batch(features, labels, targets)])
    pq.write_table(table, folder / "part-0.parquet")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("features")
    rng = np.random.default_rng(0)
    features = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    targets = rng.standard_normal(ROWS).astype(np.float32)
    source, beside = write(root / "in", features, targets), write(root / "eval", features[:50], targets[:50])
    places = ["--input", source, "--eval-input", beside, "--output", root / "shards", "--workers", 3]
    done = run_job("stratified.py", *places, "--no-report")
    assert done.code == 0, done.err
    return {"root": root, "features": features, "targets": targets, "source": source, "shards": root / "shards"}


def test_features_and_targets_arrive_at_the_workers_as_they_were(made: dict[str, Any]) -> None:
    shards = open_shards(str(made["shards"]))
    assert (shards.layout.dtype, shards.shape, shards.has_targets) == ("float32", (FEATURES, 1, 1), True)
    np.testing.assert_allclose(shards.mean, made["features"].mean(axis=0), atol=1e-5)
    seen = []
    for worker in range(3):
        rows, answered = load_worker(shards, worker), load_worker(shards, worker, targets=True)
        np.testing.assert_array_equal(rows.images_NCHW[:, :, 0, 0], made["features"][rows.ids])
        np.testing.assert_array_equal(rows.labels, rows.ids % 3)
        np.testing.assert_array_equal(answered.labels, made["targets"][rows.ids])
        seen += rows.ids.tolist()
    assert sorted(seen) == list(range(ROWS))
    found = load_eval(shards, targets=True)
    assert found is not None
    np.testing.assert_array_equal(found.labels, made["targets"][:50])


def test_resharding_keeps_them(made: dict[str, Any], tmp_path: Path) -> None:
    done = run_job("reshard.py", "--input", made["shards"], "--output", tmp_path / "two", "--workers", 2, "--no-report")
    assert done.code == 0, done.err
    shards = open_shards(str(tmp_path / "two"), num_workers=2)
    for worker in range(2):
        rows = load_worker(shards, worker, targets=True)
        np.testing.assert_array_equal(rows.images_NCHW[:, :, 0, 0], made["features"][rows.ids])
        np.testing.assert_array_equal(rows.labels, made["targets"][rows.ids])


def test_another_target_is_another_content(made: dict[str, Any], tmp_path: Path) -> None:
    changed = made["targets"].copy()
    changed[17] += 1
    source = write(tmp_path / "in", made["features"], changed)
    places = ["--input", source, "--output", tmp_path / "shards", "--workers", 3, "--no-report"]
    assert run_job("stratified.py", *places).code == 0
    fingerprints = [
        json.loads((folder / "manifest.json").read_text())["input"]["fingerprint"]
        for folder in (made["shards"], tmp_path / "shards")
    ]
    assert fingerprints[0] != fingerprints[1]


def test_what_looks_at_pixels_says_that_there_are_none(made: dict[str, Any], tmp_path: Path) -> None:
    places = ["--input", made["source"], "--output", tmp_path / "shards", "--workers", 3]
    done = run_job("distribution_aware.py", *places)
    assert done.code == 2
    assert "distribution_aware looks at pixels" in done.err
    assert not (tmp_path / "shards").exists()
    done = run_job("stratified.py", *places)  # with a report, which has nothing to show
    assert done.code == 0
    assert "warning: the shards are committed, but their report failed" in done.err


@pytest.mark.parametrize("broken", ["feature", "target"])
def test_a_number_that_is_none_is_found_before_anything_is_written(
    made: dict[str, Any], tmp_path: Path, broken: str
) -> None:
    features, targets = made["features"].copy(), made["targets"].copy()
    (features[41] if broken == "feature" else targets)[2] = np.nan
    source = write(tmp_path / "in", features, targets)
    done = run_job("stratified.py", "--input", source, "--output", tmp_path / "shards", "--workers", 3)
    assert done.code == 3
    assert f"row {41 if broken == 'feature' else 2}" in done.err
    assert not (tmp_path / "shards").exists()


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [pa.array(["cat"] * ROWS), pa.array([1] * ROWS)])
def test_a_target_that_is_no_real_number_is_a_column_like_any_other(tmp_path: Path, foreign: pa.Array) -> None:
    """Data sets name columns as they like; what the jobs do not know they leave out."""
    labels = (np.arange(ROWS) % 3).astype(np.int32)
    table = pa.Table.from_batches([feature_batch(np.ones((ROWS, FEATURES), np.float32), labels)])
    (tmp_path / "in").mkdir()
    pq.write_table(table.append_column("target", foreign), tmp_path / "in" / "part-0.parquet")
    places = ["--input", tmp_path / "in", "--output", tmp_path / "shards", "--workers", 2, "--no-report"]
    assert run_job("stratified.py", *places).code == 0
    assert not open_shards(str(tmp_path / "shards")).has_targets
