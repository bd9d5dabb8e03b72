"""The Spark side of a job's start and end: context, shipping the package, quiet logs, signals."""

from __future__ import annotations

import atexit
import os
import pwd
import re
import shutil
import signal
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from pipeline.core.atomic import naming
from pipeline.core.command_line import CONF
from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import SAFE_PATH, main_folder
from pipeline.spark.jvm import accumulator_server, has_gateway, jvm_of, running_context, shipped_packages, start_jvm

PACKAGE = Path(__file__).resolve().parents[1]
PYTHON_WORKERS = "pipeline.spark.python_workers"
NOISY = (
    "org.apache.spark.TaskContextImpl",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.api.python.PythonRunner",
    "org.apache.spark.api.python.PythonWorkerFactory",
    "org.apache.spark.util.Utils",
    "org.apache.hadoop.util.NativeCodeLoader",
)


NOT_SHIPPED = {"__pycache__", "conf"}  # folders: conf goes with its files only
MASTER_S = 5.0  # how long a standalone master may take to accept a connection
DRIVER_MEMORY, UI, PROGRESS = "spark.driver.memory", "spark.ui.enabled", "spark.ui.showConsoleProgress"


def package_zip(target: Path, *packages: Path) -> Path:
    """Packages as a zip that executors and YARN containers import from; this one with the defaults of conf/."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in packages:
            for path in sorted(package.rglob("*")):
                if path.is_file() and not NOT_SHIPPED & set(path.relative_to(package).parts):
                    archive.write(path, path.relative_to(package.parent))
        for file in sorted(CONF.iterdir() if PACKAGE in packages else [], key=lambda file: file.name):
            if file.name.endswith((".toml", ".conf", ".properties")):
                archive.writestr(f"{PACKAGE.name}/conf/{file.name}", file.read_bytes())
    return target


def spark_defaults() -> dict[str, str]:
    """The settings of conf/spark-defaults.conf, where the package came with it."""
    file = CONF / "spark-defaults.conf"
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines)
    return {pair[0]: pair[-1] for pair in pairs if pair[0] and not pair[0].startswith("#")}


def _prepare_jvm(defaults: Mapping[str, str]) -> None:
    """Set what a driver's JVM must know when it starts: its memory and its log. Raises JobError where there is no Java.

    A JVM that runs already, such as spark-submit's, was told by its command line and environment."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or has_gateway():
        return
    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise JobError(f"no program {java}, which Spark needs: install Java 17 or newer, or set JAVA_HOME to one")
    if DRIVER_MEMORY in defaults:
        os.environ.setdefault("SPARK_DRIVER_MEMORY", defaults[DRIVER_MEMORY])
    if isinstance(CONF, Path) and not {"SPARK_CONF_DIR", "SPARK_HOME"} & set(os.environ):  # these bring their own
        log = (CONF / "log4j2.properties").as_uri()
        os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Dlog4j2.configurationFile={log}")
    if _is_nameless():
        home = os.environ.get("HOME") or tempfile.gettempdir()
        os.environ["SPARK_SUBMIT_OPTS"] = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Duser.home={home}".strip()


def _is_nameless() -> bool:
    """True if this process's user has no line in /etc/passwd, as in a container that runs as a number."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return False


def _name_user() -> None:
    """Log a user without a name in at Hadoop under its number, or HADOOP_USER_NAME: Java's own login fails there."""
    user = os.environ.get("HADOOP_USER_NAME") or os.environ.get("USER") or str(os.geteuid())
    information = start_jvm().org.apache.hadoop.security.UserGroupInformation
    information.setLoginUser(information.createRemoteUser(user))


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # so that an attempt removes its folder, as after Ctrl-C


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does; only the main thread can, so a run of another thread leaves it alone."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_arguments(context: SparkContext) -> None:
    """Raise UsageError where spark-submit has replaced letters of an argument.

    It passes arguments through Java, which reads them in the locale's encoding and puts "?" for each byte that this lacks:
    an output would be committed under another name."""
    encoding = str(jvm_of(context).System.getProperty("sun.jnu.encoding"))
    if encoding.upper() in ("UTF-8", "UTF8"):
        return
    for argument in sys.argv[1:]:
        if "??" in argument or "\ufffd" in argument:
            raise UsageError(
                f"{argument!r} has lost letters: Java reads the command line as {encoding}; set LC_ALL=C.UTF-8 (or"
                " another UTF-8 locale) before spark-submit"
            )


