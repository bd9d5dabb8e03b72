"""The command that writes the shards of an assignment."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.command_line import Parser, parse
from pipeline.runs import flags as cli
from pipeline.runs.api import materialize_request
from pipeline.runs.command import run_job
from pipeline.runs.program import execute
from pipeline.runs.steps.run import ShardingResult
from pipeline.spark.progress import PhaseLog


def main(argv: Sequence[str]) -> None:
    """Write the shards of an assignment, a committed set or a table, on the running Spark or on a local Spark."""
    execute(lambda: run_materializing("python -m pipeline materialize", main.__doc__, argv))


def materialize_parser(prog: str, description: str | None) -> Parser:
    flags = cli.parser(prog, description)
    cli.add_input_flags(flags)
    flags.add_argument_group("assignment").add_argument(
        "--assignment",
        required=True,
        metavar="URI",
        help="committed set whose assignment is used, or a Parquet or CSV table with the columns id (the position of a row"
        " in the input, from 0), worker, and optionally copy",
    )
    # The assignment has already decided the shares and every random choice, so there is no --ratios and no --seed.
    cli.add_output_flags(
        flags, workers="number of shards, a shard per worker (default: the assignment's)", ratios=False
    )
    cli.add_run_flags(flags, seed=False)
    return flags


def run_materializing(prog: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Materialize, write the report and print the set. Returns the exit code.

    prog, description: name and help of the command; argv: its arguments (default: the process's own)."""
    args = parse(materialize_parser(prog, description), argv)
    request = cli.read_request(args)
    assignment = cli.fill_in(args.assignment, args)

    def make(progress: PhaseLog) -> ShardingResult:
        return materialize_request(
            request, assignment, args.workers, report=not args.no_report, progress=progress, debug=args.debug
        )

    return run_job(args, "materialize", request, make)
