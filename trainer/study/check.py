"""``python -m trainer.study.check``: recompute the tables of stored studies from their ledgers, and compare digests.

A stored study is a folder of conf/study/results, named after its plan. It holds the plan, the ledger and, in DIGESTS,
the SHA-256 of every file that the ledger gives. The files themselves are not stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.atomic import write_durably
from pipeline.core.command_line import CONF
from pipeline.core.errors import DataError, UsageError
from pipeline.core.extras import require
from trainer.study.__main__ import find_plan, plan_names
from trainer.study.report.write import analysis_of, files_with_numbers
from trainer.study.run.ledger import LEDGER, Contents, StudyLedger
from trainer.study.run.sets import Sets

RESULTS = Path(str(CONF)) / "study" / "results"
DIGESTS = "derived.sha256"  # in the format of sha256sum
PROG = "python -m trainer.study.check"
DESCRIPTION = "Recompute the tables of stored studies from their ledgers, and compare them with the published tables."


def stored_studies() -> list[Path]:
    """Return the folders of the studies in this checkout; a wheel has none."""
    return sorted(path.parent for path in RESULTS.glob(f"*/{LEDGER}"))


def recompute_files(folder: Path) -> dict[str, str]:
    """Return the files of a stored study, by name, recomputed from its ledger.

    Raises UsageError if the folder belongs to another plan, DataError if its runs have different data."""
    if not (folder / LEDGER).is_file():
        raise UsageError(f"{folder} contains no {LEDGER}; give the folder of a study")
    if folder.name not in plan_names():
        raise UsageError(f"{folder}: no plan is named {folder.name}; plans are {', '.join(plan_names())}")
    plan = find_plan(folder.name)
    ledger = StudyLedger(folder / LEDGER)
    analysis = analysis_of(plan, folder, ledger)
    Contents(ledger.records_of_plan(plan), Sets(plan, folder).owner)
    return files_with_numbers(analysis)


def digests(files: Mapping[str, str]) -> str:
    """Return the lines that ``sha256sum`` prints for some files."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items()))


def check(folder: Path, output: Path) -> None:
    """Write a study's files to a folder. Raises DataError for the first file that differs from the published one."""
    files = recompute_files(folder)
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_durably(output / name, text.encode())
    published = (folder / DIGESTS).read_text().splitlines() if (folder / DIGESTS).is_file() else []
    for line in digests(files).splitlines():
        if line not in published:
            raise DataError(
                f"{output / line.split()[1]} differs from the published file; if the change is intended, run"
                f" {PROG} --accept, which renews {folder / DIGESTS}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(PROG, DESCRIPTION, "")
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="DIR", help="folders of stored studies (default: all of this checkout)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/study-check"),
        metavar="DIR",
        help="folder to which the tables are written, in a subfolder per study (default: %(default)s)",
    )
    parser.add_argument("--accept", action="store_true", help="renew the digests instead of comparing them")
    parser.add_argument("--debug", action="store_true", help="show stack traces")
    args = parser.parse_args(argv)
    require("study", "checking a study")
    if not (args.folders or stored_studies()):
        print(f"no study is stored in {RESULTS}: nothing to check")
    for folder in args.folders or stored_studies():
        if args.accept:
            write_durably(folder / DIGESTS, digests(recompute_files(folder)).encode())
        output = args.output / folder.name
        # Also after --accept, since it writes the tables.
        check(folder, output)
        print(f"{folder.name}: the published tables agree with the ledger; see {output}/README.md")
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted="run it again")
