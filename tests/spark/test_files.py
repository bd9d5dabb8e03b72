"""What an input names: a folder with its partitions, a file, a pattern; and the rows that are read of it."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from pipeline.core.storage.store import Store
from pipeline.input.dataset import discover, serial
from pipeline.input.read_options import ReadOptions
from tests.unit.test_files import IMAGES, LABELS, SHAPE, rows_of


def test_a_label_may_stand_in_the_folder_alone(spark: SparkSession, tmp_path: Path) -> None:
    """As Spark's own partitionBy() writes it."""
    rows = [(bytearray(image.tobytes()), int(label)) for image, label in zip(IMAGES, LABELS, strict=True)]
    spark.createDataFrame(rows, "image binary, label int").write.partitionBy("label").parquet(str(tmp_path / "in"))
    dataset = discover(Store(), str(tmp_path / "in"), run=serial, read_options=ReadOptions(shape=SHAPE))
    labels, images = rows_of(dataset)
    expected = sorted((int(label), image.tobytes()) for label, image in zip(LABELS, IMAGES, strict=True))
    assert sorted((int(label), image.tobytes()) for label, image in zip(labels, images, strict=True)) == expected
