"""The command of jobs/train.py: the trainer's flags, and training on a Spark cluster."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import trainer
from pipeline.core import command_line, console
from pipeline.core.command_line import Parser
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.specs import add_flags
from trainer.api import train
from trainer.flags import REAL, WORKERS, build_parser, config_of, options_of
from trainer.options import Options

PROG = "train.py"
EPILOG = """\
example: spark-submit --master spark://HOST:7077 --conf spark.task.cpus=4 \\
             jobs/train.py --shards hdfs://namenode/shards \\
             --output hdfs://namenode/run --hosts 3 --servers 3 \\
             --model resnet20 --epochs 20

Each host is a Spark task, with the cores of spark.task.cpus and the GPUs of
spark.task.resource.gpu.amount, which its workers share. Exit codes: 0 done or
already finished, 2 wrong usage, 3 broken shards, 1 other errors and
interruption, which leaves a checkpoint: the same command with --resume resumes
the run."""
BY_HAND = ("roles", "addresses", "token_file")


def job_flags(description: str | None) -> Parser:
    """Return the parser: the trainer's flags, --workers and --hosts."""
    parser = build_parser(PROG, description or "", EPILOG)
    add_flags(parser.add_argument_group("another number of workers"), Options, only=WORKERS)
    add_flags(parser.add_argument_group("monitoring"), Options, only=REAL)
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="INT",
        help="number of Spark tasks that share the run (default: %(default)s)",
    )
    return parser


def main(description: str | None, argv: Sequence[str] | None = None) -> int:
    """Train on Spark and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(job_flags(description), argv)
    require("trainer", PROG)
    from pipeline.spark.store import export_login
    from trainer.cluster.spark import SparkLauncher  # loads ZeroMQ

    export_login()  # shards and run are opened before Spark

    config = config_of(args)
    options = options_of(args)
    flag = next((name for name in BY_HAND if getattr(args, name)), None)
    if flag:
        raise UsageError(f"--{flag.replace('_', '-')} is for hosts that are started by hand; give --hosts instead")
    with ExitStack() as stack:
        train(
            config,
            options,
            launcher=SparkLauncher(_Driver(stack, debug=args.debug, quiet=args.quiet).open),
            hosts=args.hosts,
        )
    return 0


class _Driver:
    """The driver of a Spark application, which is opened at the first call of ``open``.

    Args:
        stack: ends the application and the handling of signals.
        debug: show Spark's messages.
        quiet: do not show the id of the application.
    """

    def __init__(self, stack: ExitStack, *, debug: bool, quiet: bool = False) -> None:
        self._stack = stack
        self._quiet = quiet
        self._debug = debug
        self._context: Any = None
        self._signals = ExitStack()

    def open(self) -> tuple[Any, str]:
        """Return the Spark context, and the settings of file systems as JSON.

        The handlers that are set now are set again after Spark has set its own, which would end everything at once. Each
        start of a run has handlers of its own, so the JVM's signals are forwarded to those of this start."""
        from pipeline.spark.session import ship_package, spark_context
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
