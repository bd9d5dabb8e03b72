"""The jobs and commands with the flags that a user gives and no others, so with reports and evaluation.

A flag that a test adds to save time, such as --no-report, hides a default path that fails.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline import entry
from pipeline.datasets.cifar import ARCHIVES
from pipeline.input.formats import FORMATS
from pipeline.strategies import STRATEGIES
from tests.clusters import ROOT, spark_submit
from tests.support.application import Ended, run_job, run_program
from tests.support.tiers import only
from tests.unit.test_fetch import FILES, Mirror, archive_of, mirror
from tests.unit.test_jobs import STACK_TRACE

__all__ = ["mirror"]  # a fixture
# Figures are drawn by the commands of the front page, and by every job in tests/clusters/test_environments.py.
pytestmark = pytest.mark.usefixtures("undrawn")
ROWS = 800
# More than half the pixels of an image: the PCA adds up a matrix over tasks, as it does for large sets.
MANY_ROWS = 1600
EVAL_ROWS = 200
WORKERS = 3
STRATEGY_JOBS = {
    "baseline.py": "random",
    "stratified.py": "stratified",
    "hash.py": "hash",
    "class_cluster.py": "class_cluster",
    "submodular.py": "submodular",
    "distribution_aware.py": "distribution_aware",
    "skewed.py": "dirichlet",
}
EVEN = tuple(name for name, kind in STRATEGIES.items() if not (kind.decides_sizes or kind.reads_table))
# Command lines whose default flags another test gives, which is named.
TESTED_ELSEWHERE = {
    "benchmark.py": "tests/spark/test_benchmark.py::test_the_job_sets_mllib_beside_the_servers",
    "benchmark": "tests/clusters/test_on_standalone.py::test_the_benchmark_runs_its_servers_on_the_executors",
    "study": "tests/clusters/test_readme.py::test_the_commands_of_a_readme_run_as_they_stand",
    "workers": "tests/training/test_cohorts.py::test_a_run_changes_its_workers_while_it_trains",
}
Check = Callable[[Ended], str]


def run_command(*arguments: object) -> Ended:
    """Run ``sharding ARGUMENTS`` in this process, with / as the current folder."""
    return run_program(Path(entry.__file__), *arguments)


def run_script(*arguments: object, folder: Path) -> Ended:
    """Run the installed ``sharding`` in a process of its own."""
    command = [str(Path(sys.executable).with_name("sharding")), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the script may be installed from another checkout
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Ended(result.returncode, result.stdout, result.stderr)


def submit(job: str, *arguments: object) -> Ended:
    """Run a job by spark-submit on local[2]."""
    result = spark_submit(ROOT / "jobs" / job, *arguments)
    return Ended(result.returncode, result.stdout, result.stderr)


def last_line(result: Ended) -> str:
    """Return the last line of a command's output. A non-zero exit code and a stack trace fail the test."""
    output = result.out + result.err
    assert result.code == 0, output
    for sign in STACK_TRACE:
        assert sign not in output, output
    return result.out.splitlines()[-1]


@pytest.fixture
def last_line_of(spark: SparkSession, pytestconfig: pytest.Config) -> Check:
    """A last_line() that also fails for a stack trace that this process's JVM has printed meanwhile."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.read_global_capture()  # the JVM writes to the file that pytest has put in place of its standard error

    def check(result: Ended) -> str:
        other = capture.read_global_capture()
        return last_line(Ended(result.code, other.out + result.out, other.err + result.err))

    return check


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated data set: training files and the test file in one folder, by the installed script."""
    folder = tmp_path_factory.mktemp("defaults")
    result = run_script("sample", "--to", "sample", "--rows", ROWS, "--test-rows", EVAL_ROWS, folder=folder)
    assert last_line(result) == f"sample: {ROWS} training and {EVAL_ROWS} test images in sample: written"
    return folder / "sample"


