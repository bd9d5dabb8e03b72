"""The command that computes an assignment of rows to workers, and writes no shards."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.runs.program import execute
from pipeline.strategies import STRATEGIES


def main(argv: Sequence[str]) -> None:
    """Assign images to workers by any strategy, and write no shards; materialize writes them later."""
    execute(lambda: _assign(argv))


def _assign(argv: Sequence[str]) -> int:
    flags = cli.sharding_parser("python -m pipeline assign", main.__doc__, assignment=False, writes_shards=False)
    cli.add_strategy_flags(flags, STRATEGIES, required=True)
    args = parse(flags, argv)
    args.assignment_only = True
    cli.fill_tables(args)
    return run_sharding(args, cli.strategy_of_flags(args))
