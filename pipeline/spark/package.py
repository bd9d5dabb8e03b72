"""``python -m pipeline zip``: packs the packages that the jobs need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.spark.session import PACKAGE, package_zip

TRAINER = PACKAGE.parent / "trainer"  # for jobs/train.py; missing if only the pipeline is installed


def main(argv: Sequence[str]) -> None:
    """Pack the packages of the jobs into a zip file for --py-files of spark-submit."""
    parser = command_line.parser("python -m pipeline zip", main.__doc__, "")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="zip file to write")
    args = parser.parse_args(argv)
    args.to.parent.mkdir(parents=True, exist_ok=True)
    packages = [package for package in (PACKAGE, TRAINER) if package.is_dir()]
    print(f"{package_zip(args.to, *packages)}: written")
