"""The commands: flags in, a run by the public functions, a short table out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from pipeline.core.command_line import parse
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.specs import from_flags, member_from_flags
from pipeline.runs import flags as cli
from pipeline.runs.api import shard_request
from pipeline.runs.steps.run import ShardingResult
from pipeline.strategies import Strategy
from pipeline.upkeep.contents import describe

MANY_COPIES = 0.01  # share of the rows; with more, sparse groups change the set's distribution


def shard_with(prog: str, description: str | None, kind: type[Strategy]) -> int:
    """Run the command of one strategy. Returns the exit code."""
    args = parse(cli.sharding_parser(prog, description, kind))
    cli.fill_tables(args)
    return run_sharding(args, from_flags(kind, args))


def shard_by_one_of(prog: str, description: str | None, members: Mapping[str, type[Strategy]], default: str) -> int:
    """Run the command of several strategies, one of which --strategy chooses. Returns the exit code.

    Args:
        prog: name of the command.
        description: for --help.
        members: the strategies, by name.
        default: name of the default.
    """
    flags = cli.sharding_parser(prog, description)
    cli.add_strategy_flags(flags, members, default=default)
    args = parse(flags)
    return run_sharding(args, member_from_flags(members, "--strategy", args))


def main(argv: Sequence[str]) -> None:
    """Shard images by any strategy, on the running Spark or on a local Spark."""
    cli.execute(lambda: _shard_by_name(argv))


def _shard_by_name(argv: Sequence[str]) -> int:
    args = parse(cli.shard_parser(), argv)
    cli.fill_tables(args)
    return run_sharding(args, cli.strategy_of_flags(args))


def run_sharding(args: argparse.Namespace, strategy: Strategy) -> int:
    """Shard, write the report and print the set. Returns the exit code."""
    request = cli.read_request(args)
    return print_result(shard_request(request, strategy, report=not args.no_report, quiet=args.quiet, debug=args.debug))


def print_result(result: ShardingResult) -> int:
    """Print a summary of a set. Returns the exit code."""
    shards = result.shards
    print(f"{shards.uri}: {'committed' if result.fresh else 'already committed, nothing to do'}")
    print(two_column_table(describe(shards)))
    share = shards.manifest.copies / shards.manifest.rows
    if share > MANY_COPIES:
        # The number of groups follows from another flag if hash functions define them.
        fewer = "--functions" if "functions" in shards.manifest.params else "--clusters"
        print(
            f"note: copies of sparse groups on every worker add {share:.1%} rows; give fewer {fewer} for fewer copies, or"
            " --sparse-if never for none",
            file=sys.stderr,
        )
    if result.report:
        print(f"  report    {result.report}")
    return 0
