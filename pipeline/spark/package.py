"""``python -m pipeline zip``: packs the packages that the jobs need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.errors import JobError, UsageError
from pipeline.spark.shipping import PACKAGE, package_zip

TRAINER = PACKAGE.parent / "trainer"  # for jobs/train.py; missing if only the pipeline is installed


def main(argv: Sequence[str]) -> None:
    """Pack the packages of the jobs into a zip file for --py-files of spark-submit."""
    parser = command_line.parser("python -m pipeline zip", main.__doc__, "")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="zip file to write")
    args = parser.parse_args(argv)
    if args.to.is_dir():
        raise UsageError(f"--to {args.to} is a folder; name the zip file")
    packages = [package for package in (PACKAGE, TRAINER) if package.is_dir()]
    partial = args.to.with_name(f".{args.to.name}.{os.getpid()}")
    try:
        args.to.parent.mkdir(parents=True, exist_ok=True)
        # A job that is submitted meanwhile reads the earlier file or the new one, never a part.
        package_zip(partial, *packages).replace(args.to)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise JobError(f"{args.to} cannot be written: {error.strerror or error}; choose another --to") from None
    print(f"{args.to}: written")