def check_master(master: str, timeout_s: float = MASTER_S) -> None:
    """Raise JobError if no address of a standalone master accepts a connection; others are not looked at.

    Spark itself tries for a minute, and ends in a trace."""
    if not master.startswith("spark://"):
        return
    failures = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
            return
        except (OSError, ValueError) as error:
            failures.append(str(getattr(error, "strerror", None) or error))
    reasons = "; ".join(dict.fromkeys(failures))
    raise JobError(f"no Spark master answers at {master}: {reasons}; check --master, and that the master runs")


@contextmanager
def spark_context(
    spark: SparkSession | None = None, *, debug: bool = False, master: str | None = None
) -> Iterator[SparkContext]:
    """The context of a session, else the running one, else a new one that is stopped at the end.

    master: of a new one, whatever spark-submit says; raises JobError if it does not answer.

    conf/spark-defaults.conf, master and name hold for what nobody else has set: spark-submit's options and the settings
    of a SPARK_CONF_DIR win. On a master that is not local the package travels to the executors as a zip; on a local one
    they import the one that runs here."""
    if spark is not None and type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "a Spark Connect session runs no Python tasks of its own; pass a session of the cluster itself"
        )
    running = spark.sparkContext if spark else running_context()
    if running is not None:
        ship_package(running)
        yield running
        return
    if master:
        check_master(master)
    defaults = spark_defaults()
    _prepare_jvm(defaults)
    # Without a JVM to ask, a SparkConf is empty, and defaults set on it would override those of spark-submit.
    start_jvm()
    if _is_nameless():
        _name_user()
    conf = SparkConf()
    if master:
        conf.set("spark.master", master)
    conf.setIfMissing("spark.master", "local[*]")
    if not master:
        check_master(conf.get("spark.master", ""))
    local = conf.get("spark.master", "").startswith("local")
    kept = {DRIVER_MEMORY} if local else {DRIVER_MEMORY, UI}  # the JVM runs, with the memory that it has
    for key, value in defaults.items():
        if key not in kept:
            conf.setIfMissing(key, value)
    if (
        "PYSPARK_GATEWAY_PORT" not in os.environ and PROGRESS in defaults
    ):  # Python's own JVM counts as a shell, with a bar
        conf.set(PROGRESS, defaults[PROGRESS])
    conf.setIfMissing("spark.app.name", _application_name())
    conf.setIfMissing("spark.log.level", "INFO" if debug else "WARN")
    conf.setIfMissing(f"spark.executorEnv.{SAFE_PATH}", "1")  # Python workers run as -m: their folder would come first
    if local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        path = [str(PACKAGE.parent), main_folder(), os.environ.get("PYTHONPATH")]
        conf.setExecutorEnv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        conf.setIfMissing("spark.python.daemon.module", PYTHON_WORKERS)
    with _sigterm_interrupts():
        context = SparkContext(conf=conf)
        try:
            if "PYSPARK_GATEWAY_PORT" in os.environ:
                _check_arguments(context)
            if not debug:
                _quiet(context)
            ship_package(context)
            yield context
        finally:
            _stop(context)


def _stop(context: SparkContext) -> None:
    """Stop a context without waiting for its server of accumulators: that one looks once a second whether it is to end."""
    server = accumulator_server(context)
    if server is not None and isinstance(server.server_address, tuple):  # a Unix socket has a file to be removed
        wait = server.shutdown
        server.shutdown = lambda: Thread(target=wait, daemon=True).start()
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    context.stop()


def ship_package(context: SparkContext, package: Path = PACKAGE) -> None:
    """Give the executors of a cluster a package, once a context; those of a local one import what the driver does."""
    # In YARN's cluster mode this package is itself imported from a zip, which the executors were given too.
    if str(context.master).startswith("local") or not package.is_dir():
        return
    name = f"{package.name}.zip"
    if name in shipped_packages(context):
        return
    folder = tempfile.mkdtemp()  # until the driver ends: an executor that joins late fetches the zip then
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with naming(folder):
        context.addPyFile(str(package_zip(Path(folder) / name, package)))


def _application_name() -> str:
    """The job's file name, in Spark's own pages."""
    name = Path(sys.argv[0]).stem
    return "sharding" if name in ("", "__main__") else name


def _quiet(context: SparkContext) -> None:
    """A user whose input is wrong reads one line, not a task's stack trace; --debug brings it back."""
    log4j = jvm_of(context).org.apache.logging.log4j
    configurator = log4j.core.config.Configurator
    off = log4j.Level.OFF
    for name in NOISY:
        configurator.setLevel(name, off)
