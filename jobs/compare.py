"""Shard an input by every strategy, and compare quality and seconds in a table and a report."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.compare import run_comparison
from pipeline.runs.program import execute


def main() -> int:
    return run_comparison("compare.py", __doc__)


if __name__ == "__main__":
    execute(main)
