"""Shard images by the buckets of locality-sensitive hash functions, the sparse ones to every worker."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.runs import flags as cli
from pipeline.runs.command import shard_with
from pipeline.strategies.hash import Hash


def main() -> int:
    return shard_with("hash.py", __doc__, Hash)


if __name__ == "__main__":
    cli.execute(main)
