"""How a job's Spark starts: whose settings hold, and with which class archive."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext

from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import drop_zips
from pipeline.datasets.synthetic import SampleSpec, files_of, write
from pipeline.runs.api import open_shards
from pipeline.spark import driver_jvm, session
from pipeline.spark.driver_jvm import jvm_options
from pipeline.spark.session import PYTHON_WORKERS, spark_context, spark_defaults
from pipeline.spark.shipping import PACKAGE
from tests.clusters import ROOT, spark_submit
from tests.support.application import Ended
from tests.unit.test_import_path import hide
from tests.unit.test_jobs import assert_one_line

PROGRAM = """
import json, sys
from pipeline.spark.session import spark_context
with spark_context() as context:
    runtime = context._jvm.java.lang.Runtime.getRuntime()
    print(json.dumps(dict(context.getConf().getAll()) | {"heap": runtime.maxMemory()}))
"""
FROM_WHERE = """
from pipeline.spark.session import spark_context
import py4j, pyspark
with spark_context() as context:
    there = context.parallelize([0], 1).map(lambda _: __import__("pyspark").__file__ + __import__("py4j").__file__)
    print(pyspark.__file__ + py4j.__file__, there.collect()[0])
"""


SUBMITTED = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "added"))
import added_helper, helper
from pipeline.spark.session import spark_context
for debug in (True, False):
    with spark_context(debug=debug) as context:
        log = context._jvm.org.apache.logging.log4j.LogManager.getLogger("org.apache.spark.TaskContextImpl")
        log.error(f"in a listener, debug={debug}")
        print("doubled", context.parallelize([1], 1).map(helper.double).collect())
        print("tripled", context.parallelize([1], 1).map(added_helper.triple).collect())
"""


HANDLERS = """
import signal, threading
from pipeline.spark.session import spark_context
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGINT, own := lambda number, frame: None)
with spark_context():
    print("inside", signal.getsignal(signal.SIGTERM) is before)
print("after", signal.getsignal(signal.SIGTERM) is before, signal.getsignal(signal.SIGINT) is own)
def work():
    with spark_context():
        print("thread", signal.getsignal(signal.SIGTERM) is before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.full
def test_signals_have_their_handlers_back_after_a_run(tmp_path: Path) -> None:
    """A library that a program calls, also from a thread of its own, leaves the program's handlers alone."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", HANDLERS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inside", "False", "after", "True", "True", "thread", "True"], done.stderr


def test_the_last_call_that_shares_a_context_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SimpleNamespace] = []
    stopped: list[object] = []
    running: list[object] = []

    def start(conf: object) -> SimpleNamespace:
        started.append(SimpleNamespace(number=len(started)))
        running[:] = started[-1:]
        return started[-1]

    def stop(context: object) -> None:
        stopped.append(context)
        running.clear()

    monkeypatch.setattr(session, "running_context", lambda: running[0] if running else None)
    monkeypatch.setattr(session, "SparkContext", start)
    monkeypatch.setattr(session, "_context_conf", lambda **options: None)
    monkeypatch.setattr(session, "_stop", stop)
    for name in ("_quiet", "ship_package"):
        monkeypatch.setattr(session, name, lambda context: None)
    with contextlib.ExitStack() as second:
        with spark_context() as first:
            assert second.enter_context(spark_context()) is first
        assert not stopped
    assert stopped == started == [first]
    with spark_context() as third:
        assert third is started[1]
    running.append("of the user's own")
    with spark_context() as own:
        assert own == "of the user's own"
    assert stopped == started == [first, third]


