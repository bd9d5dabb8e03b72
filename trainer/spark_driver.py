"""The Spark application whose tasks are the hosts of a run, for ``--launcher spark``."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainer
from pipeline.core import console

if TYPE_CHECKING:
    from trainer.cluster.spark import SparkLauncher


@contextmanager
def spark_launcher(*, debug: bool, quiet: bool) -> Iterator[SparkLauncher]:
    """Yield a launcher of hosts as Spark tasks. Its application starts with the first run, and ends with the block.

    The master comes from spark-submit, PYSPARK_SUBMIT_ARGS or spark-defaults.conf, and is ``local[*]`` otherwise.

    Args:
        debug: show Spark's messages.
        quiet: do not show the id of the application.
    """
    from pipeline.spark.store import export_login
    from trainer.cluster.spark import SparkLauncher  # loads ZeroMQ

    export_login()  # shards and run are opened before Spark
    with ExitStack() as stack:
        yield SparkLauncher(_Driver(stack, debug=debug, quiet=quiet).open)


class _Driver:
    """The driver of a Spark application, which is opened at the first call of ``open``.

    Args:
        stack: ends the application and the handling of signals.
        debug: show Spark's messages.
        quiet: do not show the id of the application.
    """

    def __init__(self, stack: ExitStack, *, debug: bool, quiet: bool) -> None:
        self._stack = stack
        self._quiet = quiet
        self._debug = debug
        self._context: Any = None
        self._signals = ExitStack()

    def open(self) -> tuple[Any, str]:
        """Return the Spark context, and the settings of file systems as JSON.

        The handlers that are set now are set again after Spark has set its own, which would end everything at once. Each
        start of a run has handlers of its own, so the JVM's signals are forwarded to those of this start."""
        from pipeline.spark.session import spark_context
        from pipeline.spark.shipping import ship_package
        from pipeline.spark.signals import forward_sigterm
        from pipeline.spark.store import open_store

        self._signals.close()
        if self._context is None:
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            context = self._stack.enter_context(spark_context(debug=self._debug))
            # The JVM's handlers are restored before the application ends.
            self._stack.callback(self._signals.close)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if not self._quiet:
                where = f"application {context.applicationId} on {context.master}"
                console.say("sharding.training", where, text=f"{console.wall_clock()} {where}")
            ship_package(context, Path(trainer.__file__).parent)
            self._context = context
        self._signals.enter_context(forward_sigterm(self._context))
        return self._context, json.dumps(dict(open_store(self._context).conf))
