"""Shard one input by every strategy and set quality and seconds side by side, in a table and a page."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.compare import run_comparison
from pipeline.specs import add_flags
from pipeline.strategies import STRATEGIES
from pipeline.strategies.hash import Hash
from pipeline.strategies.neighbourhoods import NeighbourhoodStrategy
from pipeline.strategies.submodular import Submodular


def main() -> int:
    flags = cli.sharding_parser("compare.py", __doc__, assignment=False)
    group = flags.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        default=",".join(STRATEGIES),
        metavar="A,B,...",
        help="which ones, each committed to OUTPUT/NAME (default %(default)s)",
    )
    add_flags(group, NeighbourhoodStrategy, leave_out=cli.COMMON)
    add_flags(group, Submodular, only=("function", "block_rule"))
    add_flags(group, Hash, only=("family", "functions", "width"))
    return run_comparison(parse(flags))


if __name__ == "__main__":
    cli.execute(main)
