"""Shards by a table of (id, embedding): the same as by a column of the same vectors, however the table is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.embedding_table import open_embeddings
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.runs.shard import shard
from pipeline.strategies import embeddings
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.submodular import Submodular
from tests.support.application import run_job
from tests.support.sharding_runs import QUIET, digests, shas, vectors_in_parquet
from tests.support.tiers import only
from tests.unit.test_embedding_table import Vectors, write_table

ROWS, LENGTH = 200, 5


@pytest.fixture
def vectors() -> Vectors:
    return np.random.default_rng(4).normal(size=(ROWS, LENGTH)).astype(np.float32)


@pytest.fixture
def source(tmp_path: Path, vectors: Vectors) -> Path:
    return vectors_in_parquet(tmp_path / "in", vectors, np.arange(ROWS) % 3)


def sharded(spark: SparkSession, source: Path, output: Path, strategy: Any, **options: Any) -> Any:
    request = Request(str(source), str(output), 4, read_options=ReadOptions(shape=(3, 2, 2)), **options)
    return shard(spark.sparkContext, request, strategy, QUIET)


STRATEGIES: dict[str, Callable[[str], Any]] = {
    "submodular": lambda embedding: Submodular(embedding=embedding),
    "distribution_aware": lambda embedding: DistributionAware(embedding=embedding, clusters=6),
    "class_cluster": lambda embedding: ClassCluster(embedding=embedding, clusters=6),
    "hash": lambda embedding: Hash(embedding=embedding, functions=3),
}


@pytest.mark.parametrize("name", only(["hash"], STRATEGIES))
def test_a_table_gives_the_shards_of_a_column_of_the_same_vectors(
    spark: SparkSession, tmp_path: Path, vectors: Vectors, source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a shuffled table in several files, read in pieces, with a column of its vectors."""
    make = STRATEGIES[name]
    by_column = sharded(spark, source, tmp_path / "column", make("v")).shards.manifest.to_json()
    order = np.random.default_rng(1).permutation(ROWS)
    table = write_table(tmp_path / "cut", order.astype(np.int32), vectors[order], files=3, group=9)
    monkeypatch.setattr(embeddings, "point_pieces", lambda *_: 7)
    found = sharded(spark, source, tmp_path / "by-table", make(table)).shards.manifest.to_json()
    assert digests(found) == digests(by_column)
    assert found["params"]["embedding"] == table


def test_a_moved_table_with_the_same_content_makes_the_same_set(
    spark: SparkSession, tmp_path: Path, vectors: Vectors, source: Path
) -> None:
    """A set is found again by what its table holds wherever it lies."""
    first = write_table(tmp_path / "a", np.arange(ROWS), vectors)
    moved = write_table(tmp_path / "b", np.arange(ROWS), vectors)
    changed = write_table(tmp_path / "c", np.arange(ROWS), vectors + np.float32(1))
    output = tmp_path / "out"
    made = sharded(spark, source, output, Submodular(embedding=first))
    assert made.fresh
    assert len(made.shards.manifest.params["embedding_digest"]) == 16
    assert not sharded(spark, source, output, Submodular(embedding=first)).fresh
    assert not sharded(spark, source, output, Submodular(embedding=moved)).fresh
    with pytest.raises(Exception, match="another configuration or input"):
        sharded(spark, source, output, Submodular(embedding=changed))


def test_resharding_needs_a_table_of_the_same_content(
    spark: SparkSession, tmp_path: Path, vectors: Vectors, source: Path
) -> None:
    """A set by a table is dealt again as long as the table holds the same."""
    table = Path(write_table(tmp_path / "table", np.arange(ROWS), vectors))
    sharded(spark, source, tmp_path / "four", Submodular(embedding=str(table)))
    request = Request(str(tmp_path / "four"), str(tmp_path / "three"), 3)
    again = reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()
    direct = shard(
        spark.sparkContext,
        Request(str(source), str(tmp_path / "direct"), 3, read_options=ReadOptions(shape=(3, 2, 2))),
        Submodular(embedding=str(table)),
        QUIET,
    ).shards.manifest.to_json()
    assert shas(again) == shas(direct)
    pq.write_table(pq.read_table(table).slice(0, ROWS - 1), table / "001.parquet")
    done = run_job("reshard.py", "--input", tmp_path / "four", "--output", tmp_path / "two", "--workers", 2, "--quiet")
    assert (done.code, "holds other embeddings (" in done.err) == (3, True), done.err
    assert not (tmp_path / "two").exists()


