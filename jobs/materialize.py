"""Write the shards that an assignment describes: a committed one, or anybody's table of id and worker."""

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
        help="committed set whose assignment to take, or Parquet or CSV with the columns id (a row's place in the input,"
        " from 0) and worker, and copy where a row has several",
    )
    cli.add_output_flags(flags, workers="number of shards (default: as many as the assignment has)", ratios=False)
    cli.add_run_flags(flags, seed=False)
    return run_materializing(parse(flags))


if __name__ == "__main__":
    cli.execute(main)
