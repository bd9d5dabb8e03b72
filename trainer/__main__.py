"""``python -m trainer``: train a model on committed shards with worker, server and evaluator processes.

``python -m trainer embed`` makes vectors of images, ``python -m trainer predict`` predicts their classes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.program import execute
from pipeline.core.specs import add_flags, from_flags
from trainer.api import train
from trainer.cluster.hosts import SPARK, Hosts
from trainer.cluster.launcher import Launcher
from trainer.embed import __main__ as embedding
from trainer.flags import DESCRIPTION, EPILOG, HOSTS, PROG, REAL, WORKERS, build_parser, config_of, options_of
from trainer.inference import __main__ as inference
from trainer.options import Options
from trainer.spark_driver import spark_launcher

INTERRUPTED = "the same command with --resume continues from the last checkpoint"


def parser(
    prog: str = PROG, description: str = DESCRIPTION, epilog: str = EPILOG, launcher: str | None = None
) -> Parser:
    """Return the parser of training on real processes. launcher: the default of --launcher, which the help names."""
    result = build_parser(prog, description, epilog)
    add_flags(result.add_argument_group("another number of workers"), Options, only=WORKERS)
    add_flags(result.add_argument_group("monitoring"), Options, only=REAL)
    add_flags(result.add_argument_group("cluster", "Run the command once, on any host."), Hosts)
    if launcher:
        result.set_defaults(launcher=launcher)
        action = result.actions_by_flag()["--launcher"]
        action.help = f"{action.help} (default: %(default)s)"
    return result


def main(argv: Sequence[str] | None = None, flags: Parser | None = None) -> int:
    """Train as the command line says; returns the exit code. Raises UsageError, DataError and JobError.

    flags: another parser than the default one."""
    flags = flags or parser()
    own = flags.get_default("launcher")  # before the values of a file
    args = command_line.parse(flags, argv)
    require("trainer", "training")
    hosts = from_flags(Hosts, args)
    if own and hosts.launcher != own and "launcher" not in args.names_in_argv:
        raise UsageError(
            f"launcher = {hosts.launcher!r} in the file of --config: {flags.prog} trains on {own.capitalize()}; leave it"
            f" out, or give --launcher {hosts.launcher}"
        )
    if hosts.launcher:
        _refuse_hosts_by_hand(hosts.launcher, args)
    # Of the launchers, only Spark's has an application, which must end after the run.
    launcher: Launcher | None
    with ExitStack() as stack:
        if hosts.launcher == SPARK:
            launcher = stack.enter_context(spark_launcher(debug=args.debug, quiet=args.quiet))
        else:
            launcher = hosts.make()
        train(config_of(args), options_of(args), launcher=launcher, hosts=hosts.hosts)
    return 0


def _refuse_hosts_by_hand(launcher: str, args: argparse.Namespace) -> None:
    """Raise UsageError if the command line names the roles, addresses or token of hosts that are started by hand."""
    for name in HOSTS:
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for hosts that are started by hand, and the launcher {launcher} starts them:"
                " leave it out, and give --hosts"
            )


def run() -> NoReturn:
    """Train as a program does: prints one line for an error, and exits with the documented exit code.

    For a program that registers members of its own first."""
    execute(main, interrupted=INTERRUPTED)


if __name__ == "__main__":
    for name, program in (("embed", embedding), ("predict", inference)):
        if sys.argv[1:2] == [name]:
            execute(partial(program.main, sys.argv[2:]), interrupted=program.INTERRUPTED)
    run()
