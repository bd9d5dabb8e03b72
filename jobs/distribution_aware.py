"""Shard images so that every worker holds its share of every neighbourhood, and all of the sparse ones."""

import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline import cli
from pipeline.jobs import run_sharding
from pipeline.strategies.distribution_aware import PRESETS, DistributionAware


def main() -> int:
    flags = cli.parser("distribution_aware.py", __doc__)
    cli.add_input_flags(flags)
    cli.add_output_flags(flags)
    group = flags.add_argument_group("strategy")
    group.add_argument("--preset", choices=sorted(PRESETS), default="paper-like", help="paper-like: 160 whitened"
                       " components, finds sparse neighbourhoods; plain: components of 95%% of the variance, not whitened"
                       " (default %(default)s)")  # fmt: skip
    group.add_argument("--clusters", type=int, metavar="K", help="neighbourhoods (default: twice the classes)")
    group.add_argument("--components", type=float, metavar="C", help="principal components: a count, or a share of variance below 1 (default: the preset's)")
    group.add_argument("--whiten", action="store_true", default=None, help="scale components to equal variance")
    group.add_argument("--no-whiten", dest="whiten", action="store_false", help="keep their variances")
    group.add_argument("--max-iter", type=int, default=150, metavar="I", help="k-means iterations (default 150)")
    group.add_argument("--tol", type=float, default=1e-4, help="k-means tolerance, as scikit-learn's (default 1e-4)")
    group.add_argument("--n-init", type=int, default=1, metavar="R", help="k-means starts, best kept (default 1)")
    group.add_argument("--sparse-if", choices=["le", "lt"], default="le", help="a neighbourhood of at most (le) or fewer than (lt) N rows goes to every worker (default le)")
    group.add_argument("--start", choices=["zero", "carry"], default="zero", help="first worker of a neighbourhood: 0, or where the one before left off (default zero)")
    group.add_argument("--engine", choices=["block", "spark-ml"], default="block", help="exact block PCA and integer k-means, or stock spark.ml (slow; for comparison)")
    cli.add_run_flags(flags)
    args = cli.parse(flags)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    strategy = DistributionAware(**{field.name: getattr(args, field.name) for field in fields(DistributionAware)})
    return run_sharding(args, strategy)


if __name__ == "__main__":
    cli.execute(main)
