"""The start and end of a job's Spark: context, shipping the package, quiet logs, signals."""

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock, Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from pipeline.core.atomic import path_in_errors
from pipeline.core.command_line import CONF
from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import PATH, SAFE_PATH, added_folders
from pipeline.core.machine import usable_memory
from pipeline.core.program import follows_interrupt
from pipeline.core.sizes import bytes_in_words
from pipeline.spark.jvm import (
    accumulator_server,
    has_gateway,
    jvm_end,
    jvm_of,
    running_context,
    shipped_packages,
    start_jvm,
)

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


NOT_SHIPPED = {"__pycache__", "conf"}  # folders; the files of conf are added separately
MASTER_S = 5.0  # the time in which a standalone master must accept a connection
JVM_END_S = 10.0  # how long a killed JVM may take from its last answer to its end
DRIVER_MEMORY = "spark.driver.memory"
LOCAL_IP = "SPARK_LOCAL_IP"  # the address of this machine for Spark, instead of its name's
# Most jobs end before code that the optimising compiler made pays its compilation back, a quarter of a small job's CPU
# time. A method is optimised after ten times the calls and iterations of the default, so that long jobs lose nothing.
LATE_OPTIMISATION = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000"
    " -XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
JAVA_TEMPORARY = "/tmp"  # the folder that Java uses by default
UI = "spark.ui.enabled"
PROGRESS = "spark.ui.showConsoleProgress"


@dataclass
class OwnContext:
    """A context that ``spark_context`` has started. users: its calls that use it now."""

    context: SparkContext
    users: int = 0


_CONTEXT_LOCK = RLock()
_own_contexts: list[OwnContext] = []  # those that run


def package_zip(target: Path, *packages: Path) -> Path:
    """Write packages as a zip that executors and YARN containers import from.

    This package includes the defaults of conf/."""
    # Images that are built reproducibly date all files 1970, which a zip cannot store.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for package in packages:
            for path in sorted(package.rglob("*")):
                if path.is_file() and not NOT_SHIPPED & set(path.relative_to(package).parts):
                    archive.write(path, path.relative_to(package.parent))
        for file in sorted(CONF.iterdir() if PACKAGE in packages else [], key=lambda file: file.name):
            if file.name.endswith((".toml", ".conf", ".properties")):
                archive.writestr(f"{PACKAGE.name}/conf/{file.name}", file.read_bytes())
    return target


def spark_defaults() -> dict[str, str]:
    """Return the settings of conf/spark-defaults.conf, or none if the package came without it."""
    file = CONF / "spark-defaults.conf"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines)
    return {pair[0]: pair[-1] for pair in pairs if pair[0] and not pair[0].startswith("#")}


def jvm_options() -> str:
    """Return the options of a driver's JVM that are not Spark's: the log's settings and the start of optimisation.

    conf/setup.sh writes them into .venv/env.sh, for spark-submit."""
    log = f"-Dlog4j2.configurationFile={(CONF / 'log4j2.properties').as_uri()} " if isinstance(CONF, Path) else ""
    return log + LATE_OPTIMISATION


def _prepare_jvm(defaults: Mapping[str, str]) -> bool:
    """Set the options that a driver's JVM needs when it starts: its address, its memory, its log and its compiler.

    Returns whether it gets an address that only this machine reaches, as its name has none. Raises JobError if there is no
    Java, and FileNotFoundError if the current folder has been deleted.

    A JVM that is running already, such as spark-submit's, has its options from its command line and environment."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or has_gateway():
        return False
    os.getcwd()  # a JVM does not start in a deleted folder
    lacks_address = LOCAL_IP not in os.environ and not _has_address()
    if lacks_address:
        os.environ[LOCAL_IP] = "127.0.0.1"
    java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise JobError(f"no program {java}, which Spark needs: install Java 17 or newer, or set JAVA_HOME to one")
    if DRIVER_MEMORY in defaults:
        os.environ.setdefault("SPARK_DRIVER_MEMORY", defaults[DRIVER_MEMORY])
    own_log = bool({"SPARK_CONF_DIR", "SPARK_HOME"} & set(os.environ))
    os.environ.setdefault("SPARK_SUBMIT_OPTS", LATE_OPTIMISATION if own_log else jvm_options())
    # Java takes the home folder from /etc/passwd, not from HOME, and ignores TMPDIR.
    if _is_nameless():
        _add_option("user.home", os.environ.get("HOME") or tempfile.gettempdir())
    if not os.access(JAVA_TEMPORARY, os.W_OK | os.X_OK):
        _add_option("java.io.tmpdir", tempfile.gettempdir())
    return lacks_address


def _add_option(name: str, folder: str) -> None:
    """Add a folder to the options of the JVM, unless they name one."""
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if f"-D{name}=" not in options:
        os.environ["SPARK_SUBMIT_OPTS"] = f'{options} "-D{name}={folder}"'.strip()


def _has_address() -> bool:
    """True if this machine's name has an address, without which Spark does not start."""
    try:
        socket.getaddrinfo(os.fsencode(socket.gethostname()), None)
    except OSError:
        return False
    return True


