"""Shard images by neighbourhoods found inside each class: balanced in classes and in neighbourhoods."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.strategies.class_cluster import ClassCluster


def main() -> int:
    flags = cli.sharding_parser("class_cluster.py", __doc__)
    group = flags.add_argument_group("strategy")
    cli.add_cluster_flags(group, components=50.0)
    group.add_argument("--whiten", action="store_true", help="scale components to equal variance")
    cli.add_start_flag(group, default="carry")
    args = parse(flags)
    return run_sharding(args, cli.strategy_from(args, ClassCluster))


if __name__ == "__main__":
    cli.execute(main)
