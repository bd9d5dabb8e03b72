"""The job as spark-submit starts it, with local files: other libraries, killed drivers, and a NameNode that is down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters import spark_submit
from tests.clusters.cluster_runs import (
    FIT,
    JOB,
    LAYOUT,
    QUIET,
    Source,
    digests,
)


@pytest.mark.full
def test_cores_libraries_and_files_do_not_change_the_shards(small_set: Source, tmp_path: Path) -> None:
    arguments = ["--input", f"file:{small_set.folder}", "--output", tmp_path / "out", "--workers", 3, *LAYOUT, *FIT]
    done = spark_submit(
        JOB, *arguments, "--no-report", master="local[1]", conf={"spark.executorEnv.OMP_NUM_THREADS": "2"}, env=QUIET
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(str(tmp_path / "out")) == small_set.digests


def test_a_namenode_that_is_not_there_is_one_line_before_spark_starts(tmp_path: Path) -> None:
    nowhere = "hdfs://127.0.0.1:1"
    done = spark_submit(JOB, "--input", f"{nowhere}/in", "--output", tmp_path / "out", "--workers", 3, env=QUIET)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING: Using incub")]
    assert done.returncode == 1
    assert lines == [
        f"error: {nowhere}/in: Connection refused (os error 111); check that HDFS is up and reachable at {nowhere}"
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_stream_reads_a_local_folder_whatever_hadoops_default_is(small_set: Source, tmp_path: Path) -> None:
    done = spark_submit(
        JOB.with_name("hash_stream.py"),
        *("--source", small_set.folder, "--output", tmp_path / "out", "--workers", 3, *LAYOUT, "--trigger", "once"),
        conf={"spark.hadoop.fs.defaultFS": "hdfs://127.0.0.1:1"},
        env=QUIET,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()
