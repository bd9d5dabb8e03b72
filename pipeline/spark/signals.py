"""Signals to spark-submit's JVM, which runs the driver's Python: a scheduler ends that JVM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from pyspark import SparkContext

from pipeline.spark.jvm import jvm_of, start_callbacks

NAMES = ("INT", "TERM", "HUP")
SAME_S = 1.0  # signals within this time are one, because a terminal or scheduler may signal both processes


@contextmanager
def forward_sigterm(context: SparkContext) -> Iterator[None]:
    """Make the JVM of spark-submit send SIGTERM to this process when it gets a signal itself.

    By default the JVM would stop the Spark context instead. A no-op if this process has started
    the JVM: schedulers then signal this process. Only the main thread may call this."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        yield
        return
    jvm = jvm_of(context)
    start_callbacks(context)
    handler = _Handler()
    python_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A terminal's Ctrl-C reaches both processes and must count once, so this one records its own.
    recorders = {
        number: handler.recorder(original) for number, original in python_handlers.items() if callable(original)
    }
    for number, recorder in recorders.items():
        signal.signal(number, recorder)
    java_handlers = [
        (jvm.sun.misc.Signal(name), jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), handler)) for name in NAMES
    ]
    try:
        yield
    finally:
        for name, original in java_handlers:
            jvm.sun.misc.Signal.handle(name, original)
        for number, recorder in recorders.items():
            if signal.getsignal(number) is recorder:  # else it was replaced meanwhile
                signal.signal(number, python_handlers[number])


class _Handler:
    """A sun.misc.SignalHandler that sends SIGTERM to this process, unless the signal has reached the process itself.

    A terminal's Ctrl-C, for example, goes to the JVM and to this process."""

    def __init__(self) -> None:
        self._last_signal = -SAME_S  # when this process got its last signal (monotonic seconds)

    def recorder(self, original: Any) -> Any:
        """Return a Python handler that records the time of a signal and calls ``original``."""

        def handle(number: int, frame: FrameType | None) -> Any:
            self._last_signal = time.monotonic()
            return original(number, frame)

        return handle

    def handle(self, number: Any) -> None:
        """Handle a signal of the JVM, which calls this in a thread of py4j."""
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        """Send SIGTERM to this process if no signal has reached it shortly before or after the JVM's."""
        time.sleep(SAME_S / 2)
        if time.monotonic() - self._last_signal > SAME_S:
            os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        implements: ClassVar = ["sun.misc.SignalHandler"]
