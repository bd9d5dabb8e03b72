"""The body that the jobs share: start Spark, shard, report, print."""

from __future__ import annotations

import argparse

from pipeline import cli
from pipeline.progress import Progress
from pipeline.session import spark_context
from pipeline.sharding import Outcome, shard
from pipeline.strategies import Strategy


def run_sharding(args: argparse.Namespace, strategy: Strategy) -> int:
    """Shard as asked; print the set. Returns the exit code."""
    request = cli.request_of(args)
    cli.preflight(request)
    with spark_context(debug=args.debug) as context:
        progress = Progress(context, quiet=args.quiet)
        outcome = shard(context, request, strategy, progress)
    print_outcome(outcome)
    return 0


def print_outcome(outcome: Outcome) -> None:
    state = "committed" if outcome.fresh else "already committed, nothing to do"
    print(f"{outcome.shards.uri}: {state}")
    print(cli.describe(outcome))
