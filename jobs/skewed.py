"""Shard images so that workers see different classes, for studies of skewed data."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.command_line import parse
from pipeline.core.specs import member_from_flags
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.strategies import STRATEGIES
from pipeline.strategies.dirichlet import Dirichlet

SKEWED = {name: kind for name, kind in STRATEGIES.items() if kind.decides_sizes}


def main() -> int:
    flags = cli.sharding_parser("skewed.py", __doc__)
    cli.add_strategy_flags(flags, SKEWED, default=Dirichlet.name)
    args = parse(flags)
    return run_sharding(args, member_from_flags(SKEWED, "--strategy", args))


if __name__ == "__main__":
    cli.execute(main)
