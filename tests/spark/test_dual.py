"""The PCA of fewer images than pixels: the same components as by the pixels' covariance, and the same bits for any order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyspark.sql import SparkSession

from pipeline.clustering import dual, pca
from pipeline.clustering.pca import BlockPCA, BlockPCAModel
from pipeline.core.errors import UsageError
from tests.support.application import run_job
from tests.support.tiers import only
from tests.unit.test_dual import images_of


def test_a_table_of_large_images_is_fitted_in_one_task(spark: SparkSession) -> None:
    images = images_of(30, 3 * 70 * 70)
    table = spark.createDataFrame([(bytearray(image.tobytes()),) for image in images], "image binary")
    models = [BlockPCA(components=4).fit(each) for each in (table, table.repartition(4))]
    expected, _ = dual.fit(images, 4)
    for model in models:
        assert np.array_equal(model.spectrum.components, expected.components)
        assert model.rows == 30


def test_components_that_fill_the_drivers_heap_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would shut down in the middle of the job, or wait for ever, and not say why."""
    images = images_of(30, 3 * 70 * 70)
    rows = spark.sparkContext.parallelize([images])
    BlockPCA(components=4).fit_blocks(rows, 3 * 70 * 70, 30)
    monkeypatch.setattr(pca, "HEAP_COPIES", 10**6)
    with pytest.raises(
        UsageError, match="4 components of 14,700 pixels are 470 kB, too much for the driver's heap of "
    ):
        BlockPCA(components=4).fit_blocks(rows, 3 * 70 * 70, 30)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoded images of 224x224 in colour, of two kinds, and three that are like no other."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 256, (2, 8, 8, 3))
    labels = np.arange(90) % 2
    encoded = []
    for row, label in enumerate(labels):
        coarse = kinds[label] + rng.normal(0, 20, (8, 8, 3)) if row % 30 else rng.integers(0, 2, (8, 8, 3)) * 255
        pixels = coarse.clip(0, 255).astype(np.uint8).repeat(28, axis=0).repeat(28, axis=1)
        Image.fromarray(pixels).save(data := io.BytesIO(), "PNG")
        encoded.append(data.getvalue())
    folder = tmp_path_factory.mktemp("photographs")
    table = pa.table({"image": pa.array(encoded, pa.binary()), "label": pa.array(labels, pa.int32())})
    pq.write_table(table, folder / "train.parquet", row_group_size=40)
    return folder


@pytest.mark.parametrize("job", only(["class_cluster.py"], ["distribution_aware.py", "class_cluster.py"]))
def test_encoded_images_of_224_pixels_are_sharded_by_neighbourhood(
    spark: SparkSession, photographs: Path, tmp_path: Path, job: str
) -> None:
    flags = ["--clusters", 6, "--components", 8, *(["--no-whiten"] if job.startswith("dist") else [])]
    output = tmp_path / "out"
    done = run_job(job, "--input", photographs, "--output", output, "--workers", 4, *flags, "--no-report")
    assert done.code == 0, done.err
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["rows"], manifest["image"]["shape"]) == (90, [3, 224, 224])
    model = BlockPCAModel.load(f"file://{output}/_model/{manifest['generation']}/pca")
    assert model.spectrum.components.shape == (8, 3 * 224 * 224)
    ids = [pq.read_table(output / file["path"], columns=["id", "copy"]).to_pylist()
           for worker in manifest["workers"] for file in worker["files"]]  # fmt: skip
    assert sorted(row["id"] for rows in ids for row in rows if not row["copy"]) == list(range(90))
    if job.startswith("dist"):
        assert manifest["copies"] == 3 * 3  # those that are like no other, on every other worker
