"""The commands: they read flags, call the public functions, and print a short table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from pipeline.core import console
from pipeline.core.command_line import parse
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.specs import from_flags, member_from_flags
from pipeline.runs import flags as cli
from pipeline.runs.api import shard_request
from pipeline.runs.metrics_file import JobRecord, job_metrics
from pipeline.runs.program import execute
from pipeline.runs.request import Request
from pipeline.runs.reshard import read_strategy
from pipeline.runs.steps.run import ShardingResult
from pipeline.spark.progress import LOGGER, PhaseLog
from pipeline.strategies import STRATEGIES, Strategy
from pipeline.upkeep.contents import describe

MANY_COPIES = 0.01  # share of the rows


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
    execute(lambda: _shard_by_name(argv))


def _shard_by_name(argv: Sequence[str]) -> int:
    args = parse(cli.shard_parser(), argv)
    cli.fill_tables(args)
    return run_sharding(args, cli.strategy_of_flags(args))


def run_sharding(args: argparse.Namespace, strategy: Strategy) -> int:
    """Shard, write the report and print the set. Returns the exit code."""
    request = cli.read_request(args)

    def make(progress: PhaseLog) -> ShardingResult:
        return shard_request(request, strategy, report=not args.no_report, progress=progress, debug=args.debug)

    return run_job(args, strategy.name, request, make)


def run_job(args: argparse.Namespace, name: str, request: Request, make: Callable[[PhaseLog], ShardingResult]) -> int:
    """Make a set, print it, and write the metrics that the flags ask for. Returns the exit code.

    Args:
        args: the flags of the job.
        name: what the job does, such as the name of its strategy.
        request: its input and output.
        make: makes the set, and shows its progress.
    """
    progress = PhaseLog(quiet=args.quiet)
    # The record shares the dictionary that the progress fills, so a failed job's metrics have its completed phases.
    record = JobRecord(progress.seconds)
    with job_metrics(args.metrics_file, name, request.output, request.interval, record):
        result = make(progress)
        record.shards = result.shards
        record.fresh = result.fresh
        return print_result(result)


def print_result(result: ShardingResult) -> int:
    """Print a summary of a set. Returns the exit code."""
    shards = result.shards
    print(f"{shards.uri}: {'committed' if result.fresh else 'already committed, nothing to do'}")
    print(two_column_table(describe(shards)))
    if note := note_on_copies(shards):
        console.say(LOGGER, note)
    if result.report:
        print(f"  report    {result.report}")
    return 0


def note_on_copies(shards: ShardSet) -> str:
    """Return a note on a set in which copies are so many that they change its distribution; empty for any other set."""
    manifest = shards.manifest
    share = manifest.copies / manifest.rows
    if share <= MANY_COPIES or manifest.strategy not in STRATEGIES:
        return ""
    return (
        f"note: copies of sparse groups on every worker add {share:.1%} rows; give"
        f" {read_strategy(shards).larger_groups} for fewer copies, or --sparse-if never for none"
    )
