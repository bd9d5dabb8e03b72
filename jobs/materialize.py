"""Write the shards of an assignment: a committed assignment, or any table of (id, worker)."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_materializing


def main() -> int:
    flags = cli.parser("materialize.py", __doc__)
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
    return run_materializing(parse(flags))


if __name__ == "__main__":
    cli.execute(main)
