"""``python -m trainer``: train a model on committed shards with worker, server and evaluator processes.

``python -m trainer embed`` makes vectors of images, ``python -m trainer predict`` predicts their classes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from pipeline.core import command_line
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.specs import add_flags, from_flags
from trainer.api import train
from trainer.cluster.hosts import Hosts
from trainer.embed import __main__ as embedding
from trainer.flags import REAL, WORKERS, build_parser, config_of, options_of
from trainer.inference import __main__ as inference
from trainer.options import Options

INTERRUPTED = "the same command with --resume continues from the last checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Raises UsageError, DataError and JobError."""
    parser = build_parser()
    add_flags(parser.add_argument_group("another number of workers"), Options, only=WORKERS)
    add_flags(parser.add_argument_group("monitoring"), Options, only=REAL)
    add_flags(parser.add_argument_group("cluster", "Run the command once, on any host."), Hosts)
    args = command_line.parse(parser, argv)
    require("trainer", "training")
    hosts = from_flags(Hosts, args)
    options = options_of(args)
    if hosts.launcher and options.roles:
        raise UsageError("--roles is for hosts that are started by hand: leave it out, because --launcher starts them")
    train(config_of(args), options, launcher=hosts.make(), hosts=hosts.hosts)
    return 0


if __name__ == "__main__":
    for name, program in (("embed", embedding), ("predict", inference)):
        if sys.argv[1:2] == [name]:
            command_line.execute(partial(program.main, sys.argv[2:]), interrupted=program.INTERRUPTED)
    command_line.execute(main, interrupted=INTERRUPTED)
