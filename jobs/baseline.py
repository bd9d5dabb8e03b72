"""Shard images without looking at them: round robin, a seeded permutation, or an independent draw a row."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.strategies import STRATEGIES

BASELINES = ("round_robin", "random", "random_iid")


def main() -> int:
    flags = cli.sharding_parser("baseline.py", __doc__)
    flags.add_argument_group("strategy").add_argument(
        "--strategy",
        choices=BASELINES,
        default="random",
        help="round_robin: row i to worker i mod N; random: a permutation, then round robin, exact sizes;"
        " random_iid: binomial sizes (default %(default)s)",
    )
    args = parse(flags)
    return run_sharding(args, cli.strategy_from(args, STRATEGIES[args.strategy]))


if __name__ == "__main__":
    cli.execute(main)
