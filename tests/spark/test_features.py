"""Real-valued rows through the jobs: kept bit for bit, targets beside them, and refused where pixels are wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import adjusted_rand_score

from tests.conftest import make_rows, write_binary
from tests.support.application import run_job
from tests.support.tiers import only
from tests.unit.test_features import FEATURES, ROWS, VECTORS, neighbourhoods_of, with_vectors, write
from trainer.data.loading import load_eval, load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards


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
    np.testing.assert_allclose(subtracted_mean(shards), made["features"].mean(axis=0), atol=1e-5)
    seen = []
    for worker in range(3):
        rows, answered = load_worker(shards, worker), load_worker(shards, worker, targets=True)
        np.testing.assert_array_equal(np.asarray(rows.images_NCHW)[:, :, 0, 0], made["features"][rows.ids])
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
    shards = open_shards(str(tmp_path / "two"))
    for worker in range(2):
        rows = load_worker(shards, worker, targets=True)
        np.testing.assert_array_equal(np.asarray(rows.images_NCHW)[:, :, 0, 0], made["features"][rows.ids])
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


ROW = [1.0, 2.0]
BROKEN: dict[str, tuple[pa.Array, str, int]] = {
    "a null": (pa.array([ROW] * 150 + [None] + [ROW] * 9, VECTORS), "row 150: the vector is null", 3),
    "another length": (pa.array([ROW] * 80 + [[1.0]] + [ROW] * 9, VECTORS), "row 80: the vector has 1 numbers", 3),
    "not finite": (pa.array([ROW] * 20 + [[1.0, np.inf]] + [ROW] * 9, VECTORS), "row 20: the vector holds numbers", 3),
    "text": (pa.array(["a"] * 30), "holds string, not vectors", 2),
    "lists of text": (pa.array([["a"]] * 30), "not vectors", 2),
    "empty vectors": (pa.array([[]] * 30, VECTORS), "row 0: v is an empty vector", 3),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BROKEN))
def test_vectors_that_are_none_are_one_line(spark: Any, tmp_path: Path, case: str) -> None:
    vectors, line, code = BROKEN[case]
    places = ["--input", with_vectors(tmp_path / "in", vectors), "--output", tmp_path / "out", "--image-shape", "3x2x2"]
    done = run_job("distribution_aware.py", *places, "--workers", 2, "--clusters", 2, "--embedding", "v", "--quiet")
    assert (done.code, line in done.err) == (code, True), done.err
    assert "\n" not in done.err.strip()
    assert not (tmp_path / "out").exists()


def test_a_column_that_is_not_there_is_refused_and_binaries_have_none(spark: Any, tmp_path: Path) -> None:
    source = with_vectors(tmp_path / "in", pa.array([ROW] * 30, VECTORS))
    flags = ["--output", tmp_path / "out", "--workers", 2, "--embedding", "w", "--image-shape", "3x2x2", "--quiet"]
    done = run_job("distribution_aware.py", "--input", source, *flags)
    assert done.code == 2
    assert "--embedding w is no column" in done.err
    labels, images = make_rows(30, pixels=12)
    source = write_binary(tmp_path / "binary", labels, images)
    done = run_job("distribution_aware.py", "--input", source, *flags, "--format", "cifar10-binary")
    assert done.code == 2
    assert "holds cifar10-binary files" in done.err


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


KINDS = [
    ("class_cluster.py", "list"),
    *(("distribution_aware.py", kind) for kind in ("list", "fixed", "double", "spark")),
]


@pytest.mark.parametrize(("job", "kind"), only(KINDS[1:2], KINDS))
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


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("job", only(["class_cluster.py"], ["distribution_aware.py", "class_cluster.py"]))
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
    assert "shift of the mean row" in page
    assert run_job(job, *flags, "--clusters", 5 if job.startswith("dist") else 15).out.count("already committed") == 1
