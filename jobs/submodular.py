"""Shard images so that every worker gets the most representative subset of every class."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_with
from pipeline.runs.program import execute
from pipeline.strategies.submodular import Submodular


def main() -> int:
    return shard_with("submodular.py", __doc__, Submodular)


if __name__ == "__main__":
    execute(main)
