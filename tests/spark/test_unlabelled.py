"""Rows without labels: sharded by every strategy that looks at none, the same as their labelled twins; refused elsewhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.shardset.schema import record_schema
from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.read_options import ReadOptions
from pipeline.upkeep.contents import details, workers_table
from tests.conftest import make_rows
from tests.support.application import run_job
from tests.support.tiers import only
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.models.build import build
from trainer.models.cnn import CNN
from trainer.models.linear import Linear

ROWS, WORKERS, SHAPE = 600, 4, (3, 8, 8)
BLIND = ["round_robin", "random", "random_iid", "distribution_aware"]
FITTED = ["--clusters", "12", "--components", "10"]


def write(path: Path, images: np.ndarray[Any, Any], **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    field = record_schema(Layout(SHAPE), neighbourhood=False, copy=False).field("image")
    names = pa.schema([*[pa.field(name, column.type) for name, column in columns.items()], field])
    column = pa.array([image.tobytes() for image in images], pa.binary())
    pq.write_table(pa.table([*columns.values(), column], names), path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> dict[str, Path]:
    """The same images with labels, without, and with a real number in their place; training rows and evaluation rows."""
    root = tmp_path_factory.mktemp("src")
    labels, images = make_rows(ROWS + 60, seed=3, pixels=192)
    images[[11, 300]] = np.random.default_rng(3).integers(0, 2, (2, 192)) * 255
    of_rows = {
        "labelled": {"label": pa.array(labels, pa.int32())},
        "bare": {},
        "targets": {"target": pa.array(labels * 0.5, pa.float32())},
    }
    for name, columns in of_rows.items():
        write(root / name / "a.parquet", images[:ROWS], **{key: column[:ROWS] for key, column in columns.items()})
        write(root / f"{name}-eval" / "a.parquet", images[ROWS:], **{k: column[ROWS:] for k, column in columns.items()})
    return {path.name: path for path in root.iterdir()}


def job(name: str) -> list[str]:
    return ["distribution_aware.py", *FITTED] if name == "distribution_aware" else ["baseline.py", "--strategy", name]


def make(name: str, source: Path, output: Path, *extra: Any) -> dict[str, Any]:
    done = run_job(*job(name), "--input", source, "--output", output, "--workers", WORKERS, *extra)
    assert done.code == 0, done.err
    manifest: dict[str, Any] = json.loads((output / "manifest.json").read_text())
    return manifest


def tables(output: Path, manifest: dict[str, Any]) -> list[pa.Table]:
    """The rows of each worker."""
    return [
        pa.concat_tables(pq.read_table(output / file["path"]) for file in worker["files"])
        for worker in manifest["workers"]
    ]


PAIRS = [*((name, "bare") for name in BLIND), ("round_robin", "labelled")]
OF_TWO_KINDS = [("random", "bare"), ("distribution_aware", "bare"), ("round_robin", "labelled")]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "source"), only(OF_TWO_KINDS, PAIRS))
def test_each_row_goes_where_its_labelled_twin_goes(
    sources: dict[str, Path], tmp_path: Path, name: str, source: str
) -> None:
    labelled = make(name, sources["labelled"], tmp_path / "labelled", "--no-report")
    reported = name in ("round_robin", "distribution_aware")
    beside = ["--eval-input", sources[f"{source}-eval"], *([] if reported else ["--no-report"])]
    bare = make(name, sources[source], tmp_path / "bare", "--unlabelled", *beside)
    assert (bare["labels"], bare["rows"]) == ({"columns": [], "num_classes": 1}, ROWS)
    for with_labels, without in zip(
        tables(tmp_path / "labelled", labelled), tables(tmp_path / "bare", bare), strict=True
    ):
        assert "label" not in without.schema.names
        assert without.equals(with_labels.drop_columns(["label"]))
    assert pq.read_schema(tmp_path / "bare" / bare["eval"]["files"][0]["path"]).names == ["id", "image", "copy"]
    if reported:  # it tells nothing of classes
        page = (tmp_path / "bare" / "report.html").read_text()
        assert "Classes on each worker" not in page
        assert "by class" not in page
        assert json.loads((tmp_path / "bare" / "quality.json").read_text())["classes"] is None
    shards = open_committed(Store(), str(tmp_path / "bare"))
    assert "class" not in workers_table(shards)
    assert ("labels", "none") in details(shards)


def test_resharding_keeps_them_and_a_rerun_finds_them(sources: dict[str, Path], tmp_path: Path) -> None:
    make("random", sources["bare"], tmp_path / "four", "--unlabelled", "--no-report")
    flags = ["--input", tmp_path / "four", "--output", tmp_path / "two", "--workers", 2, "--no-report"]
    assert run_job("reshard.py", *flags).code == 0
    places = ["--input", sources["bare"], "--unlabelled", "--no-report", "--workers", 2]
    assert run_job(*job("random"), *places, "--output", tmp_path / "direct").code == 0
    both = [json.loads((tmp_path / folder / "manifest.json").read_text()) for folder in ("two", "direct")]
    files = [[file["sha256"] for worker in manifest["workers"] for file in worker["files"]] for manifest in both]
    assert files[0] == files[1]
    again = run_job(*job("random"), *places, "--output", tmp_path / "direct")
    assert again.code == 0
    assert "already committed" in again.out
    labelled = run_job(*job("random"), "--input", sources["labelled"], "--no-report", "--workers", 2,
                       "--output", tmp_path / "direct")  # fmt: skip
    assert labelled.code == 2  # another configuration
    assert "--overwrite" in labelled.err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["stratified.py"], "stratified needs labels"),
        (["class_cluster.py"], "class_cluster needs labels"),
        (["submodular.py"], "submodular needs labels"),
        (["compare.py"], "stratified needs labels"),
        (["distribution_aware.py"], "--unlabelled needs --clusters"),
        (["baseline.py", "--num-classes", "3"], "--unlabelled and --num-classes exclude each other"),
    ],
)
def test_what_needs_labels_says_so_before_anything_is_done(
    sources: dict[str, Path], tmp_path: Path, args: list[str], line: str
) -> None:
    done = run_job(*args, "--unlabelled", "--input", sources["bare"], "--output", tmp_path / "out", "--workers", 2)
    assert done.code == 2
    assert line in done.err
    assert "\n" not in done.err.strip()
    assert not (tmp_path / "out").exists()


def test_a_pickle_without_labels_is_read_without_them(tmp_path: Path) -> None:
    images = make_rows(20)[1]
    for name, batch in {"none": {b"data": images}, "broken": {b"data": images, b"labels": [1, 2]}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
        dataset = discover(Store(), str(tmp_path / name), run=serial, read_options=ReadOptions(unlabelled=True))
        (block,) = dataset.read(0, 20)
        np.testing.assert_array_equal(block.images, images)
        assert not block.labels.any()
    with pytest.raises(DataError, match=r"data_batch_1 has no labels: a pickle has them in labels or fine_labels"):
        discover(Store(), str(tmp_path / "none"), run=serial)


def test_rows_without_labels_are_refused_without_the_flag(sources: dict[str, Path], tmp_path: Path) -> None:
    done = run_job("baseline.py", "--input", sources["bare"], "--output", tmp_path / "out", "--workers", 2)
    assert done.code == 3
    assert "--unlabelled" in done.err
    assert not (tmp_path / "out").exists()


def test_unlabelled_rows_suit_models_of_targets_not_of_classes(sources: dict[str, Path], tmp_path: Path) -> None:
    make("random", sources["targets"], tmp_path / "out", "--unlabelled", "--no-report")
    shards = open_shards(str(tmp_path / "out"))
    assert shards.inputs.has_targets
    loaded = [load_worker(shards, worker, targets=True) for worker in range(WORKERS)]
    assert sum(int(hash) for rows in loaded for hash in rows.hashes) % 2**64 == shards.fingerprint
    assert sorted(float(target) for rows in loaded for target in rows.labels) == sorted(
        pq.read_table(sources["targets"]).column("target").to_pylist()
    )
    with pytest.raises(UsageError, match="no labels to learn"):
        build(CNN(), shards.inputs, 0)
    assert build(Linear(), shards.inputs, 0).targets
