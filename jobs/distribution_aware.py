"""Shard images so that every worker gets its share of every neighbourhood, and a copy of every sparse neighbourhood."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_with
from pipeline.runs.program import execute
from pipeline.strategies.distribution_aware import DistributionAware


def main() -> int:
    return shard_with("distribution_aware.py", __doc__, DistributionAware)


if __name__ == "__main__":
    execute(main)