def _is_nameless() -> bool:
    """True if the user id of this process has no entry in /etc/passwd, as in a container started with a numeric
    user."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return False


def _name_user() -> None:
    """Log in at Hadoop as HADOOP_USER_NAME, else as USER, else as the number of the user id.

    Java's own login fails for a user id without a name."""
    user = os.environ.get("HADOOP_USER_NAME") or os.environ.get("USER") or str(os.geteuid())
    information = start_jvm().org.apache.hadoop.security.UserGroupInformation
    information.setLoginUser(information.createRemoteUser(user))


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # so that an attempt removes its folder, as after Ctrl-C


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, and restore the handler of Ctrl-C, which Spark replaces.

    Only the main thread can, so in other threads this does nothing."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if on_interrupt is not None:  # one that was not set in Python cannot be
            signal.signal(signal.SIGINT, on_interrupt)


@contextmanager
def _ended_jvm_is_error() -> Iterator[None]:
    """Raise JobError in place of the errors of connections to a JVM that has ended, as one does that was killed."""
    try:
        yield
    except (ConnectionError, Py4JError) as error:
        if follows_interrupt(error):  # Ctrl-C ends the JVM too
            raise
        # Others are answers of the JVM, or of connections to other machines.
        is_lost = isinstance(error, Py4JNetworkError | ConnectionRefusedError)
        wait_s = JVM_END_S if is_lost else 0.0
        if (end := jvm_end(wait_s)) is None:
            raise
        memory = bytes_in_words(usable_memory())
        raise JobError(
            f"Spark's JVM has ended: {end}. If it was killed for want of memory, lower SPARK_DRIVER_MEMORY, now"
            f" {os.environ.get('SPARK_DRIVER_MEMORY', '1g')}, or give it more than the {memory} of this machine or container"
        ) from error


def _check_arguments(context: SparkContext) -> None:
    """Raise UsageError if spark-submit has replaced letters of an argument.

    It passes arguments through Java, which decodes them in the locale's encoding and writes "?" for every byte that the
    encoding lacks: an output would be committed under another name."""
    encoding = str(jvm_of(context).System.getProperty("sun.jnu.encoding"))
    if encoding.upper() in ("UTF-8", "UTF8"):
        return
    for argument in sys.argv[1:]:
        if "??" in argument or "\ufffd" in argument:
            raise UsageError(
                f"{argument!r} may have lost letters: Java reads the command line as {encoding}; set LC_ALL=C.UTF-8 (or"
                " another UTF-8 locale) before spark-submit"
            )


def check_master(master: str) -> None:
    """Raise JobError if no address of a standalone master accepts a connection; other masters are not checked.

    Spark itself tries for a minute, and ends with a stack trace."""
    if not master.startswith("spark://"):
        return
    failures = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), MASTER_S).close()
            return
        except (OSError, ValueError) as error:
            failures.append(str(getattr(error, "strerror", None) or error))
    reasons = "; ".join(dict.fromkeys(failures))
    raise JobError(f"no Spark master answers at {master}: {reasons}; check --master, and that the master runs")


@contextmanager
def spark_context(
    spark: SparkSession | None = None, *, debug: bool = False, master: str | None = None
) -> Iterator[SparkContext]:
    """Yield the context of a session, else the running one, else a new one that is stopped at the end.

    Calls in several threads share a new one, and the last of them stops it.

    conf/spark-defaults.conf, the master and the application name apply only to settings that are not set otherwise:
    spark-submit's options and the settings of a SPARK_CONF_DIR take precedence. If the master is not local, the package
    is shipped to the executors as a zip; on a local master they import the driver's package.

    Args:
        spark: the session to use, or None.
        debug: log at level INFO and keep noisy loggers.
        master: the master of a new context, which overrides spark-submit's. Raises JobError if it does not answer.
    """
    if spark is not None and type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "a Spark Connect session runs no Python tasks of its own; pass a session of the cluster itself"
        )
    if spark is not None:
        ship_package(spark.sparkContext)
        yield spark.sparkContext
        return
    with ExitStack() as stack:
        # Contexts start and stop under the lock, so that no call finds one that is not ready or is stopping.
        with _CONTEXT_LOCK:
            context = running_context()
            own = next((each for each in _own_contexts if each.context is context), None)
            if own or context is None:
                stack.enter_context(_ended_jvm_is_error())
                if own is None:
                    conf = _context_conf(debug=debug, master=master)
                    stack.enter_context(_interruptible())
                    own = _start_context(conf, debug=debug)
                own.users += 1
                stack.callback(_leave_context, own)
                context = own.context
            ship_package(context)
        yield context


