"""The Spark side of a job's start and end: context, shipping the package, quiet logs, signals."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

PACKAGE = Path(__file__).resolve().parents[1]
PACKAGE_ZIP = "pipeline.zip"
NOISY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.api.python.PythonRunner",
    "org.apache.spark.api.python.PythonWorkerFactory",
    "org.apache.spark.util.Utils",
    "org.apache.hadoop.util.NativeCodeLoader",
)


def package_zip(target: Path) -> Path:
    """This package as a zip that executors and YARN containers import from."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(PACKAGE.parent))
    return target


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # so that an attempt removes its folder, as after Ctrl-C


@contextmanager
def spark_context(spark: SparkSession | None = None, *, debug: bool = False) -> Iterator[SparkContext]:
    """The context of a session, else the running one, else a new one that is stopped at the end.

    Neither master nor name is set here unless nobody else has: the settings of spark-submit win. On a master that is not
    local the package travels to the executors as a zip; on a local one they import this checkout."""
    running = spark.sparkContext if spark else SparkContext._active_spark_context
    if running is not None:
        _ship_package(running)
        yield running
        return
    # Without a JVM to ask, a SparkConf is empty, and defaults set on it would override those of spark-submit.
    SparkContext._ensure_initialized()
    conf = SparkConf()
    conf.setIfMissing("spark.master", "local[*]")
    conf.setIfMissing("spark.app.name", _application_name())
    conf.setIfMissing("spark.ui.showConsoleProgress", "false")
    conf.setIfMissing("spark.log.level", "INFO" if debug else "WARN")
    local = conf.get("spark.master", "").startswith("local")
    if local:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]))
        conf.setExecutorEnv("PYTHONPATH", path)
    signal.signal(signal.SIGTERM, _on_sigterm)
    context = SparkContext(conf=conf)
    try:
        if not debug:
            _quiet(context)
        _ship_package(context)
        yield context
    finally:
        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()
        context.stop()


def _ship_package(context: SparkContext) -> None:
    """Give the executors of a cluster this package, once a context; those of a local one import what the driver does."""
    # In YARN's cluster mode this package is itself imported from a zip, which the executors were given too.
    if str(context.master).startswith("local") or not PACKAGE.is_dir():
        return
    if PACKAGE_ZIP in (context._python_includes or ()):
        return
    folder = tempfile.mkdtemp()  # until the driver ends: an executor that joins late fetches the zip then
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context.addPyFile(str(package_zip(Path(folder) / PACKAGE_ZIP)))


def _application_name() -> str:
    """The job's file name, in Spark's own pages."""
    name = Path(sys.argv[0]).stem
    return "sharding" if name in ("", "__main__") else name


def _quiet(context: SparkContext) -> None:
    """A user whose input is wrong reads one line, not a task's stack trace; --debug brings it back."""
    assert context._jvm is not None
    configurator = context._jvm.org.apache.logging.log4j.core.config.Configurator
    off = context._jvm.org.apache.logging.log4j.Level.OFF
    for name in NOISY:
        configurator.setLevel(name, off)
