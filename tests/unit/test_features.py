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
from tests.support.application import run_job
from trainer.data.opening import open_shards

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


VECTORS = pa.list_(pa.float32())


def with_vectors(folder: Path, vectors: pa.Array) -> Path:
    """Small images, alike in all rows, beside vectors."""
    folder.mkdir()
    images = pa.array([bytes(12)] * len(vectors), pa.binary())
    labels = pa.array(np.arange(len(vectors)) % 3, pa.int32())
    pq.write_table(pa.table({"image": images, "label": labels, "v": vectors}), folder / "a.parquet", row_group_size=70)
    return folder


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
