"""The jobs as a user runs them: spark-submit from another folder, exit codes, one-line errors, reruns, batch runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.spark import session
from tests.clusters import spark_submit
from tests.conftest import make_rows, write_binary
from tests.support.application import Ended, run_job
from tests.unit.test_jobs import JOBS, SMALL, STACK_TRACE, assert_one_line

FIT = ["--clusters", "6", "--components", "5"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("jobs") / "cifar", *make_rows(600, pixels=192))


def submit(job: str, *args: object) -> Ended:
    """A job by spark-submit, which puts both of a Python program's streams on its own stdout."""
    done = spark_submit(JOBS / job, *args)
    return Ended(done.returncode, done.stdout, done.stderr)


def shas(output: Path) -> list[str]:
    manifest = json.loads((output / "manifest.json").read_text())
    files = [file for worker in manifest["workers"] for file in worker["files"]]
    for file in files:
        assert hashlib.sha256((output / file["path"]).read_bytes()).hexdigest() == file["sha256"]
    return [file["sha256"] for file in files]


def test_a_run_its_rerun_another_configuration_and_an_overwrite(
    spark: SparkSession, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One life of an output, begun by spark-submit from a folder that is not the checkout."""
    monkeypatch.chdir(tmp_path)
    output, held_out = tmp_path / "o", tmp_path / "held-out.bin"
    held_out.write_bytes((source / "data_batch_2.bin").read_bytes())
    flags = ["--input", source, "--eval-input", held_out, "--output", output, "--workers", 3]
    flags += [*SMALL, *FIT]
    done = submit("distribution_aware.py", *flags)
    assert done.code == 0, done.err
    assert "600 rows of 3x8x8 in 2 cifar10-binary files (data_batch_1.bin and data_batch_2.bin)" in done.out + done.err
    assert "; 300 evaluation rows (held-out.bin)" in done.out + done.err
    assert "committed" in done.out
    assert str(output / "report.html") in done.out
    assert (output / "report.html").read_text().startswith("<!DOCTYPE html>")
    first = shas(output)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["eval"]["rows"] == 300
    assert set(manifest["seconds"]) >= {"discover", "scan", "pca", "project", "kmeans", "assign", "write", "eval"}
    assert {path.name for path in output.iterdir()} == {
        "manifest.json", "_manifests", "report.html", "quality.json", "_model", "_eval", "_assignment",
        "worker=000", "worker=001", "worker=002",
    }  # fmt: skip

    again = run_job("distribution_aware.py", *flags)
    assert again.code == 0, again.err
    assert "already committed" in again.out
    assert json.loads((output / "manifest.json").read_text()) == manifest

    touched = source / "data_batch_1.bin"
    os.utime(touched)  # another time, the same bytes: the content decides
    again = run_job("distribution_aware.py", *flags)
    assert (again.code, "already committed" in again.out) == (0, True)

    other = run_job("distribution_aware.py", *flags, "--seed", 1)
    assert_one_line(other, 2, "already holds a committed set (distribution_aware for 3 workers)", "--overwrite")
    assert shas(output) == first

    replaced = run_job("distribution_aware.py", *flags, "--seed", 1, "--overwrite", "--no-report")
    assert replaced.code == 0, replaced.err
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["seed"] == 1
    assert shas(output) != first
    listed = {file["path"] for worker in manifest["workers"] for file in worker["files"]}
    assert {path.relative_to(output).as_posix() for path in output.glob("worker=*/*")} == listed


def test_labels_that_changed_under_an_old_time_are_noticed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rsync -t, cp -p and tar keep the time of a file. HDFS has no other mark of a change: there --rescan helps."""
    file = write_binary(tmp_path / "in", *make_rows(200, pixels=192)) / "data_batch_1.bin"
    flags = ("--input", tmp_path / "in", "--output", tmp_path / "o", "--workers", 2, *SMALL, "--no-report")
    assert run_job("stratified.py", *flags).code == 0

    def relabel(label: int) -> None:
        data, time = bytearray(file.read_bytes()), file.stat()
        data[0] = label
        file.write_bytes(data)
        os.utime(file, ns=(time.st_atime_ns, time.st_mtime_ns))

    relabel((file.read_bytes()[0] + 1) % 10)
    assert_one_line(run_job("stratified.py", *flags), 2, "another configuration or input", "--overwrite")
    monkeypatch.setattr("pipeline.core.storage.files.FileInfo.change", "", raising=False)
    monkeypatch.setattr("pipeline.input.dataset.Dataset.listing", lambda self: "as HDFS tells")
    assert run_job("stratified.py", *flags, "--overwrite").code == 0
    relabel((file.read_bytes()[0] + 1) % 10)
    assert "already committed" in run_job("stratified.py", *flags).out
    assert_one_line(run_job("stratified.py", *flags, "--rescan"), 2, "another configuration or input", "--overwrite")


def test_an_evaluation_label_without_a_training_class_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    for name, labels in (("train", [0, 1, 1, 0]), ("held", [0, 7])):
        images = pa.array([bytes(192)] * len(labels), pa.binary())
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / name / "a.parquet")
    flags = ("--input", tmp_path / "train", "--eval-input", tmp_path / "held", "--output", tmp_path / "o")
    done = run_job("baseline.py", *flags, "--workers", 2, "--image-shape", "3x8x8")
    assert_one_line(done, 3, "held has the label 7, the input has only 2 classes", "--num-classes")
    assert not (tmp_path / "o").exists()


