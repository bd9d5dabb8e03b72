"""Access to Spark's JVM: the only module that uses private members of PySpark."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from pyspark import SparkContext


def running_context() -> SparkContext | None:
    """Return the context of this process, or None if there is none."""
    return SparkContext._active_spark_context


def is_stopped(context: SparkContext) -> bool:
    """True if a context has been stopped."""
    return context._jsc is None


def has_gateway() -> bool:
    """True if this process has started a JVM, or was started by one that it has connected to."""
    return SparkContext._gateway is not None


def jvm_end(wait_s: float) -> str | None:
    """Return how the JVM that this process started has ended; None if it runs, or if another process started it.

    Waits up to ``wait_s`` seconds for the end: a killed JVM closes its connections before it is gone."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    return f"exit code {code}" if code >= 0 else signal.strsignal(-code) or f"signal {-code}"


def start_jvm() -> Any:
    """Start a JVM, or connect to the one that started this process, and return its packages."""
    with _interrupts_held():
        SparkContext._ensure_initialized()
    return SparkContext._jvm


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Deliver the first SIGINT of the block at its end, and a second one at once. Only the main thread can be interrupted.

    An interrupted start would leave the JVM running, without the connection by which it learns that this process ended."""
    before = signal.getsignal(signal.SIGINT)
    # Without a handler in Python the signal is ignored, or it ends this process, or it is not ours to handle.
    if current_thread() is not main_thread() or not callable(before):
        yield
        return
    signals: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        if len(signals) > 1:
            before(signum, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        signal.raise_signal(signal.SIGINT)


def jvm_of(context: SparkContext) -> Any:
    """Return the packages of the JVM that a context runs in."""
    return context._jvm


def scala_context(context: SparkContext) -> Any:
    """Return the org.apache.spark.SparkContext behind a context."""
    java: Any = context._jsc
    return java.sc()


def hadoop_configuration(context: SparkContext) -> Any:
    """Return the org.apache.hadoop.conf.Configuration of a context."""
    java: Any = context._jsc
    return java.hadoopConfiguration()


def hadoop_settings(context: SparkContext, prefix: str) -> list[str]:
    """Return the names of the settings in a context's Hadoop configuration that begin with a prefix.

    One call returns them all. Each step of an iterator would be a call, and its end an exception for PySpark to convert."""
    keys = hadoop_configuration(context).getPropsWithPrefix(prefix).keySet()
    joined: str = jvm_of(context).java.lang.String.join("\n", keys)
    return [prefix + key for key in joined.splitlines()]


def spark_setting(context: SparkContext, name: str) -> str:
    """Return a setting of a context, or "". PySpark's getConf() would copy all settings by hundreds of calls."""
    java: Any = context._jsc
    return str(java.getConf().get(name, ""))


def start_callbacks(context: SparkContext) -> None:
    """Have this process answer calls from the JVM of a context."""
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]


def accumulator_server(context: SparkContext) -> Any:
    """Return the server that receives accumulators from tasks, or None."""
    return context._accumulatorServer


def shipped_packages(context: SparkContext) -> list[str]:
    """Return the names of the zips that executors import from."""
    return list(context._python_includes or ())


def leading_components(context: SparkContext, model: Any, number: int) -> Any:
    """Return a Java PCAModel with the first components of spark.ml's PCA model. Python's class has no constructor."""
    java = model._java_obj
    jvm: Any = context._jvm
    matrix = java.pc()
    first = jvm.java.util.Arrays.copyOf
    linalg = jvm.org.apache.spark.ml.linalg
    components = linalg.DenseMatrix(matrix.numRows(), number, first(matrix.values(), matrix.numRows() * number))
    ratios = linalg.DenseVector(first(java.explainedVariance().values(), number))
    return jvm.org.apache.spark.ml.feature.PCAModel(model.uid, components, ratios)
