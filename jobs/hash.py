"""Shard images by buckets of locality-sensitive hash functions, with copies of sparse buckets on every worker."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_with
from pipeline.runs.program import execute
from pipeline.strategies.hash import Hash


def main() -> int:
    return shard_with("hash.py", __doc__, Hash)


if __name__ == "__main__":
    execute(main)
