"""``python -m trainer embed``: a table with the pipeline's ids, better than the mean image, the same bits after any kill."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.strategies.stratified import Stratified
from pipeline.strategies.submodular import Submodular
from tests.support.sharding_runs import QUIET, digests
from tests.unit.test_embed import FAST, ROWS, SHAPE, make_table, smooth_images, write_source
from trainer.embed.options import Embedding
from trainer.embed.run import embed
from trainer.models.networks.autoencoder import code_length


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("in"))


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_table(source, tmp_path_factory.mktemp("made"))


@pytest.mark.full
def test_ids_are_those_of_the_pipeline_and_of_its_shards(
    spark: SparkSession, source: Path, made: Path, tmp_path: Path
) -> None:
    """A row's vector is the same whether it was read from the input or from shards, under the id that the jobs gave it."""
    request = Request(str(source), str(tmp_path / "set"), 3, read_options=ReadOptions("cifar10-binary", SHAPE))
    manifest = shard(spark.sparkContext, request, Stratified(), QUIET).shards.manifest.to_json()
    options = {key: value for key, value in FAST.items() if key not in ("image_shape", "format")}
    target = tmp_path / "by-shards.parquet"
    embed(Embedding(output=str(target), shards=str(tmp_path / "set"), **options))
    assert pq.read_table(target).equals(pq.read_table(made))
    images = smooth_images(ROWS).reshape(ROWS, -1)
    for file in manifest["workers"][1]["files"]:
        part = pq.read_table(tmp_path / "set" / file["path"])
        for row, image in zip(part["id"].to_pylist(), part["image"].to_pylist(), strict=True):
            assert image == images[row].tobytes()


@pytest.mark.full
def test_the_jobs_take_the_table(spark: SparkSession, source: Path, made: Path, tmp_path: Path) -> None:
    request = Request(str(source), str(tmp_path / "out"), 3, read_options=ReadOptions("cifar10-binary", SHAPE))
    manifest = shard(spark.sparkContext, request, Submodular(embedding=str(made)), QUIET).shards.manifest.to_json()
    assert manifest["params"]["components_fitted"] == code_length(SHAPE)
    assert digests(manifest)
