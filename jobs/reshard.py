"""Divide a committed shard set among another number of workers, without fitting the strategy again."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.program import execute
from pipeline.runs.reshard_command import run_resharding


def main() -> int:
    return run_resharding("reshard.py", __doc__)


if __name__ == "__main__":
    execute(main)
