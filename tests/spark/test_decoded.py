"""Rows that are dear to decode are decoded once, whoever asks and however often, or as ever where they cannot be kept."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import SparkSession

from pipeline.input.decoded import LOCAL_DIRS
from tests.conftest import make_rows
from tests.support.application import run_job
from tests.unit.test_decoded import write_png


def test_sparks_tasks_have_such_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    labels, images = make_rows(120, seed=4)
    folder = write_png(tmp_path / "in", labels, images)
    done = run_job(
        "stratified.py", "--input", folder, "--output", tmp_path / "out", "--workers", 3, "--no-report", "--quiet"
    )
    assert done.code == 0, done.err
    name = LOCAL_DIRS
    folders = spark.sparkContext.parallelize([0], 1).map(lambda _: os.environ[name].split(",")).first()
    # Whether rows are kept there depends on how full the disk is: see tests/unit/test_decoded.py.
    assert [folder for folder in folders if Path(folder, "decoded").is_dir()]
