"""``python -m trainer.study.check``: computes every printed number of stored studies again, from their ledgers alone.

A stored study is a folder with a ledger, named after the plan that it is of, such as those of trainer/study/results.
``--write`` brings its files up to date instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipeline import command_line
from pipeline.atomic import write_durably
from pipeline.errors import DataError, UsageError
from pipeline.extras import require
from trainer.study.__main__ import find_plan, shipped
from trainer.study.ledger import LEDGER, Contents, Ledger
from trainer.study.report import analysis_of, written
from trainer.study.sets import Sets

RESULTS = Path(__file__).resolve().parent / "results"
PROG = "python -m trainer.study.check"
DESCRIPTION = "Compute every printed number of stored studies again, from their ledgers."


def stored() -> list[Path]:
    """The studies that came with the program."""
    return sorted(path.parent for path in RESULTS.glob(f"*/{LEDGER}"))


def recomputed(folder: Path) -> dict[str, str]:
    """The files of a stored study, as its ledger has them. Raises UsageError, DataError where it is of another plan or its
    runs are not of one set of data."""
    if not (folder / LEDGER).is_file():
        raise UsageError(f"{folder} holds no {LEDGER}")
    if folder.name not in shipped():
        raise UsageError(f"{folder}: no plan is named {folder.name}; plans are {', '.join(shipped())}")
    plan = find_plan(folder.name)
    ledger = Ledger(folder / LEDGER)
    analysis = analysis_of(plan, folder, ledger)
    Contents(ledger.of_plan(plan), Sets(plan, folder).owner)
    return written(analysis)


def check(folder: Path) -> None:
    """Raises DataError, naming the first line that the ledger does not bear out."""
    for name, text in recomputed(folder).items():
        path = folder / name
        found = path.read_text().splitlines() if path.is_file() else []
        expected = text.splitlines()
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False), 1)
            line = next((number for number, (a, b) in pairs if a != b), min(len(found), len(expected)) + 1)
            raise DataError(f"{path}, line {line} is not what the ledger gives; {PROG} --write brings it up to date")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(PROG, DESCRIPTION, "")
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="DIR", help="stored studies (default: those that came with it)"
    )
    parser.add_argument("--write", action="store_true", help="write the files instead of comparing them")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require("study", "checking a study")
    if not (args.folders or stored()):
        print(f"no study is stored in {RESULTS}: nothing to check")
    for folder in args.folders or stored():
        if args.write:
            for name, text in recomputed(folder).items():
                write_durably(folder / name, text.encode())
        else:
            check(folder)
        print(f"{folder.name}: {'written' if args.write else 'every number is that of the ledger'}")
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted="run it again")