@pytest.fixture(scope="module")
def larger_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate a data set of MANY_ROWS, for jobs that fit a PCA."""
    folder = tmp_path_factory.mktemp("larger") / "sample"
    assert last_line(run_command("sample", "--to", folder, "--rows", MANY_ROWS, "--test-rows", EVAL_ROWS))
    return folder


class Sets:
    """The shard sets of the samples, made by the jobs of STRATEGY_JOBS, each once.

    distribution_aware.py has the larger sample; the PCA of class_cluster.py and submodular.py is the same."""

    def __init__(self, sample: Path, larger_sample: Path, folder: Path) -> None:
        self.sample, self.larger_sample, self.folder = sample, larger_sample, folder
        self._results: dict[Path, Ended] = {}

    def make(self, job: str, *, evaluation: bool = True) -> tuple[Path, Ended]:
        """Run a strategy's job, with or without --eval-input; return its output folder and its result."""
        output = self.folder / (Path(job).stem if evaluation else f"{Path(job).stem}-alone")
        if output not in self._results:
            source = self.larger_sample if job == "distribution_aware.py" else self.sample
            inputs = ("--input", source, *(("--eval-input", source) if evaluation else ()))
            flags = (*inputs, "--output", output, "--workers", WORKERS)
            self._results[output] = run_job(job, *flags)
        return output, self._results[output]


