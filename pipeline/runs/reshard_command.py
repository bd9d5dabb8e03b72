"""The command that divides a committed set among another number of workers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.core.command_line import Parser, parse
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import configured_store
from pipeline.runs import flags as cli
from pipeline.runs.api import reshard_request
from pipeline.runs.command import run_job
from pipeline.runs.program import execute
from pipeline.runs.steps.run import ShardingResult
from pipeline.spark.progress import PhaseLog


def main(argv: Sequence[str]) -> None:
    """Divide a committed shard set among another number of workers, on the running Spark or on a local Spark."""
    execute(lambda: run_resharding("python -m pipeline reshard", main.__doc__, argv))


def reshard_parser(prog: str, description: str | None) -> Parser:
    flags = cli.parser(prog, description)
    flags.add_argument_group("input").add_argument(
        "--input",
        required=True,
        metavar="URI",
        help="folder of a committed set, the --output of another job",
    )
    cli.add_output_flags(flags, rescan=False)
    cli.add_run_flags(flags, seed=False)
    return flags


def run_resharding(prog: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Reshard, write the report and print the set. Returns the exit code.

    prog, description: name and help of the command; argv: its arguments (default: the process's own)."""
    args = parse(reshard_parser(prog, description), argv)
    if (args.ratios or "").startswith("lognormal"):
        args.seed = seed_of_set(args)
    request = cli.read_request(args)

    def make(progress: PhaseLog) -> ShardingResult:
        return reshard_request(request, report=not args.no_report, progress=progress, debug=args.debug)

    return run_job(args, "reshard", request, make)


def seed_of_set(args: argparse.Namespace) -> int:
    """Return the seed of the set that is resharded, by which the original job would draw the same shares.

    Raises DataError if there is no set."""
    store = configured_store()
    return open_committed(store, store.resolve(cli.fill_in(args.input, args))).manifest.seed
