"""Every command in the environments of users: what `make demo` installs, and `pip install '.[trainer]'` without a checkout.

Each works there, or ends with one line that names the extra it needs. A new command without a case here fails."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby, starmap
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from pipeline.datasets.cifar import ARCHIVES
from pipeline.datasets.synthetic import SampleSpec, files_of, write
from pipeline.entry import COMMANDS
from tests.clusters import ROOT, spark_submit
from tests.clusters.environments import DEMO, Wheel, install_wheel
from tests.support.application import Ended
from tests.support.commands import (
    BATCH,
    HELP,
    JOBS,
    Command,
    assert_names_extra,
    assert_shows_help,
    in_demo,
    plan_batch,
    read_batch,
)
from tests.support.sharding_runs import ledger_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # the demo environment may have to be made
BOTH = ("--input", "sample", "--eval-input", "sample", "--workers", 2)
TRAINING = ("--shards", "shards", "--model", "logistic", "--epochs", 1)
# In their order, each in the folder of the one before. The address of fetch's mirror is filled in.
SUBCOMMANDS: Mapping[str, Command] = {
    "sample": ("--to", "sample", "--rows", 400, "--test-rows", 80),
    "derive": ("--input", "sample", "--to", "derived", "--shrink", 2),
    "fetch": ("cifar10", "--to", "cifar10", "--cache", "archives", "--base-url"),
    "plan": ("--rows", 400, "--workers", 2),
    "topology": ("ring", "--workers", 4),
    "shard": (*BOTH, "--output", "shards", "--strategy", "stratified"),
    "formats": (),
    "strategies": (),
    "inspect": ("shards",),
    "verify": ("shards",),
    "clean": ("shards",),
    "doctor": ("--input", "sample", "--output", "checked"),
    "zip": ("--to", "packages.zip"),
    "train": (*TRAINING, "--output", "run"),
    "simulate": (*TRAINING, "--output", "virtual"),
    "embed": ("--input", "sample", "--output", "table.parquet"),
    "report": ("shards",),
    "workers": ("run",),
    "predict": ("run", "--input", "sample", "--output", "predictions.parquet"),
    "export": ("run", "--as", "torchscript", "--to", "model.pt"),
    "runs": ("run", "virtual", "--output", "compared-runs"),
    "study": ("quick", "--output", "study"),
}
# Subcommands that need Spark, each in a folder of the one before; they share one Spark in a process.
ON_SPARK: Mapping[str, Command] = {
    "shard": (*BOTH, "--output", "buckets", "--strategy", "hash"),
    "reshard": ("--input", "buckets", "--output", "resharded", "--workers", 3),
    "assign": ("--input", "sample", "--workers", 2, "--output", "assigned", "--strategy", "stratified"),
    "materialize": ("--input", "sample", "--assignment", "assigned", "--output", "materialized"),
    "compare": (*BOTH, "--output", "compared", "--strategies", "random,stratified"),
    "stream": ("--source", "arriving", "--output", "streamed", "--workers", 2, "--trigger", "once"),
    "train": ("--shards", "buckets", "--model", "logistic", "--steps", 4, "--batch-size", 20, "--output", "trained",
              "--launcher", "spark", "--hosts", 2),
    "benchmark": ("--output", "figures", "--quick", "--models", "linear", "--systems", "ps-sync", "--year-rows", 4000,
                  "--batches", 4000),
}  # fmt: skip
JOB_FLAGS: Mapping[str, Command] = {
    "baseline.py": (*BOTH, "--output", "baseline"),
    "stratified.py": (*BOTH, "--output", "shards"),
    "distribution_aware.py": (*BOTH, "--output", "distribution_aware"),
    "class_cluster.py": (*BOTH, "--output", "class_cluster"),
    "submodular.py": (*BOTH, "--output", "submodular"),
    "hash.py": (*BOTH, "--output", "hash"),
    "skewed.py": (*BOTH, "--output", "skewed"),
    "importance.py": (*BOTH, "--output", "importance", "--example-ledger", "ledger"),
    "reshard.py": ("--input", "hash", "--output", "resharded", "--workers", 3),
    "materialize.py": ("--input", "sample", "--assignment", "hash", "--output", "materialized"),
    "hash_stream.py": ("--source", "arriving", "--output", "streamed", "--workers", 2, "--trigger", "once"),
    "compare.py": (*BOTH, "--output", "compared", "--strategies", "random,stratified"),
    "train.py": (*TRAINING, "--output", "submitted"),
    "benchmark.py": ("--output", "figures"),
}
# Subcommands that run in one process with those beside them: of the others each has a process of its own.
TOGETHER = {
    "sample", "derive", "fetch", "plan", "topology", "formats", "strategies", "inspect", "verify", "clean", "report",
    "predict", "export", "runs", "workers",
}  # fmt: skip
EXTRA = {"study": "study", "benchmark.py": "benchmark"}  # of the commands that need more than the trainer
PAGES = {"shard": "shards", "train": "run", "simulate": "virtual"}


@dataclass(frozen=True)
class Installation:
    """An environment, and the folder where its commands run. program: a function that runs one of its programs there."""

    folder: Path
    program: Callable[..., CompletedProcess[str]]

    def run(self, *command: object) -> Ended:
        done = self.program(*command)
        return Ended(done.returncode, done.stdout, done.stderr)

    def run_together(self, commands: Iterable[Command]) -> list[Ended]:
        """Run commands in one process."""
        return read_batch(self.program("python", "-c", BATCH.read_text(), plan_batch(commands)))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The demo environment, which finds the checkout as its editable install would."""
    folder = tmp_path_factory.mktemp("demo")
    DEMO.make()
    return Installation(folder, partial(DEMO.run, cwd=folder, env={"PYTHONPATH": str(ROOT)}))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return install_wheel(tmp_path_factory.mktemp("wheel").resolve())


