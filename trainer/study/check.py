"""``python -m trainer.study.check``: recompute the tables of stored studies from their ledgers, and compare digests.

A stored study is a folder of conf/study/results, named after its plan. It holds the plan, the ledger and, in DIGESTS,
the SHA-256 of every file that the ledger gives. The files themselves are not stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.atomic import write_durably
from pipeline.core.command_line import CONF
from pipeline.core.errors import DataError, UsageError
from pipeline.core.extras import require
from trainer.study.__main__ import find_plan, plan_names
from trainer.study.analysis.analyse import PRIMARY, Analysis
from trainer.study.analysis.ratios import StudyRatio, pool
from trainer.study.analysis.statistics import LEVEL
from trainer.study.report.tables import Table, to_markdown_table
from trainer.study.report.words import number, p_value
from trainer.study.report.write import analysis_of, files_with_numbers
from trainer.study.run.ledger import LEDGER, Contents, StudyLedger
from trainer.study.run.sets import Sets

RESULTS = Path(str(CONF)) / "study" / "results"
FEWEST_STUDIES = 2  # that are pooled
POOLED = "pooled.md"  # in the output folder
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


def pooled_ratios(studies: Mapping[str, Analysis]) -> str:
    """Return a Markdown table with the common ratio of standard deviations of each way of sharding over several studies.

    Only studies whose seeds change the same things are pooled, since the others measure another standard deviation.
    Studies with another baseline than random, or of another axis, are left out. A study with several settings counts
    once per setting. If the ratios of the studies differ significantly, they have no common interval and p-value."""
    ratios: dict[tuple[str, tuple[str, ...]], list[StudyRatio]] = {}
    for name, analysis in studies.items():
        if (analysis.compared, analysis.baseline) == ("sharding", "random"):
            for setting in analysis.settings:
                for member in setting.members.values():
                    comparison = member.comparisons[PRIMARY]
                    if comparison and 0 < comparison.sd_ratio < math.inf:
                        ratio = StudyRatio(name, comparison.sd_ratio, comparison.n)
                        ratios.setdefault((member.name, analysis.vary), []).append(ratio)
    # Studies count as independent. They have seeds in common, and some also data and models, but differ in epochs, norm
    # or images, so that the correlation of their ratios is not known.
    rows = []
    for (member_name, vary), some in ratios.items():
        if len({each.study for each in some}) < FEWEST_STUDIES:
            continue
        pooled = pool(some)
        ends = p = "-"
        if not pooled.heterogeneity_p < LEVEL:
            ends = f"{number(pooled.interval.low)} to {number(pooled.interval.high)}"
            p = p_value(pooled.p)
        which = ", ".join(f"{each.study} ({each.n})" for each in some)
        rows.append(
            (member_name, ", ".join(vary), number(pooled.ratio), ends, p, p_value(pooled.heterogeneity_p), which)
        )
    header = (
        "sharding", "seeds change", "sd of random / sd", "95 %", "p", "p of heterogeneity", "studies (pairs)",
    )  # fmt: skip
    return to_markdown_table(Table("Ratios of standard deviations, pooled over studies", header, rows))


def digests(files: Mapping[str, str]) -> str:
    """Return the lines that ``sha256sum`` prints for some files."""
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items()))


def check(folder: Path, output: Path) -> Analysis:
    """Write a study's files to a folder, and return its analysis.

    Raises DataError for the first file that differs from the published one."""
    analysis = recompute(folder)
    files = files_with_numbers(analysis)
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_durably(output / name, text.encode())
    # Compared after all files are written, so that a reader of the error finds the new file.
    published = (folder / DIGESTS).read_text().splitlines() if (folder / DIGESTS).is_file() else []
    for line in digests(files).splitlines():
        if line not in published:
            raise DataError(
                f"{output / line.split()[1]} differs from the published file; if the change is intended, run"
                f" {PROG} --accept, which renews {folder / DIGESTS}"
            )
    return analysis


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
    studies = {}
    for folder in args.folders or stored_studies():
        if args.accept:
            write_durably(folder / DIGESTS, digests(files_with_numbers(recompute(folder))).encode())
        output = args.output / folder.name
        # Also after --accept, since it writes the tables.
        studies[folder.name] = check(folder, output)
        print(f"{folder.name}: the published tables agree with the ledger; see {output}/README.md")
    if len(studies) > 1:
        write_durably(args.output / POOLED, pooled_ratios(studies).encode())
        print(f"{args.output / POOLED}: ratios of standard deviations, pooled over the studies")
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted="run it again")
