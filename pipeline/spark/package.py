"""``python -m pipeline zip``: this package as one file, for spark-submit's --py-files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipeline.spark.session import package_zip


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline zip", description=__doc__)
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the zip to write")
    args = parser.parse_args(argv)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    print(f"{package_zip(args.to)}: written")
