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
    """Make the JVM send SIGTERM to this process, instead of stopping the Spark context, when the JVM is signalled.

    Schedulers do not know a JVM that this process started itself, so nothing changes there. Only the main thread may
    call it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        yield
        return
    jvm = jvm_of(context)
    start_callbacks(context)
    handler = _Handler()
    python = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    noting = {number: handler.noting(then) for number, then in python.items() if callable(then)}
    for number, noting_handler in noting.items():
        signal.signal(number, noting_handler)
    java = [
        (jvm.sun.misc.Signal(name), jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), handler)) for name in NAMES
    ]
    try:
        yield
    finally:
        for name, before in java:
            jvm.sun.misc.Signal.handle(name, before)
        for number, noting_handler in noting.items():
            if signal.getsignal(number) is noting_handler:  # else it was replaced meanwhile
                signal.signal(number, python[number])


class _Handler:
    """A sun.misc.SignalHandler that sends SIGTERM to this process, unless the signal has reached the process itself.

    A terminal's Ctrl-C goes to the JVM and to this process: then the process has noted it already."""

    def __init__(self) -> None:
        self._at = -SAME_S

    def noting(self, then: Any) -> Any:
        """Return a handler for Python's signal module that notes the time of a signal and calls the handler
        ``then``."""

        def handle(number: int, frame: FrameType | None) -> Any:
            self._at = time.monotonic()
            return then(number, frame)

        return handle

    def handle(self, number: Any) -> None:
        """Handle a signal of the JVM, which calls this in a thread of py4j."""
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        """Send SIGTERM to this process if no signal has reached it shortly before or after the JVM's."""
        time.sleep(SAME_S / 2)
        if time.monotonic() - self._at > SAME_S:
            os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        implements: ClassVar = ["sun.misc.SignalHandler"]