def test_calls_in_two_threads_wait_for_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread starts while the first one makes the context."""
    monkeypatch.setattr(session, "running_context", lambda: None)
    is_free: list[bool] = []

    def try_lock() -> None:
        if session._CONTEXT_LOCK.acquire(blocking=False):
            session._CONTEXT_LOCK.release()
            is_free.append(True)

    def refuse(**options: object) -> NoReturn:
        thread = Thread(target=try_lock)
        thread.start()
        thread.join()
        raise JobError("no Java")

    monkeypatch.setattr(session, "_context_conf", refuse)
    with pytest.raises(JobError, match="no Java"), spark_context():
        pass
    assert not is_free


def test_a_spark_connect_session_is_refused_in_one_line() -> None:
    session: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(UsageError, match="Spark Connect"), spark_context(session):
        pytest.fail("it went on")


def test_an_active_connect_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark sets the variable when a session of Spark Connect starts."""
    monkeypatch.setattr(session, "running_context", lambda: None)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(UsageError, match="Spark Connect"), spark_context():
        pytest.fail("it went on")


def test_a_stopped_session_is_refused_in_one_line() -> None:
    stopped: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))
    with pytest.raises(UsageError, match="has been stopped"), spark_context(stopped):
        pytest.fail("it went on")
    with pytest.raises(UsageError, match="has been stopped"):
        open_shards("shards", stopped)


