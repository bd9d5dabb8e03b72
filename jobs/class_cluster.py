"""Shard images by neighbourhoods inside each class, so that classes and neighbourhoods are balanced."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_with
from pipeline.runs.program import execute
from pipeline.strategies.class_cluster import ClassCluster


def main() -> int:
    return shard_with("class_cluster.py", __doc__, ClassCluster)


if __name__ == "__main__":
    execute(main)
