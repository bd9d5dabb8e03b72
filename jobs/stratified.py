"""Shard images class by class, round robin, so that every worker holds its share of every class."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.strategies.stratified import Stratified


def main() -> int:
    flags = cli.sharding_parser("stratified.py", __doc__)
    group = flags.add_argument_group("strategy")
    cli.add_start_flag(group, default="zero")
    group.add_argument("--shuffle-within-class", action="store_true", help="deal each class in a seeded random order")
    args = parse(flags)
    return run_sharding(args, cli.strategy_from(args, Stratified))


if __name__ == "__main__":
    cli.execute(main)
