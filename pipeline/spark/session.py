"""The start and end of a job's Spark: its context and settings, quiet logs, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock, Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from pipeline.core.command_line import CONF
from pipeline.core.errors import JobError, UsageError
from pipeline.core.import_path import PATH, SAFE_PATH, added_folders
from pipeline.core.machine import usable_memory
from pipeline.core.program import follows_interrupt
from pipeline.core.sizes import bytes_in_words
from pipeline.spark.driver_jvm import DRIVER_MEMORY, LOCAL_IP, is_nameless, name_user, prepare_jvm
from pipeline.spark.jvm import (
    accumulator_server,
    is_stopped,
    jvm_end,
    jvm_of,
    running_context,
    start_jvm,
)
from pipeline.spark.shipping import PACKAGE, ship_package

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


MASTER_S = 5.0  # the time in which a standalone master must accept a connection
JVM_END_S = 10.0  # how long a killed JVM may take from its last answer to its end
CONNECT = "SPARK_CONNECT_MODE_ENABLED"  # PySpark sets it when a session of Spark Connect starts
NO_TASKS = "a Spark Connect session runs no Python tasks of its own"
UI = "spark.ui.enabled"
PROGRESS = "spark.ui.showConsoleProgress"


@dataclass
class OwnContext:
    """A context that ``spark_context`` has started. users: its calls that use it now."""

    context: SparkContext
    users: int = 0


_CONTEXT_LOCK = RLock()
_own_contexts: list[OwnContext] = []  # those that run


def spark_defaults() -> dict[str, str]:
    """Return the settings of conf/spark-defaults.conf, or none if the package came without it."""
    file = CONF / "spark-defaults.conf"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines)
    return {pair[0]: pair[-1] for pair in pairs if pair[0] and not pair[0].startswith("#")}


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


def context_of(session: SparkSession) -> SparkContext:
    """Return the context of a session. Raises UsageError if it was stopped, or has none here, as with Spark Connect."""
    if type(session).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(f"{NO_TASKS}; pass a session of the cluster itself")
    if is_stopped(session.sparkContext):
        raise UsageError("this Spark session has been stopped; pass one that runs, or none")
    return session.sparkContext


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
    if spark is not None:
        ship_package(context_of(spark))
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
    # PySpark refuses a context then, but only after the start of a JVM.
    if CONNECT in os.environ and "SPARK_LOCAL_REMOTE" not in os.environ:
        raise UsageError(f"{NO_TASKS}; start this program without a Spark Connect session")
    if master:
        check_master(master)
    defaults = spark_defaults()
    lacks_address = prepare_jvm(defaults)
    # Without a JVM to ask, a SparkConf is empty, and defaults set on it would override those of spark-submit.
    start_jvm()
    if is_nameless():
        name_user()
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
