"""Real-valued rows through the jobs: kept bit for bit, targets beside them, and refused where pixels are wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import adjusted_rand_score

from pipeline.datasets.features import feature_batch
from tests.support.application import run_job
from trainer.data.shards import open_shards

ROWS, FEATURES = 300, 7


def write(folder: Path, features: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None) -> Path:
    folder.mkdir()
    labels = (np.arange(len(features)) % 3).astype(np.int32)
    table = pa.Table.from_batches([feature_batch(features, labels, targets)])
    pq.write_table(table, folder / "part-0.parquet")
    return folder


def neighbourhoods_of(output: Path) -> np.ndarray[Any, Any]:
    """By id."""
    manifest = json.loads((output / "manifest.json").read_text())
    tables = [pq.read_table(output / file["path"]) for worker in manifest["workers"] for file in worker["files"]]
    rows = pa.concat_tables(tables).to_pandas()
    return np.asarray(rows[rows["copy"] == 0].sort_values("id")["neighbourhood"])


@pytest.mark.parametrize("job", ["distribution_aware.py", "class_cluster.py"])
def test_features_are_clustered_as_they_are_and_reported_on(tmp_path: Path, job: str) -> None:
    """Against scikit-learn, on clusters that nobody can miss; two rows are far from all others."""
    rng = np.random.default_rng(4)
    truth = rng.integers(0, 4, ROWS)
    features = (rng.normal(0, 0.3, (ROWS, FEATURES)) + 10 * rng.normal(size=(4, FEATURES))[truth]).astype(np.float32)
    features[:2] = 400.0
    source, output = write(tmp_path / "in", features, None), tmp_path / "out"
    flags = ["--input", source, "--output", output, "--workers", 3]
    done = run_job(job, *flags, "--clusters", 5 if job.startswith("dist") else 15)
    assert done.code == 0, done.err
    assert "failed" not in done.err
    found = neighbourhoods_of(output)
    manifest = json.loads((output / "manifest.json").read_text())
    if job.startswith("dist"):
        assert adjusted_rand_score(truth[2:], found[2:]) == 1
        assert len(set(found[:2]) - set(found[2:])) == 1
        assert manifest["copies"] == 2 * 2
        assert [path["path"].split("/")[2] for path in manifest["model"]["files"]] == ["kmeans"] * 3
    else:
        for label in range(3):
            mine = np.arange(ROWS) % 3 == label
            assert adjusted_rand_score(truth[mine][1:], found[mine][1:]) > 0.8
    page = (output / "report.html").read_text()
    assert "mean row is off by" in page
    assert run_job(job, *flags, "--clusters", 5 if job.startswith("dist") else 15).out.count("already committed") == 1


VECTORS = pa.list_(pa.float32())


def with_vectors(folder: Path, vectors: pa.Array) -> Path:
    """Small images, alike in all rows, beside vectors."""
    folder.mkdir()
    images = pa.array([bytes(12)] * len(vectors), pa.binary())
    labels = pa.array(np.arange(len(vectors)) % 3, pa.int32())
    pq.write_table(pa.table({"image": images, "label": labels, "v": vectors}), folder / "a.parquet", row_group_size=70)
    return folder


@pytest.mark.parametrize(
    ("job", "kind"),
    [("class_cluster.py", "list"), *(("distribution_aware.py", kind) for kind in ("list", "fixed", "double", "spark"))],
)
def test_a_column_of_vectors_is_clustered_instead_of_pixels(tmp_path: Path, job: str, kind: str) -> None:
    rng = np.random.default_rng(8)
    numbers = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    lists = pa.array(list(numbers), pa.list_(pa.float64()) if kind == "double" else VECTORS)
    vectors = {
        "list": lists,
        "double": lists,
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), FEATURES),
        "spark": pa.StructArray.from_arrays([pa.array([1] * ROWS, pa.int8()), lists], ["type", "values"]),
    }[kind]
    flags = ["--workers", 3, "--clusters", 6, "--no-report"]
    places = ["--input", with_vectors(tmp_path / "in", vectors), "--output", tmp_path / "out", "--image-shape", "3x2x2"]
    done = run_job(job, *places, *flags, "--embedding", "v")
    assert done.code == 0, done.err
    features = ["--input", write(tmp_path / "features", numbers, None), "--output", tmp_path / "features-out"]
    assert run_job(job, *features, *flags).code == 0
    np.testing.assert_array_equal(neighbourhoods_of(tmp_path / "out"), neighbourhoods_of(tmp_path / "features-out"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["image"]["shape"], manifest["image"]["dtype"]) == ([3, 2, 2], "uint8")
    assert (manifest["params"]["embedding"], manifest["params"]["components_fitted"]) == ("v", FEATURES)


@pytest.mark.full
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
