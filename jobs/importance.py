"""Shard images by the losses that a training run had on them, so that shards have equal or falling importance."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_with
from pipeline.runs.program import execute
from pipeline.strategies.importance import Importance


def main() -> int:
    return shard_with("importance.py", __doc__, Importance)


if __name__ == "__main__":
    execute(main)
