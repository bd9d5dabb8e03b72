"""Shard images so that every worker holds its share of every neighbourhood, and all of the sparse ones."""

import sys
from argparse import BooleanOptionalAction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.command_line import parse
from pipeline.runs import flags as cli
from pipeline.runs.command import run_sharding
from pipeline.strategies.distribution_aware import PRESETS, DistributionAware


def main() -> int:
    flags = cli.sharding_parser("distribution_aware.py", __doc__)
    group = flags.add_argument_group("strategy")
    group.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default="paper-like",
        help="paper-like: 160 whitened components, which find sparse neighbourhoods; plain: components of 95%% of the"
        " variance, not whitened (default %(default)s)",
    )
    cli.add_cluster_flags(group, components=None)
    group.add_argument(
        "--whiten",
        action=BooleanOptionalAction,
        default=None,
        help="scale components to equal variance, or keep their variances (default: the preset's)",
    )
    group.add_argument("--n-init", type=int, default=1, metavar="R", help="k-means starts, the best kept (default 1)")
    group.add_argument(
        "--sparse-if",
        choices=["le", "lt"],
        default="le",
        help="a neighbourhood of at most (le) or fewer than (lt) N rows goes to every worker (default le)",
    )
    cli.add_start_flag(group, default="zero")
    group.add_argument(
        "--engine",
        choices=["block", "spark-ml"],
        default="block",
        help="exact block PCA and integer k-means, or stock spark.ml, slow, for comparison (default block)",
    )
    args = parse(flags)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return run_sharding(args, cli.strategy_from(args, DistributionAware))


if __name__ == "__main__":
    cli.execute(main)