def test_a_reshard_draws_the_shares_of_the_job_itself(spark: SparkSession, tmp_path: Path) -> None:
    """A name of shares is drawn with the seed of the set, for which reshard has no flag."""
    source = write_binary(tmp_path / "in", *make_rows(300, pixels=192))
    shape = ("--image-shape", "3x8x8")
    about = ("--workers", 4, "--no-report", "--ratios", "lognormal:0.5")
    assert (
        run_job("stratified.py", "--input", source, "--output", tmp_path / "a", *about, *shape, "--seed", 7).code == 0
    )
    three = ("--input", source, "--output", tmp_path / "b", "--workers", 3, *shape, "--seed", 7, "--no-report")
    assert run_job("stratified.py", *three).code == 0
    assert run_job("reshard.py", "--input", tmp_path / "b", "--output", tmp_path / "c", *about).code == 0
    assert shas(tmp_path / "c") == shas(tmp_path / "a")


def test_workers_without_rows_are_told_of_before_any_row_is_written(spark: SparkSession, tmp_path: Path) -> None:
    source = write_binary(tmp_path / "in", *make_rows(200, pixels=192))
    flags = ("--input", source, "--output", tmp_path / "o", "--ratios", "1000:1:1", *SMALL, "--no-report")
    done = run_job("stratified.py", *flags)
    assert_one_line(done, 2, "2 of 3 workers would get no rows (the first is 1)", "--allow-empty")
    assert "write" not in done.out
    assert not (tmp_path / "o").exists()
    assert run_job("stratified.py", *flags, "--allow-empty").code == 0


@pytest.fixture
def output_since(spark: SparkSession, pytestconfig: pytest.Config) -> Iterator[Callable[[], str]]:
    """Return a function that returns what this process and its JVM have printed since, with a job's log levels."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.read_global_capture()  # the JVM writes to the file that pytest has put in place of its standard error
    log4j: Any = spark.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    levels = {name: log4j.LogManager.getLogger(name).getLevel() for name in session.NOISY}
    log4j.LogManager.getLogger(session.NOISY[0]).error("is captured")
    assert "is captured" in "".join(capture.read_global_capture())
    session._quiet(spark.sparkContext)
    yield lambda: "".join(capture.read_global_capture())
    for name, level in levels.items():
        log4j.core.config.Configurator.setLevel(name, level)


def test_broken_data_is_one_line_and_exit_3_and_leaves_nothing(
    source: Path, tmp_path: Path, output_since: Callable[[], str]
) -> None:
    """Print a job's own line, and none of Spark's. tests/spark/test_session.py submits a program whose log is quiet."""
    labels, images = make_rows(600, pixels=192)
    labels[450] = 77
    folder = write_binary(tmp_path / "c", labels, images)
    made = run_job("stratified.py", "--input", source, "--output", tmp_path / "made", "--workers", 5, *SMALL)
    assert made.code == 0, made.err
    (next((tmp_path / "made").glob("worker=003/*"))).write_bytes(b"rotten")
    flags = ("--input", folder, "--output", tmp_path / "o", *SMALL)
    label = run_job("stratified.py", *flags, "--workers", 3, "--num-classes", 10)
    workers = run_job("baseline.py", *flags, "--workers", 601)
    file = run_job("reshard.py", "--input", tmp_path / "made", "--output", tmp_path / "o", "--workers", 2)
    rest = output_since()
    assert_one_line(label, 3, "data_batch_2.bin, offset 28950 (record 150): label 77 is not in 0..9")
    assert_one_line(workers, 2, "--workers 601 is more than the 600 rows")
    assert_one_line(file, 3, "worker=003", "damaged")
    for sign in STACK_TRACE:
        assert sign not in rest
    assert not (tmp_path / "o").exists()


def test_one_interval_writes_one_place_with_the_same_bytes(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    flags = ["--input", source, "--workers", 2, *SMALL, "--no-report", "--strategy", "random"]
    for root in ("a", "b"):
        done = run_job("baseline.py", *flags, "--output", tmp_path / root / "ds={ds}", "--ds", "2026-01-31")
        assert done.code == 0, done.err
    outputs = [tmp_path / root / "ds=2026-01-31" for root in ("a", "b")]
    assert shas(outputs[0]) == shas(outputs[1])
    manifests = [json.loads((output / "manifest.json").read_text()) for output in outputs]
    paths = [[file["path"] for worker in made["workers"] for file in worker["files"]] for made in manifests]
    names = [[path.replace(made["generation"], "*") for path in of] for of, made in zip(paths, manifests, strict=True)]
    assert names[0] == names[1]
    assert manifests[0]["interval"] == {"ds": "2026-01-31"}
    later = run_job("baseline.py", *flags, "--output", outputs[0], "--ds", "2026-02-01")
    assert_one_line(later, 2, "--overwrite")


@pytest.mark.usefixtures("undrawn")
def test_compare_leaves_out_a_strategy_that_does_not_suit_the_rows(source: Path, tmp_path: Path) -> None:
    flags = ["--input", source, "--output", tmp_path / "cmp", "--workers", 3, *SMALL]
    done = run_job("compare.py", *flags, "--strategies", "random,hash", "--family", "lsh", "--functions", 40)
    assert done.code == 0, done.err
    assert "hash is skipped: too many groups of similar rows have at most as many rows as there are workers" in done.err
    assert [row["strategy"] for row in json.loads((tmp_path / "cmp" / "compare.json").read_text())] == ["random"]
    done = run_job("compare.py", *flags, "--strategies", "hash", "--family", "lsh", "--functions", 40, "--overwrite")
    assert_one_line(done, 2, "too many groups")
