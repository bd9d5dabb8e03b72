"""Delta and Iceberg tables as inputs, read by their own libraries, in one JVM of a Spark that both support."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest

import pipeline
from tests.clusters import QUICK_START, ROOT, spark_submit
from tests.clusters.artifacts import lake_jars
from tests.clusters.environments import LAKE
from tests.conftest import make_rows
from tests.support.commands import BATCH, JOBS, plan_batch, read_batch

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
ROWS = 120
ICEBERG = "lake.db.images"
# Writes the rows of a Parquet file to both tables, then deletes some rows and updates others, which stay in the files.
PROGRAM = f"""
import sys
from pyspark.sql import SparkSession
rows, delta = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
data = spark.read.parquet(rows).repartition(3)
data.write.format("delta").option("delta.enableDeletionVectors", "true").save(delta)
data.writeTo("{ICEBERG}").tableProperty("write.delete.mode", "merge-on-read").create()
for table in (f"delta.`{{delta}}`", "{ICEBERG}"):
    spark.sql(f"DELETE FROM {{table}} WHERE key % 7 = 3").collect()
    spark.sql(f"UPDATE {{table}} SET label = 2 WHERE key % 5 = 1").collect()
sys.exit()
"""
CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
    # The defaults, 50 and 200 tasks, are for large tables.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "2",
}


def digests(folder: Path) -> list[str]:
    shards = pipeline.open_shards(str(folder))
    return [file.sha256 for file in [*shards.files(), *shards.eval_files()]]


def test_delta_and_iceberg_give_the_set_of_their_current_rows(tmp_path: Path) -> None:
    """Files of both tables hold deleted and replaced rows too. Each table is the training rows of one set and the
    evaluation rows of the other."""
    labels, images = make_rows(ROWS, pixels=48)
    keys = np.arange(ROWS) * 3
    columns = {"key": keys, "image": [image.tobytes() for image in images], "label": labels.astype("i4")}
    rows = pd.DataFrame(columns)
    rows.to_parquet(tmp_path / "rows.parquet", index=False)
    deleted = keys[keys % 7 == 3].tolist()
    current = rows[~rows.key.isin(deleted)].copy()
    current.loc[current.key % 5 == 1, "label"] = 2
    files = (tmp_path / "train.parquet", tmp_path / "test.parquet")
    for file in files:
        current.to_parquet(file, index=False)
    program = tmp_path / "write.py"
    program.write_text(PROGRAM)

    delta = tmp_path / "delta"
    tables = (f"delta:{delta}", f"iceberg:{ICEBERG}")
    flags = ("--image-shape", "3x4x4", "--workers", 3, "--no-report")
    key = ("--id-column", "key")
    job = JOBS["stratified.py"]
    plan: list[tuple[object, ...]] = [(program, tmp_path / "rows.parquet", delta)]
    sources = {"a": (tables, key), "b": (tables[::-1], key), "files": (files, ())}
    for name, ((train, held_out), more) in sources.items():
        plan.append((job, "--input", train, "--eval-input", held_out, "--output", tmp_path / name, *flags, *more))
    plan.append((job, "--input", delta, "--output", tmp_path / "none", *flags))

    LAKE.make()
    spark = LAKE.packages / "pyspark"
    environment = {
        "SPARK_HOME": str(spark),
        "PYTHONPATH": os.pathsep.join([str(LAKE.packages), str(ROOT)]),
        "SPARK_SUBMIT_OPTS": " ".join(QUICK_START),  # the class archive is of another Spark
    }
    jars = ",".join(map(str, lake_jars()))
    conf = {**CONF, "spark.jars": jars, "spark.sql.catalog.lake.warehouse": str(tmp_path / "iceberg")}
    batch = plan_batch(plan, path=[ROOT], spark=True)
    *succeeded, refused = read_batch(spark_submit(BATCH, batch, conf=conf, env=environment))
    for result in succeeded:
        assert result.code == 0, result.out[-3000:] + result.err[-3000:]
    assert (refused.code, f"--input delta:{delta} --id-column" in refused.err) == (3, True), refused.err
    assert len(digests(tmp_path / "files")) > 3
    assert digests(tmp_path / "a") == digests(tmp_path / "b") == digests(tmp_path / "files")
    for folder in (delta, tmp_path / "iceberg"):
        parquet = [path for path in folder.rglob("*.parquet") if "delete" not in path.name]
        assert ds.dataset(parquet).count_rows(ds.field("key").isin(deleted)) > 0