def test_images_are_not_read_for_the_join(spark: SparkSession, tmp_path: Path, vectors: Vectors, source: Path) -> None:
    """The labels of the input are enough: an assignment is made with a file whose images are broken."""
    table = write_table(tmp_path / "table", np.arange(ROWS), vectors)
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions(shape=(3, 2, 2)))
    held = open_embeddings(Store(), table)
    from pipeline.input.embedding_table import KeptVectors, embedding_dataset

    (tmp_path / "kept").write_bytes(vectors.astype("<f4").tobytes())
    joined = embedding_dataset(dataset, held, (KeptVectors(0, ROWS, str(tmp_path / "kept")),))
    broken = pq.read_table(source / "a.parquet")
    nulls = pa.array([None] * ROWS, pa.binary())
    pq.write_table(broken.set_column(0, "image", nulls), source / "a.parquet")
    blocks = list(joined.read(30, 190))
    found = np.concatenate([block.images for block in blocks]).view(np.float32)
    np.testing.assert_array_equal(found, vectors[30:190])
    labels = np.concatenate([block.labels for block in blocks])
    np.testing.assert_array_equal(labels, np.arange(30, 190) % 3)


def broken(ids: list[int], line: str) -> tuple[list[int], str]:
    return ids, line


EVERY = list(range(ROWS))
BROKEN = {
    "missing": broken(EVERY[:150] + EVERY[152:], "row 150 has no embedding, nor have 1 others up to row 199; a table"),
    "doubled": broken([*EVERY, 7], "row 7 has 2 embeddings; a table needs every row of the input once"),
    "extra": broken([*EVERY, 200], "id 200 is not one of the rows 0..199"),
    "negative": broken([*EVERY[:-1], -1], "id -1 is not in 0.."),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_ids_that_are_not_those_of_the_input_are_one_line(
    spark: SparkSession, tmp_path: Path, source: Path, case: str
) -> None:
    ids, line = BROKEN[case]
    table = write_table(tmp_path / "table", np.array(ids), np.ones((len(ids), LENGTH), np.float32))
    refused(tmp_path, source, table, 3, line)


def refused(tmp_path: Path, source: Path, table: str, code: int, line: str) -> None:
    places = ["--input", source, "--output", tmp_path / "out", "--image-shape", "3x2x2", "--workers", 2]
    done = run_job("submodular.py", *places, "--embedding", table, "--quiet")
    assert (done.code, line in done.err) == (code, True), done.err
    assert "\n" not in done.err.strip()
    assert not (tmp_path / "out").exists()


def test_a_table_that_is_none_is_one_line(spark: SparkSession, tmp_path: Path, source: Path) -> None:
    refused(tmp_path, source, str(tmp_path / "nowhere"), 3, "nowhere does not exist; check --embedding")
    (tmp_path / "empty").mkdir()
    refused(tmp_path, source, str(tmp_path / "empty"), 3, "empty holds no table of embeddings")
    refused(tmp_path, source, str(source), 3, "has no column id; a table of embeddings has id and embedding, got image")
    text = tmp_path / "text.parquet"
    pq.write_table(pa.table({"id": [0, 1], "embedding": ["a", "b"]}), text)
    refused(tmp_path, source, str(text), 2, "holds string, not vectors")
    lengths = tmp_path / "lengths.parquet"
    pq.write_table(pa.table({"id": EVERY, "embedding": [[1.0]] * 150 + [[1.0, 2.0]] + [[1.0]] * 49}), lengths)
    refused(tmp_path, source, str(lengths), 3, "row 150: the vector has 2 numbers, the first one 1")
    lengths.write_bytes(lengths.read_bytes()[:-9])
    refused(tmp_path, source, str(lengths), 3, "lengths.parquet is damaged")
    refused(tmp_path, source, "table", 2, "named by a path, such as ./table")


def test_the_place_of_a_table_may_name_the_day(tmp_path: Path, source: Path, vectors: Vectors) -> None:
    write_table(tmp_path / "2026-01-31", np.arange(ROWS), vectors)
    places = ["--input", source, "--output", tmp_path / "out", "--image-shape", "3x2x2", "--workers", 2, "--no-report"]
    done = run_job("submodular.py", *places, "--embedding", f"{tmp_path}/{{ds}}", "--ds", "2026-01-31")
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["params"]["embedding"] == f"{tmp_path}/2026-01-31"
