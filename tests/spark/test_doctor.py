"""The command doctor on a local Spark, and what jobs find out before they read a row."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline import entry
from pipeline.core.errors import UsageError
from pipeline.core.storage.local import LocalFiles
from pipeline.core.storage.store import Store
from pipeline.doctor.beforehand import check_inputs
from tests.clusters import ROOT
from tests.conftest import make_rows, write_binary
from tests.support.application import Ended, run_job, run_program
from tests.support.places import files_below
from tests.unit.test_jobs import SMALL, assert_one_line


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("doctor") / "cifar", *make_rows(300, pixels=192))


def doctor(*arguments: object) -> Ended:
    return run_program(Path(entry.__file__), "doctor", *arguments)


def in_process_of_its_own(*arguments: object, **env: str) -> Ended:
    """Run the command where no Spark runs."""
    command = [sys.executable, "-m", "pipeline", "doctor", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def levels(result: Ended) -> dict[str, str]:
    """Return the level of each check by its name, the worst of those that share one."""
    found: dict[str, str] = {}
    for line in result.out.splitlines()[:-1]:
        level, name = line.split()[:2]
        if found.get(name) != "FAILED":
            found[name] = level
    return found


def test_a_sound_place_has_no_failed_check(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    result = doctor("--input", source, "--output", tmp_path / "a" / "b", "--master", "local[2]")
    assert result.code == 0, result.out + result.err
    found = levels(result)
    assert {"master", "executors", "python", "java", "spark", "open", "temporary", "kerberos", "umask"} <= set(found)
    assert {"input", "output", "clocks", "extras"} <= set(found)
    assert "FAILED" not in found.values()
    assert not list(tmp_path.iterdir()), "a trace of it is left"


def test_the_drivers_side_needs_no_spark(source: Path, tmp_path: Path) -> None:
    """Failed checks are exit code 1, in JSON too."""
    (tmp_path / "file").touch()
    result = doctor("--input", tmp_path / "no", "--output", tmp_path / "file" / "o", "--json")
    assert result.code == 1, result.out
    found = json.loads(result.out)
    assert found["failed"] is True
    failed = {check["name"]: check["text"] for check in found["checks"] if check["level"] == "FAILED"}
    assert set(failed) == {"input", "output"}
    assert "does not exist" in failed["input"]
    assert files_below(tmp_path) == {"file"}


def test_a_dead_master_is_one_line() -> None:
    result = in_process_of_its_own("--master", "spark://127.0.0.1:1")
    assert result.code == 1, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("FAILED")]
    assert "no Spark master answers at spark://127.0.0.1:1" in line
    assert "Traceback" not in result.err


@pytest.mark.full
def test_executors_without_packages_are_one_line(tmp_path: Path) -> None:
    """By an interpreter that has the standard library alone."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    result = in_process_of_its_own("--master", "local[1]", PYSPARK_PYTHON=str(bare))
    assert result.code == 1, result.out + result.err
    failed = [line for line in result.out.splitlines() if line.startswith("FAILED")]
    assert failed
    assert all("PYSPARK_PYTHON or --archives" in line for line in failed), failed
    assert "Traceback" not in result.out


def test_a_job_finds_before_its_scan_that_it_may_not_write(
    spark: SparkSession, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "deep" / "o"

    def refuse(self: LocalFiles, path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(LocalFiles, "makedirs", refuse)
    done = run_job("stratified.py", "--input", source, "--output", output, "--workers", 2, *SMALL)
    assert_one_line(done, 2, f"--output {output} may not be written: Read-only file system")
    assert "scan" not in done.err
    assert not output.parent.exists()


def test_a_job_that_fails_in_its_scan_leaves_no_folders(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "o"
    flags = ("--workers", 2, *SMALL, "--num-classes", 2)
    done = run_job("stratified.py", "--input", source, "--output", output, *flags)
    assert_one_line(done, 3, "is not in 0..1")
    assert not output.parent.exists()


class Elsewhere:
    """A context of a cluster whose only executor sees no local path."""

    master, defaultParallelism = "spark://host:7077", 1

    def __init__(self, spark: SparkSession) -> None:
        self.real = spark.sparkContext

    def parallelize(self, items: Any, tasks: int) -> Any:
        return self.real.parallelize(items, tasks)


def test_inputs_that_executors_do_not_see_are_refused(spark: SparkSession, source: Path) -> None:
    context: Any = Elsewhere(spark)
    check_inputs(context, Store(), {"--input": f"{source}/*"})
    check_inputs(spark.sparkContext, Store(), {"--input": "/not/here"})  # a local master's executor is the driver
    with pytest.raises(UsageError, match=r"--input /not/here is local, and .* do not see it"):
        check_inputs(context, Store(), {"--input": "/not/here"})


def test_executors_without_tokens_are_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of this machine have neither ticket nor tokens."""
    store = Store((("hadoop.security.authentication", "kerberos"),))
    context: Any = Elsewhere(spark)
    with pytest.raises(UsageError, match="have neither ticket nor tokens: YARN gives"):
        check_inputs(context, store, {"--input": "hdfs://h:1/in"})
    check_inputs(context, store, {"--input": "s3://bucket/in"})
