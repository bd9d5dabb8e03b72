"""The tables of a study, once as rows of text for people, and written as CSV, LaTeX and Markdown. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

from trainer.study.analysis import MEASURES, PRIMARY, Analysis, Member, Setting
from trainer.study.findings import findings, number, p_value
from trainer.study.published import RUNS, SPARSE, published_of

NAMES = {
    "final_accuracy": "final accuracy",
    "best_accuracy": "best accuracy",
    "final_loss": "final loss",
    "train_accuracy": "accuracy, training rows",
    "train_loss": "loss, training rows",
    "running_train_loss": "loss as it was trained, last epoch",
}
PRINTED = ("final_accuracy", "best_accuracy", "final_loss")
COLUMNS = (
    "setting", "member", "measure", "runs", "diverged", "mean", "mean_low", "mean_high", "sd", "sd_low", "sd_high",
    "variance", "least", "most", "pairs", "sd_ratio", "sd_ratio_f_low", "sd_ratio_f_high", "sd_ratio_bootstrap_low",
    "sd_ratio_bootstrap_high", "spread_p", "brown_forsythe_p", "adjusted_spread_p",
    "difference", "difference_low", "difference_high",
    "difference_p", "adjusted_difference_p", "equivalence_p", "adjusted_equivalence_p",
    "correlation",
)  # fmt: skip


class Table(NamedTuple):
    """A caption, a header, and rows of text; all columns but the first are numbers."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(analysis: Analysis) -> list[Table]:
    """Every table of the report, setting by setting."""
    return [table for setting in analysis.settings for table in setting_tables(analysis, setting)]


def setting_tables(analysis: Analysis, setting: Setting) -> list[Table]:
    made = [
        _measure(analysis, setting, key) for key in PRINTED if any(key in m.summaries for m in setting.members.values())
    ]
    made += [_curve(analysis, setting), _work(setting)]
    if analysis.compared == "sharding":
        made.append(_quality(setting))
    return [*made, *_published(analysis, setting)]


def _measure(analysis: Analysis, setting: Setting, key: str) -> Table:
    header = (
        analysis.compared, "runs", "mean", "mean's 95 %", "sd", "variance", "least", "most",
        f"sd of {analysis.baseline} / sd", "95 % (F)", "95 % (bootstrap)", "p of spread", "adjusted", "p of mean",
        "adjusted", "p of equivalence, adjusted", "correlation of pairs",
    )  # fmt: skip
    rows = []
    for member in setting.members.values():
        s, c = member.summaries.get(key), member.comparisons.get(key)
        if s is None:
            continue
        low, high = s.mean_interval
        mean = (_fixed(s.mean), "-" if math.isnan(low) else f"{_fixed(low)} to {_fixed(high)}")
        spread = (_short(s.sd), _short(s.variance), _fixed(s.least), _fixed(s.most))
        compared: tuple[str, ...] = ("",) * 9
        if c:
            ratio = (number(c.sd_ratio), _ends(c.sd_ratio_f), _ends(c.sd_ratio_bootstrap))
            ps = (c.spread_p, c.adjusted_spread_p, c.difference_p, c.adjusted_difference_p)
            equivalence = p_value(c.adjusted_equivalence_p) if "accuracy" in key else ""
            compared = (*ratio, *map(p_value, ps), equivalence, number(c.correlation))
        rows.append((member.name, str(s.n), *mean, *spread, *compared))
    return Table(f"{NAMES[key].capitalize()}: {setting.name}", header, rows)


def _curve(analysis: Analysis, setting: Setting) -> Table:
    header = (analysis.compared, "ratio of distances", "p", "adjusted", "best epoch, mean", "last epoch's gain, points")
    rows = []
    for member in setting.members.values():
        epochs = [record["best_epoch"] for record in member.records if record["best_epoch"] is not None]
        best = f"{sum(epochs) / len(epochs):.1f}" if epochs else "-"
        gain = "-"
        if member.curves and len(member.curves.epochs) > 1:
            gain = f"{100 * float((member.curves.accuracy[:, -1] - member.curves.accuracy[:, -2]).mean()):+.2f}"
        found = (number(member.curve_ratio), p_value(member.curve_p), p_value(member.curve_adjusted_p))
        rows.append((member.name, *found, best, gain))
    return Table(f"Spread over the whole curve, mean distance from the median curve: {setting.name}", header, rows)


def _work(setting: Setting) -> Table:
    header = ("", "staleness, mean", "seconds of training", "gradients", "refused", "restarts")
    rows = []
    for member in setting.members.values():
        whole = [record for record in member.records if record[PRIMARY] is not None]
        if whole:
            sums = [sum(record[key] for record in whole) for key in ("updates", "rejected", "restarts")]
            mean = f"{sums[0] / len(whole):,.0f}"
            rows.append(
                (member.name, f"{member.staleness:.2f}", f"{member.seconds:,.1f}", mean, str(sums[1]), str(sums[2]))
            )
    return Table(f"Staleness and time: {setting.name}", header, rows)