@pytest.mark.full
def test_letters_that_java_cannot_read_are_told(tmp_path: Path) -> None:
    """spark-submit hands arguments on through Java, which puts ?? for a letter that its locale lacks."""
    write(files_of(SampleSpec(rows=200, test_rows=20)), tmp_path / "in")
    output = tmp_path / "\u00e9t\u00e9"
    flags = ("--input", tmp_path / "in", "--output", output, "--workers", 2, "--no-report")
    done = spark_submit(ROOT / "jobs" / "baseline.py", *flags, master="local[1]", env={"LC_ALL": "C"})
    assert_one_line(Ended(done.returncode, done.stdout, done.stderr), 2, "may have lost letters", "LC_ALL=C.UTF-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    done = spark_submit(ROOT / "jobs" / "baseline.py", *flags, master="local[1]", env={"LC_ALL": "C.UTF-8"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "manifest.json").exists()


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Submit SUBMITTED in a working folder that has modules of the names that a task imports; return how it ends."""
    folder = tmp_path_factory.mktemp("submission")
    (folder / "programs" / "added").mkdir(parents=True)
    (folder / "programs" / "added" / "added_helper.py").write_text("def triple(value):\n    return 3 * value\n")
    (folder / "programs" / "helper.py").write_text("import numpy\ndef double(value):\n    return 2 * value\n")
    (folder / "programs" / "program.py").write_text(SUBMITTED)
    with contextlib.chdir(hide(folder, "pipeline", "numpy", "pyspark", "json")):
        env = {"PYTHONPATH": str(PACKAGE.parent)}
        done = spark_submit(folder / "programs" / "program.py", master="local[1]", env=env)
    assert done.returncode == 0, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def test_sparks_log_of_a_killed_worker_is_shown_with_debug_only(submission: Ended) -> None:
    assert re.findall(r"in a listener, debug=(\w+)", submission.out + submission.err) == ["True"]


def test_python_workers_import_nothing_from_the_working_folder(submission: Ended) -> None:
    """But what lies beside the program, or in a folder that it has added to its path, is there for its tasks too."""
    assert submission.out.count("doubled [2]") == submission.out.count("tripled [3]") == 2


NAMELESS = """
import os, pwd
def getpwuid(number):
    raise KeyError(number)
pwd.getpwuid = getpwuid
from pipeline.spark.session import spark_context
with spark_context() as context:
    print(context.sparkUser(), context._jvm.System.getProperty("user.home"), context.parallelize([1], 1).collect())
"""


def test_a_user_without_a_name_runs_spark_under_its_number() -> None:
    """As in a container that runs as a number: Java finds neither its name nor its home folder."""
    dropped = ("PYSPARK_GATEWAY_PORT", "HADOOP_USER_NAME", "USER", "SPARK_USER")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"PYTHONPATH": str(PACKAGE.parent), "HOME": "/tmp"}
    done = subprocess.run([sys.executable, "-c", NAMELESS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{os.geteuid()} /tmp [1]"


def test_a_machine_whose_name_has_no_address_runs_local_spark_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_GATEWAY_PORT", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS"):
        monkeypatch.setenv(name, "")  # so that it is restored, if it is not set either
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    with monkeypatch.context() as before_the_jvm:
        before_the_jvm.setattr(driver_jvm, "has_gateway", lambda: False)
        assert driver_jvm.prepare_jvm({})
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
        assert not driver_jvm.prepare_jvm({}), "an address that was set is not asked about"
    monkeypatch.setattr(session, "running_context", lambda: None)
    monkeypatch.setattr(session, "prepare_jvm", lambda _: True)
    line = r"the executors of yarn need an address of this machine, and its name a+ has none: add it to /etc/hosts, or"
    with pytest.raises(JobError, match=line), spark_context(master="yarn"):
        pass


@pytest.mark.full
def test_spark_starts_on_a_machine_whose_name_has_no_address() -> None:
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode:
        pytest.skip("a name of its own needs the rights of root")
    program = (
        "import socket\n"
        "socket.sethostname('no-such-host.invalid')\n"
        "from pipeline.spark.session import spark_context\n"
        "with spark_context() as context: print(context.parallelize([1], 1).sum())"
    )
    # With keys of S3 in the environment Spark looks the name up all the same.
    dropped = ("PYSPARK_GATEWAY_PORT", "SPARK_LOCAL_IP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    done = subprocess.run(
        ["unshare", "--uts", sys.executable, "-c", program],
        env=env | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.full
def test_driver_and_workers_import_the_installed_pyspark(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FROM_WHERE)
    env = {"PYTHONPATH": str(PACKAGE.parent)}
    done = spark_submit(tmp_path / "program.py", master="local[1]", env=env)
    assert done.returncode == 0, done.stderr
    driver, worker = done.stdout.splitlines()[-1].split()
    assert driver == worker
    assert ".zip" not in driver


def test_the_zip_of_another_spark_stays_on_the_path(tmp_path: Path) -> None:
    installed, theirs = tmp_path / "site-packages", tmp_path / "opt" / "spark"
    for package in ("pyspark", "py4j"):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").touch()
    own = [f"{installed}/pyspark/python/lib/{name}" for name in ("pyspark.zip", "py4j-0.10.9.9-src.zip")]
    others = [f"{theirs}/python/lib/pyspark.zip", "/elsewhere/pyspark/python/lib/pyspark.zip", "", "jobs.zip"]
    assert drop_zips([*own, *others, str(installed)]) == [*others, str(installed)]
    assert drop_zips([*own, *others]) == [*own, *others]
    (installed / "py4j" / "__init__.py").unlink()
    assert drop_zips([*own, str(installed)]) == [own[1], str(installed)]


def test_defaults_yield_to_spark_submit_and_own_configurations(
    tmp_path: Path,
) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.ansi.enabled false\nspark.driver.memory 600m\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    told = {"spark.sql.shuffle.partitions": "7"}
    env = {"SPARK_CONF_DIR": str(tmp_path), "SPARK_DRIVER_MEMORY": "3g", "PYTHONPATH": str(PACKAGE.parent)}
    done = spark_submit(tmp_path / "program.py", master="local[1]", conf=told, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spark.sql.shuffle.partitions"] == "7"
    assert found["spark.sql.ansi.enabled"] == "false"
    assert found["spark.driver.memory"] == "600m"
    assert found["heap"] < 700 << 20
    theirs = {"spark.sql.shuffle.partitions", "spark.sql.ansi.enabled", "spark.driver.memory"}
    ours = {key: value for key, value in spark_defaults().items() if key not in theirs}
    assert ours.items() <= found.items()
    assert len(ours) > 5
    assert found["spark.python.daemon.module"] == PYTHON_WORKERS


@pytest.mark.full
def run_program(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that starts Spark itself."""
    env = {key: value for key, value in os.environ.items() if key != "PYSPARK_GATEWAY_PORT"}
    env["PYTHONPATH"] = str(PACKAGE.parent)
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)


