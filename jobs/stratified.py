"""Shard images class by class, round robin, so that every worker holds its share of every class."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # absent on YARN, where --py-files brings the package

from pipeline.runs import flags as cli
from pipeline.runs.command import shard_with
from pipeline.strategies.stratified import Stratified


def main() -> int:
    return shard_with("stratified.py", __doc__, Stratified)


if __name__ == "__main__":
    cli.execute(main)
