"""A table of a report: its cells as text, in Markdown and in LaTeX. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.study.analysis.statistics import Comparison
from trainer.study.report.words import POINTS, number


class Table(NamedTuple):
    """A caption, a header, and rows of text; all columns but the first are numbers."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def to_markdown_table(table: Table) -> str:
    """Return a table under its caption as a heading."""
    head = [_bar(table.header), _bar(["---", *["---:"] * (len(table.header) - 1)])]
    return "\n".join([f"## {table.caption}", "", *head, *map(_bar, table.rows)]) + "\n"


def to_latex_table(table: Table) -> str:
    """Return a table environment that is as wide as a line."""
    lines = [
        "\\begin{table}",
        f"\\caption{{{_escaped(table.caption)}}}",
        f"\\resizebox{{\\linewidth}}{{!}}{{\\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
    ]
    body = ["\\toprule", _latex_row(table.header), "\\midrule", *map(_latex_row, table.rows), "\\bottomrule"]
    return "\n".join([*lines, *body, "\\end{tabular}}", "\\end{table}", ""])


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    for special in "&%$#_{}":
        text = text.replace(special, f"\\{special}")
    return text.replace("<", "$<$")


def _bar(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def fixed(value: float) -> str:
    """Format an accuracy or a loss with four decimals."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def short(value: float) -> str:
    """Format a value with three significant digits."""
    return "-" if math.isnan(value) else f"{value:.3g}"


def ends_in_words(ends: tuple[float, float], form: Callable[[float], str] = number) -> str:
    """Format the ends of an interval."""
    return "-" if math.isnan(ends[0]) else f"{form(ends[0])} to {form(ends[1])}"


def ends_in_points(ends: tuple[float, float], form: str = "+.2f") -> str:
    """Format the ends of an interval of accuracies in percentage points."""
    return ends_in_words(ends, lambda end: format(POINTS * end, form))


def difference_in_points(comparison: Comparison) -> str:
    """Format the difference of two mean accuracies in percentage points, with its 95 % interval."""
    return f"{POINTS * comparison.difference:+.2f} ({ends_in_points(comparison.difference_interval)})"