@pytest.fixture(scope="module")
def sets(spark: SparkSession, sample: Path, larger_sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(sample, larger_sample, tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def shards(sets: Sets) -> Path:
    """A committed set with evaluation rows."""
    output, result = sets.make("stratified.py")
    assert result.code == 0, result.err
    return output


def assert_page(path: Path, *words: str) -> None:
    """Fail unless a report is a whole page that has these words."""
    text = path.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    for word in words:
        assert word in text


def count_rows(folder: Path) -> int:
    return sum(int(pq.ParquetFile(path).metadata.num_rows) for path in folder.glob("*.parquet"))


def assert_set(
    output: Path, strategy: str, *, workers: int = WORKERS, rows: int = ROWS, eval_rows: int = EVAL_ROWS
) -> None:
    """Fail unless a set is whole, has every row of the sample and its copies, and has a report."""
    assert "files exist and have the right size" in last_line(run_command("verify", output))
    manifest = json.loads((output / "manifest.json").read_text())
    assert (manifest["strategy"], manifest["rows"]) == (strategy, rows)
    folders = sorted(output.glob("worker=*"))
    assert [folder.name for folder in folders] == [f"worker={worker:03d}" for worker in range(workers)]
    assert sum(map(count_rows, folders)) == rows + manifest["copies"]
    assert count_rows(output / "_eval") == eval_rows
    assert_page(output / "report.html", strategy)
    assert json.loads((output / "quality.json").read_text())["verdict"]


def assert_run(output: Path, *, evaluation: bool = True) -> None:
    """Fail unless a training run finished and left a model and a report."""
    summary: dict[str, Any] = json.loads((output / "result.json").read_text())
    assert summary["cause"] == "finished"
    assert (summary["final_accuracy"] is not None) == evaluation
    assert (output / "model.safetensors").stat().st_size > 0
    assert (output / "best.safetensors").exists() == evaluation
    assert_page(output / "report.html", "Finished", " of training.")


def report_line(page: Path) -> str:
    return f"  report    {page}"


# --- the jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "strategy"), STRATEGY_JOBS.items())
def test_a_job_shards(job: str, strategy: str, sets: Sets, last_line_of: Check) -> None:
    output, result = sets.make(job)
    assert last_line_of(result) == report_line(output / "report.html")
    assert_set(output, strategy, rows=MANY_ROWS if strategy == "distribution_aware" else ROWS)


def test_a_job_shards_without_evaluation_rows(sets: Sets, last_line_of: Check) -> None:
    """Leave the test file beside the training files out of the shards."""
    output, result = sets.make("baseline.py", evaluation=False)
    assert last_line_of(result) == report_line(output / "report.html")
    assert_set(output, "random", eval_rows=0)


def run_either(name: str, *arguments: object) -> Ended:
    """Run a job, or the command that does the same without spark-submit."""
    return run_job(name, *arguments) if name.endswith(".py") else run_command(name, *arguments)


def test_importance(sample: Path, shards: Path, tmp_path: Path, last_line_of: Check) -> None:
    """Train with a ledger, then shard by the losses in it."""
    trained, output = tmp_path / "run", tmp_path / "o"
    training = ("--shards", shards, "--output", trained, "--model", "logistic", "--epochs", 7, "--example-ledger")
    assert last_line(run_command("simulate", *training))
    flags = ("--input", sample, "--eval-input", sample, "--output", output, "--workers", WORKERS)
    result = run_job("importance.py", *flags, "--example-ledger", trained / "examples")
    assert last_line_of(result) == report_line(output / "report.html")
    assert_set(output, "importance")


@pytest.mark.parametrize("name", only(["reshard.py"], ["reshard.py", "reshard"]))
def test_reshard(name: str, shards: Path, tmp_path: Path, last_line_of: Check) -> None:
    output = tmp_path / "o"
    result = run_either(name, "--input", shards, "--output", output, "--workers", 5)
    assert last_line_of(result) == report_line(output / "report.html")
    assert_set(output, "stratified", workers=5)


@pytest.fixture(scope="module")
def assignment(spark: SparkSession, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed assignment."""
    output = tmp_path_factory.mktemp("assigned") / "o"
    flags = ("--input", sample, "--output", output, "--ratios", "4:2:1:1")
    assert last_line(run_command("assign", "--strategy", "stratified", *flags))
    assert not list(output.glob("worker=*"))
    return output


@pytest.mark.parametrize("name", only(["materialize.py"], ["materialize.py", "materialize"]))
def test_materialize(name: str, assignment: Path, sample: Path, tmp_path: Path, last_line_of: Check) -> None:
    """Write the shards that an assignment describes."""
    output = tmp_path / "o"
    result = run_either(name, "--input", sample, "--output", output, "--assignment", assignment)
    assert last_line_of(result) == report_line(output / "report.html")
    assert_set(output, "stratified", workers=4, eval_rows=0)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        pytest.param("compare", ("random", "stratified"), id="two"),
        pytest.param("compare.py", EVEN, id="all", marks=pytest.mark.full),
    ],
)
def test_compare(name: str, names: Sequence[str], sets: Sets, tmp_path: Path, last_line_of: Check) -> None:
    """Compare strategies, each with a set and a report of its own. The default is all that shard evenly."""
    output = tmp_path / "o"
    source, rows_of_set = (sets.larger_sample, MANY_ROWS) if names == EVEN else (sets.sample, ROWS)
    choice = () if names == EVEN else ("--strategies", ",".join(names))
    result = run_either(name, "--input", source, "--output", output, "--workers", WORKERS, *choice)
    assert last_line_of(result) == f"report: {output}/compare.html"
    rows = {row["name"]: row for row in json.loads((output / "compare.json").read_text())}
    assert list(rows) == list(names)
    assert rows["stratified"]["class_chi_square_per_dof"] < 0.1 < rows["random"]["class_chi_square_per_dof"]
    assert_page(output / "compare.html", *names)
    for strategy in names:
        assert_set(output / strategy, strategy, rows=rows_of_set, eval_rows=0)
    if "distribution_aware" in names:
        assert rows["distribution_aware"]["mmd_ratio"] < rows["random"]["mmd_ratio"]
    for strategy in {"class_cluster", "submodular"} & set(names):
        assert rows[strategy]["class_mmd_ratio"] < rows["random"]["class_mmd_ratio"]


@pytest.mark.parametrize("name", only(["hash_stream.py"], ["hash_stream.py", "stream"]))
def test_hash_stream(name: str, sample: Path, tmp_path: Path, last_line_of: Check) -> None:
    """Shard the files that are there, then end the stream."""
    output = tmp_path / "o"
    flags = ("--source", sample, "--output", output, "--workers", WORKERS, "--trigger", "once")
    assert last_line_of(run_either(name, *flags)) == report_line(output / "report.html")
    assert_set(output, "hash", eval_rows=0)


@pytest.mark.full
def test_train_on_spark(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    flags = ("--shards", shards, "--output", output, "--model", "logistic", "--epochs", 1)
    assert last_line(submit("train.py", *flags)) == f"  report     {output}/report.html"
    assert_run(output)


# --- the commands -------------------------------------------------------------------------------------------------------


def test_sample(sample: Path) -> None:
    names = {path.name for path in sample.iterdir()}
    assert names == {"batches.meta.txt", "test_batch.bin", *(f"data_batch_{number}.bin" for number in range(1, 6))}


def test_derive(sample: Path, tmp_path: Path) -> None:
    output = tmp_path / "o"
    assert last_line(run_command("derive", "--input", sample, "--to", output)) == f"{output}: written"
    assert sum(map(count_rows, [output, *output.rglob("*/")])) == ROWS + EVAL_ROWS


@pytest.mark.full
def test_shard_starts_a_spark_of_its_own(sample: Path, tmp_path: Path) -> None:
    """Shard by the installed script, in a process where no Spark runs."""
    flags = ("--input", sample, "--eval-input", sample, "--output", "o", "--workers", WORKERS)
    result = run_script("shard", *flags, "--strategy", "round_robin", folder=tmp_path)
    assert last_line(result) == report_line(tmp_path / "o" / "report.html")
    assert_set(tmp_path / "o", "round_robin")


def test_plan() -> None:
    assert "time" in last_line(run_command("plan", "--rows", ROWS, "--workers", WORKERS))


def test_topology() -> None:
    assert "lambda_2" in run_command("topology", "ring", "--workers", WORKERS).out


def test_strategies() -> None:
    lines = run_command("strategies").out.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert all(len(line.split()) > 2 for line in lines)


def test_formats() -> None:
    lines = run_command("formats").out.splitlines()
    assert [line.split()[0] for line in lines] == list(FORMATS)


def test_inspect(shards: Path) -> None:
    result = run_command("inspect", shards)
    assert last_line(result).split()[0] == str(WORKERS - 1)
    assert "stratified" in result.out


def test_verify(shards: Path) -> None:
    assert last_line(run_command("verify", shards)).startswith(f"{shards}: all ")


def test_clean(shards: Path) -> None:
    assert last_line(run_command("clean", shards)) == "no leftovers"


def test_doctor() -> None:
    assert "checks: 0 failed" in last_line(run_command("doctor"))


def test_zip(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    assert last_line(run_command("zip", "--to", archive)) == f"{archive}: written"
    assert [path.name for path in tmp_path.iterdir()] == ["packages.zip"]
    (tmp_path / "folder").mkdir()
    refused = run_command("zip", "--to", tmp_path / "folder")
    assert (refused.code, refused.err) == (2, f"error: --to {tmp_path / 'folder'} is a folder; name the zip file\n")
    failed = run_command("zip", "--to", archive / "x.zip")
    assert failed.code == 1
    assert failed.err.endswith(f"{archive / 'x.zip'} cannot be written: File exists; choose another --to\n")


def test_fetch(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Download from a mirror on this machine through the default cache folder."""
    monkeypatch.setitem(ARCHIVES, ("cifar10", "bin"), archive_of(mirror.data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tmp_path / "cifar10"
    result = run_command("fetch", "cifar10", "--to", target, "--base-url", mirror.url)
    assert last_line(result) == f"fetch: cifar10 in {target}: complete (7 files)"
    assert {path.name for path in target.iterdir()} > set(FILES)
    assert list((tmp_path / "cache").rglob("set.tar.gz"))


def test_train(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = run_command("train", "--shards", shards, "--output", output, "--model", "cnn", "--epochs", 1)
    assert last_line(result) == f"  report     {output}/report.html"
    assert_run(output)


def test_train_without_evaluation_rows(sets: Sets, tmp_path: Path) -> None:
    """The shards are named one by one, so they have no manifest."""
    shards, sharding = sets.make("baseline.py", evaluation=False)
    assert sharding.code == 0, sharding.err
    output = tmp_path / "run"
    folders = [shards / f"worker={worker:03d}" for worker in range(WORKERS)]
    result = run_command("train", "--shards", *folders, "--output", output, "--model", "logistic", "--epochs", 1)
    assert last_line(result) == f"  report     {output}/report.html"
    assert (
        f"{WORKERS} shards without a manifest below {shards}: {ROWS:,} rows of 3x32x32 uint8 in 10 classes"
        in result.out
    )
    assert "the shard set has no evaluation rows: nothing is evaluated" in result.out + result.err
    assert_run(output, evaluation=False)


def test_simulate(shards: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    result = run_command("simulate", "--shards", shards, "--output", output, "--model", "cnn", "--steps", 3)
    assert last_line(result) == f"  report     {output}/report.html"
    assert_run(output)


@pytest.mark.full
def test_embed(sample: Path, tmp_path: Path) -> None:
    """Embed a fifth of the rows: a step takes seconds where other processes share the cores."""
    subset, output = tmp_path / "subset", tmp_path / "embedding.parquet"
    assert last_line(run_command("derive", "--input", sample, "--to", subset, "--rows", ROWS // 5))
    result = run_command("embed", "--input", subset, "--output", output)
    assert last_line(result).startswith(f"{output}: made; {ROWS // 5} rows of 64 numbers, ")
    assert int(pq.ParquetFile(output).metadata.num_rows) == ROWS // 5


def test_report(shards: Path) -> None:
    before = (shards / "report.html").read_bytes()
    assert last_line(run_command("report", shards)) == f"report: {shards}/report.html"
    assert (shards / "report.html").read_bytes() == before


@pytest.mark.full
def test_predict_export_and_runs(shards: Path, sample: Path, tmp_path: Path) -> None:
    output, table = tmp_path / "run", tmp_path / "predictions.parquet"
    assert last_line(run_command("simulate", "--shards", shards, "--output", output, "--model", "cnn", "--steps", 3))
    result = run_command("predict", output, "--input", sample, "--output", table)
    assert last_line(result) == f"{table}: made; predictions of {ROWS:,} rows"
    assert int(pq.ParquetFile(table).metadata.num_rows) == ROWS
    model = tmp_path / "hub"
    result = run_command("export", output, "--as", "safetensors", "--to", model)
    assert last_line(result) == f"{model}: written as safetensors"
    assert last_line(run_command("runs", output)) == "The runs have the same settings."


# --- completeness -------------------------------------------------------------------------------------------------------

# A new job and a new command need a line here.
CASES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(STRATEGY_JOBS, test_a_job_shards),
    "importance.py": test_importance,
    **dict.fromkeys(("reshard.py", "reshard"), test_reshard),
    **dict.fromkeys(("materialize.py", "materialize"), test_materialize),
    **dict.fromkeys(("compare.py", "compare"), test_compare),
    **dict.fromkeys(("hash_stream.py", "stream"), test_hash_stream),
    "train.py": test_train_on_spark,
    "sample": test_sample,
    "assign": test_materialize,
    "derive": test_derive,
    "shard": test_shard_starts_a_spark_of_its_own,
    "plan": test_plan,
    "formats": test_formats,
    "strategies": test_strategies,
    "inspect": test_inspect,
    "topology": test_topology,
    "verify": test_verify,
    "clean": test_clean,
    "doctor": test_doctor,
    "zip": test_zip,
    "fetch": test_fetch,
    "train": test_train,
    "simulate": test_simulate,
    "embed": test_embed,
    "report": test_report,
    **dict.fromkeys(("predict", "export", "runs"), test_predict_export_and_runs),
}


def test_every_job_and_every_command_has_a_case() -> None:
    jobs = {path.name for path in (ROOT / "jobs").glob("*.py")}
    assert set(CASES) == (jobs | set(entry.COMMANDS)) - set(TESTED_ELSEWHERE)


@pytest.mark.parametrize("case", TESTED_ELSEWHERE.values())
def test_a_case_elsewhere_exists(case: str) -> None:
    path, _, name = case.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
