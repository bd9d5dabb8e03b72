"""``python -m trainer.study.check``: recompute the tables of stored studies from their ledgers, and compare digests.

A stored study is a folder of conf/study/results, named after its plan. It holds the plan, the ledger and, in DIGESTS,
the SHA-256 of every file that the ledger gives. The files themselves are not stored, except for the picture of the
ratios that are pooled over all studies, which a manual shows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.atomic import write_durably
from pipeline.core.command_line import CONF
from pipeline.core.errors import DataError, UsageError
from pipeline.core.extras import require
from pipeline.core.program import execute
from trainer.study.__main__ import find_plan, plan_names
from trainer.study.analysis.results import Analysis
from trainer.study.report.pooled import pooled_page, pooled_svg
from trainer.study.report.write import analysis_of, files_with_numbers
from trainer.study.run.ledger import LEDGER, Contents, StudyLedger
from trainer.study.run.sets import Sets

RESULTS = Path(str(CONF)) / "study" / "results"
POOLED = "pooled.md"  # in the output folder
POOLED_FIGURE = "pooled.svg"  # likewise, and beside the stored studies
DIGESTS = "derived.sha256"  # in the format of sha256sum
PROG = "python -m trainer.study.check"
DESCRIPTION = "Recompute the tables of stored studies from their ledgers, and compare them with the published tables."


def stored_studies() -> list[Path]:
    """Return the folders of the studies in this checkout; a wheel has none."""
    return sorted(path.parent for path in RESULTS.glob(f"*/{LEDGER}"))


def recompute(folder: Path) -> Analysis:
    """Return the analysis of a stored study, recomputed from its ledger.

    Raises UsageError if the folder belongs to another plan, DataError if its runs have different data."""
    if not (folder / LEDGER).is_file():
        raise UsageError(f"{folder} contains no {LEDGER}; give the folder of a study")
    if folder.name not in plan_names():
        raise UsageError(f"{folder}: no plan is named {folder.name}; plans are {', '.join(plan_names())}")
    plan = find_plan(folder.name)
    ledger = StudyLedger(folder / LEDGER)
    analysis = analysis_of(plan, folder, ledger)
    Contents(ledger.records_of_plan(plan), Sets(plan, folder).owner)
    return analysis


def digests(files: Mapping[str, str]) -> str:
    """Return the lines that ``sha256sum`` prints for some files."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items()))


def check(folder: Path, output: Path, *, accept: bool = False) -> Analysis:
    """Write a study's files to a folder, and return its analysis.

    Raises DataError for the first file that differs from the published one.

    accept: whether to publish the files instead, by renewing the digests."""
    analysis = recompute(folder)
    files = files_with_numbers(analysis)
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_durably(output / name, text.encode())
    if accept:
        write_durably(folder / DIGESTS, digests(files).encode())
    # Compared after all files are written, so that a reader of the error finds the new file.
    _compare(files, output, folder / DIGESTS)
    return analysis


def _compare(files: Mapping[str, str], output: Path, stored: Path) -> None:
    """Raise DataError for the first of some files in ``output`` whose digest is not in the file ``stored``."""
    published = stored.read_text(encoding="utf-8").splitlines() if stored.is_file() else []
    for line in digests(files).splitlines():
        if line not in published:
            raise DataError(
                f"{output / line.split()[1]} differs from the published file; if the change is intended, run"
                f" {PROG} --accept, which renews {stored}"
            )


def write_pooled(studies: Mapping[str, Analysis], output: Path) -> dict[str, str]:
    """Write the page and the figure of several studies together, and return the page by its name.

    The bytes of a figure depend on the version of matplotlib, so that only the page is compared."""
    page = {POOLED: pooled_page(studies)}
    for name, text in {**page, POOLED_FIGURE: pooled_svg(studies)}.items():
        write_durably(output / name, text.encode())
    return page


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
    args = parser.parse_args(argv)
    require("study", "checking a study")
    if not (args.folders or stored_studies()):
        print(f"no study is stored in {RESULTS}: nothing to check")
    studies = {}
    for folder in args.folders or stored_studies():
        output = args.output / folder.name
        studies[folder.name] = check(folder, output, accept=args.accept)
        print(f"{folder.name}: the published tables agree with the ledger; see {output}/README.md")
    if len(studies) > 1:
        page = write_pooled(studies, args.output)
        if args.accept and not args.folders:
            write_durably(RESULTS / DIGESTS, digests(page).encode())
            write_durably(RESULTS / POOLED_FIGURE, (args.output / POOLED_FIGURE).read_bytes())
        # Some of the studies have other pooled ratios than all of them.
        if not args.folders:
            _compare(page, args.output, RESULTS / DIGESTS)
        print(
            f"{args.output / POOLED}: ratios of standard deviations, pooled over the studies; {POOLED_FIGURE} shows them"
        )
    return 0


if __name__ == "__main__":
    execute(main, interrupted="run it again")
