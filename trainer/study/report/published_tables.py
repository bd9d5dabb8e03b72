"""Tables that show published figures beside a study's own. Pure."""

from __future__ import annotations

import math
from typing import TypeAlias

from trainer.study.analysis.published import RUNS, PublishedFigures, PublishedTable, published_of
from trainer.study.analysis.published_comparisons import accuracies_of, differences_of
from trainer.study.analysis.ratios import compare_ratios
from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import PRIMARY, ComparisonSide
from trainer.study.analysis.statistics import Comparison, f_interval
from trainer.study.report.table import Table, difference_in_points, ends_in_words, fixed, short
from trainer.study.report.words import POINTS, number, p_value
from trainer.study.run.ledger import run_of

RUNNING = "running_train_accuracy"
OURS = ("runs", "mean", "sd", "sd of random / sd", "95 % (F)", "loss")
Cells: TypeAlias = tuple[str, ...]


def published_tables(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the tables of published figures beside this study's; none if none are of its data set."""
    return [
        *_sharding_tables(analysis, setting),
        *_published_accuracies(analysis, setting),
        *_published_differences(analysis, setting),
    ]


def _sharding_tables(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return tables of the paper's figures of ways of sharding, or nothing if the paper has none for the data set."""
    printed = published_of(setting.dataset) if analysis.compared == "sharding" else None
    if not printed:
        return []
    base = printed.rows["random"]
    rows = []
    # Ways of sharding that only one side has get a row too.
    for name in dict.fromkeys([*setting.members, *printed.rows]):
        member = setting.members.get(name)
        published = printed.rows.get(name)
        comparison = member.comparisons[PRIMARY] if member and analysis.baseline == "random" else None
        rows.append((name, *_ours(member, comparison, PRIMARY, "final_loss"), *_theirs(published, base)))
    header = ("sharding", *OURS, *(f"published {column}" for column in OURS))
    tables = [Table(f"Beside the published figures ({printed.title}; ResNet-56): {setting.name}", header, rows)]
    tables += _published_training(analysis, setting, printed)
    if any(name in printed.sparse for name in setting.members):
        tables += [_sparse_neighbourhoods(setting, printed), _runs_by_sparse_neighbourhoods(setting, printed)]
    return tables


def _published_accuracies(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table of published accuracies beside this study's; none if none are known."""
    shared = frozenset(setting.name.split(", "))
    rows = []
    for member in setting.members.values():
        for each in accuracies_of(setting.dataset, shared | {member.name}):
            ours = f"{POINTS * member.summaries[PRIMARY].mean:.2f}" if PRIMARY in member.summaries else "-"
            rows.append((member.name, ours, f"{each.percent:.1f}", each.source))
    header = (analysis.compared, "mean accuracy, %", "published", "source")
    return [Table(f"Beside published accuracies: {setting.name}", header, rows)] if rows else []


def _published_differences(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table of published differences of accuracy and times beside this study's; none if none are known."""
    rows = []
    base = analysis.baseline
    for member in setting.members.values():
        for each in differences_of(
            setting.dataset, analysis.compared, base, member.name, tuple(setting.name.split(", "))
        ):
            ours = "-"
            if c := member.comparisons[PRIMARY]:
                ours = difference_in_points(c)
            # Runs of equal length differ in time only if the published ones do too.
            speed = number(setting.members[base].seconds / member.seconds) if base in setting.members else "-"
            rows.append((member.name, ours, f"{each.points:+.2f}", speed, number(each.speed), each.source))
    header = (
        analysis.compared, f"mean - mean of {base}, points (95 %)", "published", f"time of {base} / time", "published time",
        "source",
    )  # fmt: skip
    return [Table(f"Beside published comparisons: {setting.name}", header, rows)] if rows else []


def _published_training(analysis: Analysis, setting: StudySetting, printed: PublishedTable) -> list[Table]:
    """Return the table of the paper's standard deviations of training accuracy beside this study's.

    Empty if the paper's are not known, or if the ledger has no accuracy of training rows as they were trained."""
    published = {name: row for name, row in printed.rows.items() if not math.isnan(row.train_accuracy_sd)}
    ours = {name: member for name, member in setting.members.items() if RUNNING in member.summaries}
    if not published or not ours:
        return []
    rows = []
    # Ways of sharding that only one side has get a row too.
    for name in dict.fromkeys([*ours, *published]):
        comparison = ours[name].comparisons[RUNNING] if name in ours and analysis.baseline == "random" else None
        rows.append(
            (
                name,
                *_ours(ours.get(name), comparison, RUNNING, "running_train_loss"),
                *_paper_training(published.get(name), published["random"], comparison),
            )
        )
    published_columns = ("published sd", "published sd of random / sd", "published 95 % (F)", "published loss")
    header = ("sharding", *OURS, *published_columns, "published ratio / ours (95 %)", "p")
    caption = f"Beside the published accuracy of rows as they were trained ({printed.title}): {setting.name}"
    return [Table(caption, header, rows)]


def _paper_training(row: PublishedFigures | None, base: PublishedFigures, comparison: Comparison | None) -> Cells:
    """Return the paper's training figures of a row, and a test of whether its ratio differs from ours.

    base: the paper's row of random sharding. comparison: ours of the same way of sharding; None if there is none."""
    if not row:
        return ("-",) * 6
    sd = f"{row.train_accuracy_sd:.6f}"
    loss = _with_sd(row.train_loss, row.train_loss_sd)
    if row is base:
        return (sd, "-", "-", loss, "-", "-")
    ratio = base.train_accuracy_sd / row.train_accuracy_sd
    tested = ("-", "-")
    # Neither side of a ratio of ratios may be 0 or infinite.
    if comparison and 0 < comparison.sd_ratio < math.inf:
        relative = compare_ratios(ratio, RUNS, comparison.sd_ratio, comparison.n)
        tested = (f"{number(relative.value)} ({ends_in_words(relative.interval)})", p_value(relative.p))
    return (sd, number(ratio), ends_in_words(f_interval(ratio, RUNS)), loss, *tested)


def _ours(member: ComparisonSide | None, comparison: Comparison | None, accuracy_key: str, loss_key: str) -> Cells:
    """Return a member's accuracy, ratio and loss in the order of OURS; "-" for values that are unknown.

    Args:
        member: of this study.
        comparison: of its accuracy with random sharding, to which the published ratios refer; None for no ratio.
        accuracy_key, loss_key: the two measures.
    """
    if not member or accuracy_key not in member.summaries:
        return ("-",) * len(OURS)
    accuracy = member.summaries[accuracy_key]
    loss = member.summaries.get(loss_key)
    ratio = (number(comparison.sd_ratio), ends_in_words(comparison.sd_ratio_f)) if comparison else ("-", "-")
    losses = _with_sd(loss.mean, loss.sd) if loss else "-"
    return (str(accuracy.n), fixed(accuracy.mean), short(accuracy.sd), *ratio, losses)


def _theirs(row: PublishedFigures | None, base: PublishedFigures) -> Cells:
    """Return a row of the paper in the order of the columns; "-" if the paper has no such row.

    base: the paper's row of random sharding, with which ``row`` is compared."""
    if not row:
        return ("-",) * 6
    ratio = base.accuracy_sd / row.accuracy_sd
    ends = ("-", "-") if row is base else (number(ratio), ends_in_words(f_interval(ratio, RUNS)))
    return (str(RUNS), f"{row.accuracy:.6f}", f"{row.accuracy_sd:.6f}", *ends, _with_sd(row.loss, row.loss_sd))


def _with_sd(mean: float, sd: float) -> str:
    return "-" if math.isnan(mean) else f"{mean:.4f} ({short(sd)})"


def _sparse_neighbourhoods(setting: StudySetting, printed: PublishedTable) -> Table:
    """Return the table that compares the numbers of sparse neighbourhoods with the published ones (table III of Provatas
    et al. 2021).

    A neighbourhood is sparse if it has at most as many rows as there are workers. One row per way of sharding that the
    paper has: mean and range over its runs here, the mean size, then the three published runs. The mean sizes and the
    accuracies that the paper also prints are not known here."""
    rows = []
    for name in filter(setting.members.__contains__, printed.sparse):
        facts = [record["sharding"] for record in setting.members[name].records]
        counts = [each["sparse"] for each in facts]
        ours = f"{sum(counts) / len(counts):.1f} ({min(counts)} to {max(counts)})"
        size = f"{sum(each['sparse_rows'] for each in facts) / sum(counts):.1f}" if any(counts) else "-"
        rows.append((name, ours, size, ", ".join(map(str, printed.sparse[name]))))
    header = ("sharding", "sparse neighbourhoods, mean and range", "rows of one, mean", "published, three runs")
    return Table(f"Sparse neighbourhoods (Table III): {setting.name}", header, rows)


def _runs_by_sparse_neighbourhoods(setting: StudySetting, printed: PublishedTable) -> Table:
    """Return the table of each run's number of sparse neighbourhoods beside its accuracy, as in table III.

    One row per seed, and one column per way of sharding that the paper has."""
    names = [name for name in setting.members if name in printed.sparse]
    cells: dict[int, dict[str, str]] = {}
    for name in names:
        for record in setting.members[name].records:
            accuracy = "-" if record[PRIMARY] is None else fixed(record[PRIMARY])
            cells.setdefault(run_of(record).seed, {})[name] = f"{record['sharding']['sparse']}: {accuracy}"
    rows = [(str(seed), *(by_name.get(name, "-") for name in names)) for seed, by_name in sorted(cells.items())]
    caption = f"Accuracy of each run after its number of sparse neighbourhoods (Table III): {setting.name}"
    return Table(caption, ("seed", *names), rows)
