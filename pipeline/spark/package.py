"""``python -m pipeline zip``: the packages that jobs/ need as one file, for spark-submit's --py-files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.spark.session import PACKAGE, package_zip

TRAINER = PACKAGE.parent / "trainer"  # for jobs/train.py; missing if only the pipeline is installed


def main(argv: Sequence[str]) -> None:
    parser = command_line.parser("python -m pipeline zip", __doc__, "")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the zip to write")
    args = parser.parse_args(argv)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    packages = [package for package in (PACKAGE, TRAINER) if package.is_dir()]
    print(f"{package_zip(args.to, *packages)}: written")
