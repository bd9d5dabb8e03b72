"""The jobs as a user runs them: spark-submit from another folder, exit codes, one-line errors, reruns, batch runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.command_line import parse
from pipeline.core.errors import UsageError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.storage.store import Store
from pipeline.runs.command import note_on_copies
from pipeline.runs.flags import read_request, sharding_parser
from pipeline.spark.shipping import PACKAGE
from pipeline.strategies import Strategy, class_cluster
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.random import Random
from tests.conftest import make_rows, write_binary
from tests.support.application import Ended, run_job

JOBS = PACKAGE.parent / "jobs"
SMALL = ["--format", "cifar10-binary", "--image-shape", "3x8x8"]
STACK_TRACE = ("Traceback", "\tat ", "Exception in thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("jobs") / "cifar", *make_rows(600, pixels=192))


def assert_one_line(done: Ended, code: int, *parts: str) -> None:
    output = done.out + done.err
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert done.code == code, output
    assert len(errors) == 1, output
    for part in parts:
        assert part in errors[0]
    for sign in STACK_TRACE:
        assert sign not in output


@pytest.mark.parametrize(
    ("strategy", "copies", "advice"),
    [
        (DistributionAware(clusters=9), 30, "give fewer --clusters for fewer copies"),
        (DistributionAware(clustering="dbscan", engine="scikit-learn", radius=2.0), 30, "give a larger --radius for"),
        (Hash(functions=6), 30, "give fewer --functions for fewer copies"),
        (DistributionAware(clusters=9), 10, ""),
    ],
)
def test_many_copies_are_noted_with_their_remedy(strategy: Strategy, copies: int, advice: str) -> None:
    manifest = Manifest(
        num_workers=2, workers=[], strategy=strategy.name, asked=strategy.params(), rows=1000, copies=copies
    )
    note = note_on_copies(ShardSet(Store(), "/set", manifest))
    assert bool(note) == bool(advice)
    assert advice in note


@pytest.mark.parametrize(
    ("clusters", "line"), [(None, ""), (20, ""), (19, "--clusters 19 for 10 "), (3, "--clusters 3 ")]
)
def test_one_cluster_per_class_is_said_to_be_stratified(
    clusters: int | None, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    per_class = []

    def cluster(context: Any, strategy: ClassCluster, number: int, **_: Any) -> Any:
        per_class.append(number)
        return SimpleNamespace(grouping=None, counts=None, params={}, models={})

    monkeypatch.setattr(class_cluster, "load_engine", lambda name: SimpleNamespace(cluster=cluster))
    context: Any = SimpleNamespace(scan=SimpleNamespace(num_classes=10))
    ClassCluster(clusters=clusters).fit(context)
    assert per_class == [1 if line else 2]
    remedy = "so class_cluster deals rows as stratified --start carry does; give at least 20"
    assert [line in record.message and remedy in record.message for record in caplog.records] == [True] * bool(line)


@pytest.mark.slow
def test_a_copied_job_imports_nothing_beside_its_folder(tmp_path: Path) -> None:
    """Spark copies a remote script below /tmp, where anybody may put a package of the same name."""
    guard = 'if Path(__file__).resolve().parent.name == "jobs":'
    assert all(guard in path.read_text() for path in JOBS.glob("*.py"))
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit('another package')")
    (tmp_path / "spark-1234").mkdir()
    job = tmp_path / "spark-1234" / "stratified.py"
    job.write_text((JOBS / "stratified.py").read_text())
    command = [sys.executable, str(job), "--help"]
    done = subprocess.run(
        command, cwd="/", env={"PYTHONPATH": str(JOBS.parent)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("job", sorted(path.name for path in JOBS.glob("*.py")))
def test_every_job_explains_itself_and_shadows_no_standard_module(job: Any) -> None:
    command = [sys.executable, str(JOBS / job), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0
    assert ("--input URI" in done.stdout) == (job not in ("benchmark.py", "hash_stream.py", "train.py"))
    assert "--output" in done.stdout
    assert "Exit codes" in done.stdout
    assert Path(job).stem not in sys.stdlib_module_names


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--workers", "0"], ["--workers must be at least 1, got 0"]),
        (["--workers", "many"], ["--workers", "'many'", "--help"]),
        ([], ["required", "--workers"]),
        (["--workers", "2", "--clusters", "0"], ["--clusters must be at least 1 and at most 65536, got 0"]),
        (["--workers", "2", "--components", "2.5"], ["--components", "2.5"]),
        (["--workers", "2", "--components", "-1"], ["--components", "-1"]),
        (["--workers", "2", "--sparse-if", "maybe"], ["--sparse-if", "maybe"]),
        (["--workers", "2", "--image-shape", "32"], ["--image-shape", "3x32x32"]),
        (["--workers", "2", "--ds", "yesterday"], ["--ds", "yesterday"]),
        (["--workers", "2", "--ds", "2026-01-01", "--run-id", "x"], ["--run-id", "not allowed with"]),
        (["--workers", "2", "--config", "/nowhere.toml"], ["/nowhere.toml does not exist"]),
        (["--workers", "2", "--components", "nan"], ["--components", "nan"]),
        (["--workers", "2", "--components", "inf"], ["--components", "inf"]),
        (["--workers", "2", "--tol", "nan"], ["--tol", "nan"]),
        (["--workers", "2", "--seed", "-1"], ["--seed", "'-1'"]),
        (["--workers", "2", "--num-classes", "-1"], ["--num-classes must be in 1..65536, got -1"]),
        (["--workers", "2", "--clusters", "70000"], ["--clusters", "at most 65536, got 70000"]),
        (["--workers", "2", "--image-shape", "4294967296x4294967296x1"], ["--image-shape"]),
        (["--workers", "2", "--run-id", "../x"], ["--run-id", "'../x'"]),
        (["--workers", "2", "--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(source: Path, tmp_path: Path, args: Any, parts: Any) -> None:
    done = run_job("distribution_aware.py", "--input", source, "--output", tmp_path / "o", *args)
    assert_one_line(done, 2, *parts)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("no_such_key = 1", "unknown key 'no_such_key'"),
        ("max_iter = [1]", "max_iter = [1]"),
        ('sparse_if = "gt"', "choose one of le, lt"),
        ("max_iter = ", "Invalid value"),
        ('workers = "abc"', "workers = 'abc'"),
    ],
)
def test_a_broken_defaults_file_is_one_line_and_exit_2(source: Path, tmp_path: Path, text: str, part: Any) -> None:
    (tmp_path / "c.toml").write_text(text)
    flags = ["--input", source, "--output", tmp_path / "o", "--workers", 2, "--config", tmp_path / "c.toml"]
    assert_one_line(run_job("distribution_aware.py", *flags), 2, str(tmp_path / "c.toml"), part)


def test_paths_that_cannot_work_are_refused_before_spark_starts(source: Path, tmp_path: Path) -> None:
    flags = ["--workers", 2]
    done = run_job("stratified.py", "--input", tmp_path / "nowhere", "--output", tmp_path / "o", *flags)
    assert_one_line(done, 3, "nowhere does not exist")
    done = run_job("stratified.py", "--input", source, "--output", source / "inside", *flags)
    assert_one_line(done, 2, "overlap")
    (tmp_path / "file").write_text("x")
    done = run_job("stratified.py", "--input", source, "--output", tmp_path / "file", *flags)
    assert_one_line(done, 2, "is a file; choose a folder")
    done = run_job("stratified.py", "--input", source, "--output", tmp_path / "file" / "x", *flags)
    assert_one_line(done, 2, "cannot be a folder")
    (tmp_path / "link").symlink_to(source)
    done = run_job("stratified.py", "--input", source, "--output", tmp_path / "link", *flags)
    assert_one_line(done, 2, "overlap")
    (tmp_path / "link").unlink()
    for uri, fact in (("ftp://host/x", "'ftp' is not supported"), ("s3:/bucket/x", "write s3://bucket/path")):
        done = run_job("stratified.py", "--input", uri, "--output", tmp_path / "o", *flags)
        assert_one_line(done, 2, fact)
    done = run_job("stratified.py", "--input", source, "--output", tmp_path / "{ds}", *flags)
    assert_one_line(done, 2, "--ds is not given")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("hdfs://n:9/sets/{run_id}", "hdfs://n:9/sets/scheduled__2026-01-01T00_00_00+00_00"),
        ("/sets/{run_id}", "/sets/scheduled__2026-01-01T00:00:00+00:00"),
    ],
)
def test_a_run_id_of_airflow_is_a_name_on_hdfs_too(output: str, expected: str) -> None:
    """HDFS refuses colons, which the ids of scheduled runs have; the manifest tells the id as it is."""
    run_id = "scheduled__2026-01-01T00:00:00+00:00"
    argv = ["--input", "/in", "--output", output, "--workers", "2", "--run-id", run_id]
    request = read_request(parse(sharding_parser("job.py", None), argv))
    assert request.output == expected
    assert request.interval == {"run_id": run_id}


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_out_of_range_are_refused_in_python_too(seed: int) -> None:
    with pytest.raises(UsageError, match=rf"^--seed must be a whole number from 0 to 2\^63 - 1, got {seed}$"):
        Random(seed=seed)