@pytest.fixture(params=["demo", "wheel"])
def installation(request: pytest.FixtureRequest) -> Installation:
    environment: Installation | Wheel = request.getfixturevalue(request.param)
    return Installation(environment.folder, environment.run) if isinstance(environment, Wheel) else environment


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a mirror of CIFAR-10 whose archive is not the real one."""
    folder = tmp_path_factory.mktemp("mirror")
    (folder / ARCHIVES["cifar10", "bin"].name).write_bytes(b"another archive")
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_every_command_has_a_case() -> None:
    assert set(SUBCOMMANDS) | set(ON_SPARK) == set(COMMANDS)
    assert set(JOB_FLAGS) == set(JOBS)


IMPORTS = """
import importlib.util, json, sys
names = ("psutil", "statsmodels", "ray", "tensorboard", "pytest", "torch", "pyspark")
print(json.dumps([[name for name in names if importlib.util.find_spec(name)], sys.path]))
"""


def test_environments_hold_the_trainer_and_no_other_extra(demo: Installation, wheel: Wheel) -> None:
    assert json.loads(demo.run("python", "-c", IMPORTS).out)[0] == ["torch", "pyspark"]
    modules, path = json.loads(wheel.run("python", "-c", IMPORTS).stdout)
    assert modules == ["torch", "pyspark"]
    assert not [folder for folder in path if Path(folder).is_relative_to(ROOT) and folder != str(DEMO.packages)]


def test_help_works_in_a_users_environment(installation: Installation, demo: Installation) -> None:
    """Ask every subcommand and every job, which only a checkout has."""
    commands = {name: command for name, command in HELP.items() if installation == demo or command[0] == "sharding"}
    for result in installation.run_together(commands.values()):
        assert_shows_help(result)


@pytest.mark.parametrize("installation", ["wheel"], indirect=True)
def test_subcommands_work_in_a_users_environment(installation: Installation, mirror: str) -> None:
    """An installation without the checkout. It has the demo environment's packages; jobs are tested in that."""
    results: dict[str, Ended] = {}
    for together, names in groupby(SUBCOMMANDS, key=TOGETHER.__contains__):
        group = {name: ("sharding", name, *SUBCOMMANDS[name], *([mirror] if name == "fetch" else [])) for name in names}
        ended = installation.run_together(group.values()) if together else starmap(installation.run, group.values())
        results |= zip(group, ended, strict=True)
    for name, result in results.items():
        message = f"{name}: {result}"
        assert "Traceback" not in message
        assert "is the checkout's" not in message, "the guard of a wheel's environment refused a file"
        assert " WARN " not in result.err, "the log settings that come with the package hide these"
        assert "default log level" not in result.err, "nor is a command a shell of Spark"
        if name in EXTRA:
            assert_names_extra(result, EXTRA[name])
            assert not (installation.folder / "study").exists()
        elif name == "fetch":  # it got as far as the checksum
            assert result.code == 1, message
            assert re.fullmatch(r"error: .* is not the published file: .*\n", result.err), message
        else:
            assert result.code == 0, message
        if name in PAGES:
            assert "</html>" in (installation.folder / PAGES[name] / "report.html").read_text()


