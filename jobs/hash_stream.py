"""Shard a stream of images by buckets of hash functions; every batch adds a generation to the shard set."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.program import execute
from pipeline.stream.command import run_stream


def main() -> int:
    return run_stream("hash_stream.py", __doc__)


if __name__ == "__main__":
    execute(main)
