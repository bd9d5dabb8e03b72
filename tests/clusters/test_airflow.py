"""conf/airflow/sharding_dag.py in a real Airflow: intervals, reruns, hopeless failures, kills.

Each run is a process of tests/clusters/airflow_runs.py, scheduler and task in one, on SQLite and a local Spark."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.core.shardset.manifest import read_committed
from pipeline.datasets.synthetic import SampleSpec, files_of
from tests.clusters import QUICK_START, ROOT, Hdfs, end_tree
from tests.clusters.environments import AIRFLOW
from tests.support.places import STORE, put
from tests.support.trainer_runs import until
from trainer.runlog.read import read_pushes
from trainer.runlog.run_folder import locked

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
START = "RUN "  # of a line of airflow_runs.py
DAG = ROOT / "conf" / "airflow" / "sharding_dag.py"
MONDAY, TUESDAY, WEDNESDAY = "2026-01-05", "2026-01-06", "2026-01-07"
QUICK: dict[str, Any] = {
    "project": str(ROOT),
    "workers": 2,
    "train": "--model logistic --protocol bsp --steps 2 --batch-size 40",
    "poll_s": 1,
    "retry_delay_s": 1,
}


@dataclass(frozen=True)
class Run:
    """A run of the DAG: first day of its interval, state, (state, try) of each task, (URI, extra) of each asset."""

    run_id: str
    interval: str | None
    state: str
    tasks: dict[str, tuple[str, int]]
    assets: list[tuple[str, dict[str, Any]]]

    @classmethod
    def read(cls, line: str) -> Run:
        about = json.loads(line)
        tasks = {task: (state, tries) for task, (state, tries) in about["tasks"].items()}
        return cls(
            about["run_id"], about["interval"], about["state"], tasks, [(uri, extra) for uri, extra in about["assets"]]
        )


@dataclass(frozen=True)
class Installation:
    """A home of Airflow whose DAG folder holds the DAG with other parameters.

    python: Airflow's interpreter. root: URI of the folder of raw data, shards and training runs."""

    python: Path
    home: Path
    root: str

    def edit(self, **parameters: Any) -> None:
        """Copy the DAG, and write its parameters."""
        shutil.copy(DAG, self.file)
        places: dict[str, Any] = {name: f"{self.root}/{name}/{{ds}}" for name in ("raw", "shards", "run")}
        places["flags"] = ["--eval-input", places["raw"]]
        # The file as it is shipped, with other values: every key of it is a parameter.
        lines = {}
        for line in DAG.with_name("sharding.toml").read_text().splitlines():
            if key := re.match(r"(\w+) = ", line):
                lines[key[1]] = line
        for name, value in {**places, **QUICK, **parameters}.items():
            assert name in lines
            lines[name] = f"{name} = {json.dumps(value)}"
        (self.file.with_name("sharding.toml")).write_text("\n".join(lines.values()))

    @property
    def file(self) -> Path:
        return self.home / "dags" / DAG.name

    @property
    def log(self) -> str:
        """What all runs so far have said, in one line each."""
        return (self.home / "log").read_text().replace("\u00a0", " ")

    def place(self, what: str, day: str) -> str:
        return STORE.resolve(f"{self.root}/{what}/{day}")

    def bring(self, day: str, *, complete: bool = True) -> Path:
        """Write the day's raw data and return their folder, which is one of this machine unless the root is remote."""
        folder = self.place("raw", day)
        for name, data in files_of(SampleSpec(rows=400, test_rows=40)).items():
            put(f"{folder}/{name}", data)
        if complete:
            put(f"{folder}/_SUCCESS", b"")
        return Path(folder)

    @contextmanager
    def under_way(self, *days: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process that runs the DAG for some days, one after the other. Nothing of it is left in the end."""
        command: list[str | Path] = [self.python, ROOT / "tests" / "clusters" / "airflow_runs.py", self.file, *days]
        with (self.home / "log").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                end_tree([psutil.Process(process.pid)])
                process.wait()

    def run(self, *days: str) -> list[Run]:
        before = len(self.runs())
        with self.under_way(*days) as process:
            assert process.wait() == 0, self.log[-3000:]
        return self.runs()[before:]

    def runs(self) -> list[Run]:
        lines = self.log.splitlines() if (self.home / "log").exists() else []
        return [Run.read(line.removeprefix(START)) for line in lines if line.startswith(START)]

    @property
    def environment(self) -> dict[str, str]:
        """Without what .venv/env.sh sets, as Airflow's own is: what the DAG starts finds that by itself."""
        own = ("AIRFLOW", "SPARK_", "PYSPARK_", "VIRTUAL_ENV", "JAVA_HOME")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        path = [folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.startswith(sys.prefix)]
        settings = {"AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW__CORE__DAGS_FOLDER": str(self.file.parent)}
        connection = {"AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[2]"}'}
        here = {"AIRFLOW_HOME": str(self.home), "PATH": os.pathsep.join(path), "SPARK_LOCAL_IP": "127.0.0.1"}
        here |= {"JDK_JAVA_OPTIONS": " ".join(QUICK_START)}
        return {**kept, **settings, **connection, **here}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An installation with an empty database, for the others to copy."""
    home = tmp_path_factory.mktemp("airflow")
    made = Installation(AIRFLOW.make(), home, f"file://{home}")
    made.file.parent.mkdir()
    subprocess.run(
        [made.python, "-m", "airflow", "db", "migrate"], env=made.environment, check=True, capture_output=True
    )
    return made


def pipeline(*command: object) -> None:
    subprocess.run([sys.executable, "-m", "pipeline", *map(str, command)], cwd=ROOT, check=True, capture_output=True)


def installed(first: Installation, home: Path, root: str = "", **parameters: Any) -> Installation:
    shutil.copytree(first.home, home, dirs_exist_ok=True)
    (home / "airflow.cfg").unlink()  # which names the first one's database
    made = Installation(first.python, home, root or f"file://{home}")
    made.edit(**parameters)
    return made


# --- days without trouble ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Days:
    """Monday, whose raw data come late, and a run without interval."""

    airflow: Installation
    monday: Run
    without: Run


@pytest.fixture(scope="module")
def days(first: Installation, hdfs: Hdfs, tmp_path_factory: pytest.TempPathFactory) -> Days:
    """Everything is on HDFS; the other runs are on local files."""
    airflow = installed(first, tmp_path_factory.mktemp("days"), f"{hdfs.uri}/lake")
    airflow.bring(MONDAY, complete=False)
    with airflow.under_way(MONDAY, "none") as process:
        until(lambda: "Rescheduling task" in airflow.log, "the sensor waits")
        put(f"{airflow.place('raw', MONDAY)}/_SUCCESS", b"")
        assert process.wait() == 0, airflow.log[-3000:]
    monday, without = airflow.runs()
    return Days(airflow, monday, without)


def test_a_run_waits_shards_checks_trains_and_publishes_its_manifest(days: Days) -> None:
    shards = days.airflow.place("shards", MONDAY)
    assert days.monday.state == "success"
    assert days.monday.tasks == {task: ("success", 1) for task in ("wait", "shard", "check", "train", "publish")}
    committed = read_committed(STORE, shards)
    assert committed is not None
    manifest = committed.manifest
    about = {"rows": 400, "workers": 2, "version": 1, "generation": manifest.generation, "strategy": "stratified"}
    about |= {"fingerprint": manifest.input.fingerprint, "ds": MONDAY}
    assert days.monday.assets == [(f"{shards}/manifest.json", about)]
    assert committed.manifest.interval == {"ds": MONDAY}
    assert STORE.exists(f"{days.airflow.place('run', MONDAY)}/model.safetensors")


def test_a_run_id_with_colons_is_one_like_any_other(days: Days) -> None:
    assert ":" in days.monday.run_id


def test_a_run_without_data_interval_fails_at_once_and_says_so(days: Days) -> None:
    assert days.without.state == "failed"
    assert days.without.tasks["wait"] == ("failed", 1)
    assert "the run has no data interval" in days.airflow.log


# --- failures ---------------------------------------------------------------------------------------------------------


NO_REPORT = f"{{{{ '--no-report' if (data_interval_start | ds) == '{WEDNESDAY}' else '--quiet' }}}}"


@pytest.fixture(scope="module")
def hopeless(first: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[Installation, list[Run]]:
    """A day whose rows are dealt out class by class, one with a file that was cut, and one whose job writes no report."""
    home = tmp_path_factory.mktemp("hopeless")
    flags = ["--strategy", "round_robin", NO_REPORT]
    parameters: dict[str, Any] = {"job": "jobs/baseline.py", "flags": flags, "retries": 1}
    airflow = installed(first, home, **parameters)
    given = airflow.bring("given")
    order = ("--order", "class-blocks", "--workers", 2)
    pipeline("derive", "--input", given, "--eval-input", given, "--to", airflow.place("raw", MONDAY), *order)
    put(f"{airflow.place('raw', MONDAY)}/_SUCCESS", b"")
    cut = airflow.bring(TUESDAY) / "data_batch_2.bin"
    os.truncate(cut, cut.stat().st_size - 1)
    airflow.bring(WEDNESDAY)
    # Two days at a time, as in a parallel backfill: they share places, checkout and machine. SQLite serves one scheduler.
    second = installed(first, home / "second", airflow.root, **parameters)
    (second.file.with_name("sharding_b.toml")).write_text("x = 1")
    with airflow.under_way(MONDAY, TUESDAY) as one, second.under_way(WEDNESDAY, "broken") as other:
        assert (one.wait(), other.wait()) == (0, 0), airflow.log[-3000:] + second.log[-3000:]
    with (airflow.home / "log").open("ab") as log:
        log.write((second.home / "log").read_bytes())
    runs = {day: run for run in airflow.runs() for day in (MONDAY, TUESDAY, WEDNESDAY) if run.interval == day}
    return airflow, [runs[day] for day in (MONDAY, TUESDAY, WEDNESDAY)]


def test_shards_over_the_limit_fail_once_with_the_reports_words(
    hopeless: tuple[Installation, list[Run]],
) -> None:
    airflow, (worse, _, _) = hopeless
    assert worse.tasks["shard"] == ("success", 1)
    assert worse.tasks["check"] == ("failed", 1)
    assert worse.tasks["train"][0] == "upstream_failed"
    found = json.loads(STORE.read(f"{airflow.place('shards', MONDAY)}/quality.json"))
    words = [finding["text"].replace("\u00a0", " ") for finding in found["verdict"] if finding["level"] == "worse"]
    assert words
    assert all(text in airflow.log for text in words)
    assert not worse.assets


def test_broken_input_is_tried_once(hopeless: tuple[Installation, list[Run]]) -> None:
    airflow, (_, broken, _) = hopeless
    assert broken.tasks["shard"] == ("failed", 1)
    assert "exit code 3: the input is broken" in airflow.log
    assert not STORE.exists(airflow.place("shards", TUESDAY))


def test_a_set_without_its_report_fails_the_task_that_shards(
    hopeless: tuple[Installation, list[Run]],
) -> None:
    airflow, (_, _, run) = hopeless
    assert run.tasks["shard"] == ("failed", 2)
    assert "quality.json is missing: the shards are committed without their report" in airflow.log


def test_the_run_of_a_broken_file_fails_once_with_its_line(hopeless: tuple[Installation, list[Run]]) -> None:
    airflow, _ = hopeless
    (run,) = (run for run in airflow.runs() if "read_parameters" in run.tasks)
    assert run.tasks == {"read_parameters": ("failed", 1)}
    assert "sharding_b.toml: unknown key 'x'; keys are " in airflow.log


# --- kills ------------------------------------------------------------------------------------------------------------


def attempts(airflow: Installation) -> set[str]:
    """The names of the attempts to write Monday's shards of which something is left."""
    return {entry.name for entry in STORE.list(f"{airflow.place('shards', MONDAY)}/_attempts")}


def programs(process: subprocess.Popen[bytes], *names: str) -> list[psutil.Process]:
    """The processes below a run's whose command line has one of the names."""
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if any(name in " ".join(each.cmdline()) for name in names):
                found.append(each)
    return found


def test_a_run_outlives_kills_of_its_tasks_and_of_its_scheduler(first: Installation, tmp_path: Path) -> None:
    """The job is killed once, and the next try commits though the scheduler dies: the run that follows finds that.

    Its trainer finds the folder in use, is then killed once, and resumes."""
    train = "--model logistic --protocol bsp --steps 2000 --batch-size 40"
    airflow = installed(first, tmp_path, train=train, retries=3)
    airflow.bring(MONDAY)
    with airflow.under_way(MONDAY) as process:
        until(lambda: attempts(airflow), "the job writes")
        assert_ended_by_sigterm(process, programs(process, "java", "jobs/stratified.py"))
        killed = attempts(airflow)
        until(lambda: attempts(airflow) - killed, "the next try writes")
        (job,) = programs(process, "java")
        process.kill()
        try:
            job.wait(timeout=120)
        finally:
            end_tree([job])
    manifest = Path(airflow.place("shards", MONDAY)) / "manifest.json"
    before = manifest.read_bytes()

    run = Path(airflow.place("run", MONDAY))
    with airflow.under_way(MONDAY) as process:
        with locked(run):
            until(lambda: "is in use by a run that has not ended" in airflow.log, "the trainer waits")
        until(lambda: (run / "pushes.csv").exists() and (run / "pushes.csv").stat().st_size > 2000, "it trains")
        assert_ended_by_sigterm(process, programs(process, "java", "jobs/train.py", "trainer"))
        assert process.wait() == 0
    (done,) = airflow.runs()
    assert done.state == "success", airflow.log[-3000:]
    assert (done.tasks["shard"], done.tasks["train"]) == (("success", 1), ("success", 3))
    assert "already committed" in airflow.log
    assert manifest.read_bytes() == before
    assert read_pushes(run / "pushes.csv")["generation"].nunique() == 2, "updates before the kill count"
    shards = manifest.parent
    assert not (shards / "_attempts").exists(), "nothing is left of the job that was killed"
    assert [path.name for path in (shards / "_manifests").iterdir()] == ["000001.json"]


def assert_ended_by_sigterm(process: subprocess.Popen[bytes], of_task: list[psutil.Process]) -> None:
    """End a run's task by the signal that a scheduler sends, and check that none of its programs is left."""
    assert of_task
    process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(of_task, timeout=60)
    assert not alive