def test_subcommands_on_spark_work_in_a_wheel(wheel: Wheel, tmp_path: Path) -> None:
    """Each does its work, on the master of PYSPARK_SUBMIT_ARGS. psutil, which `benchmark` needs, is added for it."""
    for folder in ("sample", "arriving"):
        write(files_of(SampleSpec(rows=400, test_rows=80)), tmp_path / folder)
    shutil.copytree(Path(psutil.__file__).parent, tmp_path / "extra" / "psutil")
    here = {"sample", "arriving"} | {str(flags[flags.index("--output") + 1]) for flags in ON_SPARK.values()}
    commands = [
        ("sharding", name, *(tmp_path / str(part) if part in here else part for part in flags))
        for name, flags in ON_SPARK.items()
    ]
    env = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell", "PYTHONPATH": str(tmp_path / "extra")}
    done = wheel.run("python", "-c", BATCH.read_text(), plan_batch(commands, spark=True), env=env)
    for name, result in zip(ON_SPARK, read_batch(done), strict=True):
        message = f"{name}: {result.out[-3000:]}{result.err[-3000:]}"
        assert result.code == 0, message
        assert "is the checkout's" not in message, "the guard of a wheel's environment refused a file"
        if name == "train":
            assert re.search(r"application \S+ on local\[2\]", result.err), message
            assert re.search("host 1 has started", result.err), message
    records = json.loads((tmp_path / "figures" / "results.json").read_text())["records"]
    assert [record["error"] for record in records if record["error"]] == []
    assert "</html>" in (tmp_path / "compared" / "compare.html").read_text()
    without_page = {"sample", "arriving", "compared", "assigned"}
    for output in sorted(here - without_page):
        assert "</html>" in (tmp_path / output / "report.html").read_text(), output


def test_jobs_work_in_the_demo_environment(tmp_path: Path) -> None:
    """Run the jobs in one application; tests/clusters/users_jobs.py submits some by themselves."""
    for folder in ("sample", "arriving"):
        write(files_of(SampleSpec(rows=400, test_rows=80)), tmp_path / folder)
    shutil.copytree(ledger_of(400), tmp_path / "ledger")
    here = {path.name for path in tmp_path.iterdir()} | {
        flags[flags.index("--output") + 1] for flags in JOB_FLAGS.values()
    }
    # A job's own folder is not the test's, so local paths are absolute.
    absolute = {
        job: [tmp_path / str(part) if part in here else part for part in flags] for job, flags in JOB_FLAGS.items()
    }
    plan = plan_batch([(JOBS[job], *flags) for job, flags in absolute.items()], path=[ROOT], spark=True)
    results = read_batch(spark_submit(BATCH, plan, **in_demo("local[2]")))
    for job, result in zip(absolute, results, strict=True):
        if job in EXTRA:
            assert_names_extra(result, EXTRA[job])
            assert not (tmp_path / "figures").exists()
        else:
            assert result.code == 0, result.out[-3000:] + result.err[-3000:]
    without_page = {"figures", "compared"}
    for output in sorted({str(flags[flags.index("--output") + 1]) for flags in JOB_FLAGS.values()} - without_page):
        assert "</html>" in (tmp_path / output / "report.html").read_text(), output
    assert "</html>" in (tmp_path / "compared" / "compare.html").read_text()
