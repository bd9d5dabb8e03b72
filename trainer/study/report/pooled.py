"""The ways of sharding over all studies: a table for a reader who has a minute, a table of ratios, and a figure. Pure."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pipeline.core.reporting.plots import GREY, PALETTE, canvas, style
from trainer.study.analysis.published import RUNS, TABLES
from trainer.study.analysis.ratios import BASELINE, PooledWay, pool_studies
from trainer.study.analysis.results import Analysis
from trainer.study.analysis.sides import PRIMARY, ComparisonSide, sharding_seconds
from trainer.study.analysis.statistics import Interval, f_interval
from trainer.study.report.figures import legend_once
from trainer.study.report.table import Table, difference_in_points, ends_in_words, to_markdown_table
from trainer.study.report.tables import evidence
from trainer.study.report.words import number, p_value

PUBLISHED = TABLES["cifar10"]  # the data set of the pooled studies


class ForestRow(NamedTuple):
    """A row of the figure. intervals: by point; NaN for none."""

    label: str
    points: Sequence[float]
    intervals: Sequence[Interval]
    look: Mapping[str, Any]


def pooled_page(studies: Mapping[str, Analysis]) -> str:
    """Return a Markdown page: what to expect of each way of sharding, and its ratio of standard deviations by study."""
    ways = pool_studies(studies)
    return f"{to_markdown_table(_answers(studies, ways))}\n{to_markdown_table(_ratios(ways))}"


def _answers(studies: Mapping[str, Analysis], ways: Sequence[PooledWay]) -> Table:
    """Return the table of answers: the difference of means of the largest study, the pooled ratio, cost and evidence."""
    rows = []
    for way in ways:
        study, member = way.largest
        comparison = member.comparisons[PRIMARY]
        assert comparison, "pooled studies have comparisons"
        ratio = (
            "studies differ"
            if math.isnan(way.pooled.p)
            else f"{number(way.pooled.ratio)} ({ends_in_words(way.pooled.interval)})"
        )
        words = f"{evidence(studies[study], member)} in {study}; {len(way.studies)} ratios"
        cost = _cost(studies[study], member)
        rows.append((way.name, ", ".join(way.vary), difference_in_points(comparison), ratio, cost, words))
    header = (
        f"sharding, in place of {BASELINE}", "seeds change", "mean difference, points (95 %)",
        f"pooled sd of {BASELINE} / sd (95 %)", f"sharding, s more than {BASELINE}", "evidence",
    )  # fmt: skip
    return Table("Ways of sharding: mean, spread, cost", header, rows)


def _cost(analysis: Analysis, member: ComparisonSide) -> str:
    """Return the median seconds of sharding, minus the baseline's in the same setting; "-" if they are unknown."""
    baseline = next(s.members[BASELINE] for s in analysis.settings if s.members.get(member.name) is member)
    both = [sharding_seconds(side.records) for side in (member, baseline)]
    return f"{median(both[0]) - median(both[1]):+.1f}" if all(both) else "-"


def _ratios(ways: Sequence[PooledWay]) -> Table:
    """Return the table of pooled ratios, with the studies behind them."""
    rows = []
    for way in ways:
        which = ", ".join(f"{each.study} ({each.n})" for each in way.studies)
        ends = ends_in_words(way.pooled.interval)
        ps = (p_value(way.pooled.p), p_value(way.pooled.heterogeneity_p))
        rows.append((way.name, ", ".join(way.vary), number(way.pooled.ratio), ends, *ps, which))
    header = (
        "sharding", "seeds change", f"sd of {BASELINE} / sd", "95 %", "p", "p of heterogeneity", "studies (pairs)",
    )  # fmt: skip
    return Table("Ratios of standard deviations, pooled over studies", header, rows)


def pooled_figure(studies: Mapping[str, Analysis]) -> Figure | None:
    """Draw the ratio of standard deviations of every study, the pooled one and the published one, by way of sharding.

    Returns None if no way of sharding is in two studies."""
    ways = pool_studies(studies)
    if not ways:
        return None
    blocks = [(way.name, _rows(way)) for way in ways]
    height = sum(len(rows) + 1.3 for _, rows in blocks)
    figure, (ax,) = canvas(0.9 + 0.27 * height)
    ax.axvline(1, color=GREY, lw=1, ls="--")
    # A block is its name and its rows; a gap is a bit more than a row.
    at = 0.0
    ticks: dict[float, str] = {}
    for name, rows in blocks:
        ax.text(-0.01, at, name, transform=ax.get_yaxis_transform(), ha="right", va="center", weight="bold")
        for row in rows:
            at += 1
            ticks[at] = row.label
            _draw_row(ax, at, row)
        at += 1.3
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_ylim(at - 0.6, -0.8)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xscale("log")
    ax.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
    ax.minorticks_off()
    ax.set_xlabel(
        f"standard deviation of {BASELINE} / standard deviation of the way (above 1: steadier than {BASELINE})"
    )
    legend_once(ax, columns=3)
    return figure


def _rows(way: PooledWay) -> list[ForestRow]:
    """Return the rows of a way of sharding: its studies, the pooled ratio unless they differ, and the published one."""
    rows = []
    # The settings of a study share a row, since there may be many.
    for study in dict.fromkeys(each.study for each in way.studies):
        some = [each for each in way.studies if each.study == study]
        pairs = f"{len(some)} x {some[0].n}" if len(some) > 1 else str(some[0].n)
        look = {"color": GREY, "marker": "o", "ms": 4, "lw": 1.2, "label": "a study, and 95 %"}
        ends = [f_interval(each.ratio, each.n) for each in some]
        rows.append(ForestRow(f"{study} ({pairs})", [each.ratio for each in some], ends, look))
    if not math.isnan(way.pooled.p):
        look = {"color": PALETTE[0], "marker": "D", "ms": 7, "lw": 3, "label": "all studies, and 95 %"}
        rows.append(ForestRow("all", [way.pooled.ratio], [way.pooled.interval], look))
    else:
        rows.append(ForestRow(f"no common ratio: p {p_value(way.pooled.heterogeneity_p)}", [], [], {}))
    if printed := PUBLISHED.rows.get(way.name):
        ratio = PUBLISHED.rows[BASELINE].accuracy_sd / printed.accuracy_sd
        look = {"color": PALETTE[3], "marker": "s", "ms": 5, "lw": 1.2, "label": "published, and 95 %"}
        rows.append(ForestRow(f"published ({RUNS})", [ratio], [f_interval(ratio, RUNS)], look))
    return rows


def _draw_row(ax: Axes, at: float, row: ForestRow) -> None:
    """Draw the points of a row, one below the other, with their intervals."""
    for number_of_point, (ratio, ends) in enumerate(zip(row.points, row.intervals, strict=True)):
        height = at + 0.5 * ((number_of_point + 0.5) / len(row.points) - 0.5)
        line = {key: row.look[key] for key in ("color", "lw")}
        ax.plot(ends, [height] * 2, **line, solid_capstyle="butt")
        ax.plot(
            [ratio], [height], ls="", mec="white", mew=0.5, zorder=3, **{k: v for k, v in row.look.items() if k != "lw"}
        )


def pooled_svg(studies: Mapping[str, Analysis]) -> str:
    """Return the figure as an SVG file, with equal bytes for equal studies; empty if there is none."""
    buffer = io.StringIO()
    with style():
        figure = pooled_figure(studies)
        if figure is None:
            return ""
        svg: Any = FigureCanvasSVG(figure)
        svg.print_svg(buffer, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
