"""Divide a committed shard set among another number of workers, without fitting the strategy again."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_resharding


def main() -> int:
    flags = cli.parser("reshard.py", __doc__)
    flags.add_argument_group("input").add_argument(
        "--input",
        required=True,
        metavar="URI",
        help="folder of a committed set, the --output of another job",
    )
    cli.add_output_flags(flags, rescan=False)
    cli.add_run_flags(flags, seed=False)
    return run_resharding(parse(flags))


if __name__ == "__main__":
    cli.execute(main)
