"""jobs/compare.py with variants of a strategy, each with flags of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.strategies.submodular import Submodular
from tests.spark.test_jobs import shas
from tests.support.application import run_job
from tests.support.sharding_runs import QUIET, vectors_in_parquet
from tests.unit.test_embedding_table import write_table
from tests.unit.test_metrics_file import metrics_of

ROWS = 90


@pytest.fixture
def source(tmp_path: Path) -> Path:
    vectors = np.random.default_rng(8).normal(size=(ROWS, 4)).astype(np.float32)
    return vectors_in_parquet(tmp_path / "in", vectors, np.arange(ROWS) % 3)


@pytest.mark.full
def test_variants_stand_beside_the_strategy_with_flags_of_their_own(
    spark: SparkSession, tmp_path: Path, source: Path
) -> None:
    vectors = np.random.default_rng(5).normal(size=(ROWS, 6)).astype(np.float32)
    table = write_table(tmp_path / "embeddings", np.arange(ROWS), vectors)
    flags = [
        "--input",
        source,
        "--output",
        tmp_path / "c",
        "--workers",
        3,
        "--image-shape",
        "3x2x2",
        "--strategies",
        "submodular",
    ]
    flags += ["--metrics-file", tmp_path / "job.prom"]
    flags += ["--embedding", "pca:3", "--function", "facility-location", "--variants"]
    done = run_job(
        "compare.py", *flags, f"learned=submodular --embedding {table}; cut=submodular --function graph-cut;"
    )
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [(row["name"], row["strategy"]) for row in rows] == [
        (name, "submodular") for name in ("submodular", "learned", "cut")
    ]
    metrics = metrics_of(tmp_path / "job.prom", {"output": f"{tmp_path}/c", "strategy": "compare"})
    assert {f"phase_seconds {row['name']}" for row in rows} <= metrics.keys()
    for name in ("submodular", "learned", "cut"):
        assert f"\n{name} " in done.out
        assert f"<b>{name}</b>" in (tmp_path / "c" / "compare.html").read_text()
    params = {row["name"]: open_committed(Store(), f"{tmp_path}/c/{row['name']}").manifest.params for row in rows}
    assert {name: (of["embedding"], of["function"]) for name, of in params.items()} == {
        "submodular": ("pca:3", "facility-location"),
        "learned": (table, "facility-location"),
        "cut": ("pca:3", "graph-cut"),
    }
    alone = Request(str(source), str(tmp_path / "alone"), 3, read_options=ReadOptions(shape=(3, 2, 2)))
    shard(spark.sparkContext, alone, Submodular(embedding=table, function="facility-location"), QUIET)
    assert shas(tmp_path / "c" / "learned") == shas(tmp_path / "alone") != shas(tmp_path / "c" / "submodular")
