"""Shard images without reading them: round robin, in random order, or by independent draws."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.command import shard_by_one_of
from pipeline.runs.program import execute
from pipeline.strategies import STRATEGIES
from pipeline.strategies.random import Random

BASELINES = {
    name: kind
    for name, kind in STRATEGIES.items()
    if not (kind.looks_at_labels or kind.looks_at_pixels or kind.decides_sizes or kind.reads_table)
}


def main() -> int:
    return shard_by_one_of("baseline.py", __doc__, BASELINES, default=Random.name)


if __name__ == "__main__":
    execute(main)