def test_a_program_without_spark_submit_draws_no_bar_into_its_lines() -> None:
    done = run_program(
        "import time\n"
        "from pipeline.spark.session import spark_context\n"
        "with spark_context() as context:\n"
        "    context.parallelize(range(2), 2).map(lambda _: time.sleep(1.5)).count()\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Stage" not in done.stderr


@pytest.mark.parametrize("own_log", [True, False])
def test_a_command_delays_the_optimisation_of_its_jvm(monkeypatch: pytest.MonkeyPatch, own_log: bool) -> None:
    for name in ("PYSPARK_GATEWAY_PORT", "SPARK_SUBMIT_OPTS", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    if own_log:
        monkeypatch.setenv("SPARK_CONF_DIR", "theirs")
    monkeypatch.setattr(driver_jvm, "has_gateway", lambda: False)
    driver_jvm.prepare_jvm({})
    options = shlex.split(os.environ["SPARK_SUBMIT_OPTS"])
    assert "-XX:Tier4InvocationThreshold=50000" in options
    assert any(option.startswith("-Dlog4j2.configurationFile=") for option in options) != own_log


@pytest.mark.parametrize("is_writable", [True, False])
def test_java_takes_tmpdir_where_it_cannot_write_its_own(monkeypatch: pytest.MonkeyPatch, is_writable: bool) -> None:
    """Imitate a container with a read-only root."""
    for name in ("PYSPARK_GATEWAY_PORT", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(driver_jvm, "has_gateway", lambda: False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/scratch of mine")
    monkeypatch.setattr(os, "access", lambda path, mode: is_writable or path != "/tmp")
    driver_jvm.prepare_jvm({})
    options = shlex.split(os.environ["SPARK_SUBMIT_OPTS"])
    assert ("-Djava.io.tmpdir=/scratch of mine" in options) != is_writable


@pytest.mark.full
def test_a_killed_jvm_is_one_line() -> None:
    """Kill it as the memory limit of a container does."""
    done = run_program(
        "from pyspark import SparkContext\n"
        "from pipeline.core.program import execute\n"
        "from pipeline.spark.session import spark_context\n"
        "def main():\n"
        "    with spark_context() as context:\n"
        "        SparkContext._gateway.proc.kill()\n"
        "        return context.parallelize(range(2), 2).count()\n"
        "execute(main, interrupted='')\n"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: Spark's JVM has ended: Killed. If it was killed for want of")


@pytest.mark.parametrize("error", [Py4JNetworkError("Error while sending"), ConnectionRefusedError(111, "refused")])
def test_a_jvm_that_takes_time_to_end_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Lose the connection before the process has ended, as on a loaded machine."""
    process = subprocess.Popen(["sleep", "0.5"])
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    with pytest.raises(JobError, match=r"Spark's JVM has ended: exit code 0\."), session._ended_jvm_is_error():
        raise error


@pytest.mark.parametrize("error", [Py4JNetworkError("Error while sending"), BrokenPipeError(32, "closed")])
def test_an_error_while_the_jvm_runs_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        monkeypatch.setattr(session, "JVM_END_S", 0.1)
        with pytest.raises(type(error)), session._ended_jvm_is_error():
            raise error
        process.kill()


def test_a_jvm_knows_the_options_that_delay_optimisation() -> None:
    java = Path(os.environ["JAVA_HOME"]) / "bin" / "java"
    command = [str(java), *shlex.split(jvm_options()), "-XX:+PrintFlagsFinal", "-version"]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"Tier4InvocationThreshold += 50000 ", flags)
    assert re.search(r"Tier4BackEdgeThreshold += 400000 ", flags)


def test_spark_submit_maps_classes_from_the_archive_of_the_set_up(tmp_path: Path) -> None:
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "-XX:SharedArchiveFile=" not in options:
        pytest.skip("run through `make test`: .venv/env.sh names the archive, where this Java could write one")
    assert jvm_options().split()[-1] in options, "spark-submit has what commands give their JVM"
    env = {**os.environ, "SPARK_SUBMIT_OPTS": f"{options} -Xlog:class+load:file={tmp_path}/classes"}
    subprocess.run(["spark-submit", "--version"], env=env, capture_output=True, check=True)
    loaded = (tmp_path / "classes").read_text().splitlines()
    mapped = [line for line in loaded if "shared objects file (top)" in line]
    assert len(mapped) > len(loaded) / 2