def _context_conf(*, debug: bool, master: str | None) -> SparkConf:
    """Return the settings of a new context, after the start of its JVM. See ``spark_context``."""
    if master:
        check_master(master)
    defaults = spark_defaults()
    lacks_address = _prepare_jvm(defaults)
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
    if lacks_address and not local and not conf.contains("spark.driver.host"):
        raise JobError(
            f"the executors of {conf.get('spark.master')} need an address of this machine, and its name"
            f" {socket.gethostname()} has none: add it to /etc/hosts, or set {LOCAL_IP}"
        )
    # The memory of the running JVM is fixed, and Spark's pages stay on if the master is not local.
    ignored_keys = {DRIVER_MEMORY} if local else {DRIVER_MEMORY, UI}
    for key, value in defaults.items():
        if key not in ignored_keys:
            conf.setIfMissing(key, value)
    # Spark takes a JVM that a Python process started for a shell, and would show a progress bar.
    if "PYSPARK_GATEWAY_PORT" not in os.environ and PROGRESS in defaults:
        conf.set(PROGRESS, defaults[PROGRESS])
    conf.setIfMissing("spark.app.name", _application_name())
    conf.setIfMissing("spark.log.level", "INFO" if debug else "WARN")
    conf.setIfMissing(f"spark.executorEnv.{SAFE_PATH}", "1")  # workers run with -m, which puts their folder first
    if local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # Tasks find the modules that this program finds, such as a module in a folder that a notebook has added. But the
        # interpreter of tasks, which PYSPARK_PYTHON may name, has its own installed packages.
        path = dict.fromkeys([str(PACKAGE.parent), *added_folders()])
        conf.setExecutorEnv(PATH, os.pathsep.join(path))
        conf.setIfMissing("spark.python.daemon.module", PYTHON_WORKERS)
    return conf


def _start_context(conf: SparkConf, *, debug: bool) -> OwnContext:
    """Start a context that has no users yet. Raises UsageError for arguments that spark-submit has changed."""
    context = SparkContext(conf=conf)
    try:
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            _check_arguments(context)
        if not debug:
            _quiet(context)
        ship_package(context)
    except BaseException:  # no user will leave it
        _stop(context)
        raise
    own = OwnContext(context)
    _own_contexts.append(own)
    return own


def _leave_context(own: OwnContext) -> None:
    """Stop a context whose last user leaves it."""
    with _CONTEXT_LOCK:
        own.users -= 1
        if not own.users:
            _own_contexts.remove(own)
            _stop(own.context)


def _stop(context: SparkContext) -> None:
    """Stop a context without waiting for its accumulator server, which checks only once a second if it should end."""
    server = accumulator_server(context)
    if server is not None and isinstance(server.server_address, tuple):  # a Unix socket has a file to remove
        wait = server.shutdown
        server.shutdown = lambda: Thread(target=wait, daemon=True).start()
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
    context.stop()


def ship_package(context: SparkContext, package: Path = PACKAGE) -> None:
    """Give a package to the executors of a cluster, once per context; a local executor imports the driver's."""
    # In YARN's cluster mode this package is itself imported from a zip, which the executors have too.
    if str(context.master).startswith("local") or not package.is_dir():
        return
    name = f"{package.name}.zip"
    if name in shipped_packages(context):
        return
    folder = tempfile.mkdtemp()  # kept until the driver ends, for executors that join late
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with path_in_errors(folder):
        context.addPyFile(str(package_zip(Path(folder) / name, package)))


def _application_name() -> str:
    """Return the job's file name, which Spark's pages show."""
    name = Path(sys.argv[0]).stem
    return "sharding" if name in ("", "__main__") else name


def _quiet(context: SparkContext) -> None:
    """Silence noisy loggers, so that wrong input or a killed JVM gives one line instead of a stack trace.

    --debug keeps them."""
    if server := accumulator_server(context):
        server.handle_error = lambda *_: None
    log4j = jvm_of(context).org.apache.logging.log4j
    configurator = log4j.core.config.Configurator
    off = log4j.Level.OFF
    for name in NOISY:
        configurator.setLevel(name, off)
