"""Shard images so that workers see different classes, for studies of skewed data."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_by_one_of
from pipeline.runs.program import execute
from pipeline.strategies import STRATEGIES
from pipeline.strategies.dirichlet import Dirichlet

SKEWED = {name: kind for name, kind in STRATEGIES.items() if kind.decides_sizes}


def main() -> int:
    return shard_by_one_of("skewed.py", __doc__, SKEWED, default=Dirichlet.name)


if __name__ == "__main__":
    execute(main)