def _quality(setting: Setting) -> Table:
    header = (
        "sharding",
        "MMD2, of an even share's",
        "chi-square of classes",
        "Cramer's V",
        "copies",
        "sparse groups",
        "largest / least",
    )
    rows = []
    for member in setting.members.values():
        q = member.quality
        cells = (number(q["mmd_ratio"]), number(q["chi_square"]), number(q["cramers_v"]))
        rows.append((member.name, *cells, number(q["copies"]), number(q["sparse"]), f"{q['size_ratio']:.4f}"))
    return Table(f"How even the shards are: {setting.name}", header, rows)


def _published(analysis: Analysis, setting: Setting) -> list[Table]:
    """The paper's table beside this study's numbers, where there is one for the data set."""
    printed = published_of(setting.dataset) if analysis.compared == "sharding" else None
    if not printed:
        return []
    ours = {name: member.summaries[PRIMARY] for name, member in setting.members.items() if PRIMARY in member.summaries}
    base, published_base = ours.get("random"), printed.rows["random"]
    rows = []
    for name in dict.fromkeys([*ours, *printed.rows]):
        mine, theirs = ours.get(name), printed.rows.get(name)
        ratio = number(base.sd / mine.sd) if base and mine and mine.sd else "-"
        left = (str(mine.n), _fixed(mine.mean), _short(mine.sd), ratio) if mine else ("-",) * 4
        right = ("-",) * 4
        if theirs:
            times = number(published_base.accuracy_sd / theirs.accuracy_sd)
            right = (str(RUNS), f"{theirs.accuracy:.6f}", f"{theirs.accuracy_sd:.6f}", times)
        rows.append((name, *left, *right))
    header = ("sharding", "runs", "mean", "sd", "sd ratio", "runs", "published mean", "published sd", "ratio")
    made = [Table(f"Beside the published figures ({printed.title}; ResNet-56): {setting.name}", header, rows)]
    sparse = [(name, member) for name, member in setting.members.items() if name in SPARSE]
    if sparse:
        made.append(_sparse(setting, sparse))
    return made


def _sparse(setting: Setting, members: list[tuple[str, Member]]) -> Table:
    rows = []
    for name, member in members:
        counts = [record["sharding"]["sparse"] for record in member.records]
        ours = f"{sum(counts) / len(counts):.1f} ({min(counts)} to {max(counts)})"
        rows.append((name, ours, ", ".join(map(str, SPARSE[name]))))
    header = ("sharding", "sparse neighbourhoods, mean and range", "published, three runs")
    return Table(f"Sparse neighbourhoods (Table III): {setting.name}", header, rows)


def to_csv(analysis: Analysis) -> str:
    """One row a setting, member and measure, numbers in full."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for setting in analysis.settings:
        for member in setting.members.values():
            for key in MEASURES:
                if key in member.summaries:
                    writer.writerow([setting.name, member.name, key, *_numbers(member, key)])
    return buffer.getvalue()


def _numbers(member: Member, key: str) -> list[str]:
    s, c = member.summaries[key], member.comparisons[key]
    values: list[float] = [s.mean, *s.mean_interval, s.sd, *s.sd_interval, s.variance, s.least, s.most]
    compared: list[float] = [math.nan] * 16
    if c:
        compared = [
            c.sd_ratio, *c.sd_ratio_f, *c.sd_ratio_bootstrap, c.spread_p, c.brown_forsythe_p,
            c.adjusted_spread_p, c.difference,
            *c.difference_interval, c.difference_p, c.adjusted_difference_p, c.equivalence_p, c.adjusted_equivalence_p,
            c.correlation,
        ]  # fmt: skip
    shown = ["" if math.isnan(value) else f"{value:.6g}" for value in [*values, *compared]]
    return [str(s.n), str(member.diverged), *shown[:9], str(c.n) if c else "", *shown[9:]]


def to_markdown(analysis: Analysis) -> str:
    """A page: the findings, then the tables without the columns that only tests need."""
    lines = [f"# {analysis.title}", ""]
    lines += [f"- {finding.text}" for finding in findings(analysis)]
    for table in tables(analysis):
        lines += ["", f"## {table.caption}", ""]
        lines += [_bar(table.header), _bar(["---", *["---:"] * (len(table.header) - 1)])]
        lines += [_bar(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def to_latex(analysis: Analysis) -> str:
    """The same tables, for \\input in a paper that loads booktabs."""
    return "\n".join(_latex(table) for table in tables(analysis))


def _latex(table: Table) -> str:
    lines = [
        "\\begin{table}",
        f"\\caption{{{_escaped(table.caption)}}}",
        f"\\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
    ]
    body = ["\\toprule", _latex_row(table.header), "\\midrule", *map(_latex_row, table.rows), "\\bottomrule"]
    return "\n".join([*lines, *body, "\\end{tabular}", "\\end{table}", ""])


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    for special in "&%$#_{}":
        text = text.replace(special, f"\\{special}")
    return text.replace("<", "$<$")


def _bar(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fixed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _ends(ends: tuple[float, float]) -> str:
    return "-" if math.isnan(ends[0]) else f"{number(ends[0])} to {number(ends[1])}"
