"""The figures of the benchmark's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.core.reporting import plots
from pipeline.core.reporting.page import EmbeddedFigure, embed_figure
from trainer.benchmark.configurations import HYPERPARAMETERS, SYSTEMS, System
from trainer.benchmark.results import published
from trainer.benchmark.results.summary import SystemSummary

STYLES: dict[System, tuple[str, str, str]] = {  # colour, hatch, marker
    "mllib": (plots.ORANGE, "//", "s"),
    "ps-sync": (plots.BLUE, "", "o"),
    "ps-async": (plots.SKY, "..", "D"),
    "averaging": (plots.GREEN, "\\\\", "^"),
    "all-reduce": (plots.PURPLE, "xx", "v"),
}


def find_published(summary: SystemSummary) -> int | None:
    """Return the thesis's number of mini-batches to convergence, or None."""
    return published.MINI_BATCHES.get((summary.model, summary.size), {}).get(summary.system)


def draw_convergence(summaries: Sequence[SystemSummary]) -> list[EmbeddedFigure]:
    """Draw seconds and mini-batches to convergence; empty if every run failed."""
    if not any(each.metrics for each in summaries):
        return []
    with plots.style():
        seconds = draw_bars(summaries, "seconds", "seconds to converge")
        counts = draw_bars(summaries, "mini_batches", "mini-batches to converge (black line: the thesis)", marks=True)
        return [
            embed_figure(seconds, "Seconds to converge for each model, mini-batch and system"),
            embed_figure(counts, "Mini-batches to converge, with the thesis's"),
        ]


def draw_mini_batches(summaries: Sequence[SystemSummary]) -> list[EmbeddedFigure]:
    """Draw the times of computing and reading against the size of a mini-batch; empty if every run failed."""
    if not any(each.metrics for each in summaries):
        return []
    with plots.style():
        computing = draw_over_batches(summaries, "compute_s", "computing, ms per mini-batch")
        reading = draw_over_batches(summaries, "read_s", "reading, ms per mini-batch")
        return [
            embed_figure(computing, "Computing against mini-batch size"),
            embed_figure(reading, "Reading against mini-batch size"),
        ]


def draw_sizes(summaries: Sequence[SystemSummary]) -> list[EmbeddedFigure]:
    """Draw the time of a mini-batch against the number of rows of the set.

    Empty if no model was timed on several numbers of rows."""
    timed_summaries = [each for each in summaries if each.metrics and (each.length or each.size == "all")]
    if len({(each.model, each.rows) for each in timed_summaries}) == len({each.model for each in timed_summaries}):
        return []
    with plots.style():
        return [
            embed_figure(draw_over_rows(timed_summaries), "Milliseconds of a mini-batch against the number of rows")
        ]


def draw_bars(summaries: Sequence[SystemSummary], metric: str, label: str, *, marks: bool = False) -> Figure:
    """Draw a group of bars per configuration, one bar per system, with minimum and maximum, on a log scale.

    Args:
        summaries: to draw.
        metric: one of METRICS.
        label: of the axis.
        marks: also draw the thesis's numbers.
    """
    groups = list(dict.fromkeys((each.model, each.size) for each in summaries))
    figure, (ax,) = plots.canvas(1.2 + 0.62 * len(groups))
    height = 0.8 / len(SYSTEMS)
    for number, system in enumerate(SYSTEMS):
        of_system = [each for each in summaries if each.system == system and metric in each.metrics]
        # The bars of a group are centred on its row.
        offset = (number - (len(SYSTEMS) - 1) / 2) * height
        at = [groups.index((each.model, each.size)) + offset for each in of_system]
        spreads = [each.metrics[metric] for each in of_system]
        medians = np.array([spread.median for spread in spreads])
        errors = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]] if of_system else None
        colour, hatch, _ = STYLES[system]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.3, "label": system}
        ax.barh(at, medians, height * 0.92, xerr=errors, error_kw={"lw": 1, "ecolor": plots.BLACK}, **look)
        if marks:
            _mark_published(ax, of_system, at, height)
    ax.set(xlabel=label, xscale="log")
    plots.number_decades(ax.xaxis)
    plots.name_rows(ax, [f"{model}, {size}" for model, size in groups])
    ax.legend(**plots.ABOVE, ncols=len(SYSTEMS))
    return figure


def _mark_published(ax: Any, summaries: Sequence[SystemSummary], at: Sequence[float], height: float) -> None:
    """Draw a line across each bar at the thesis's number."""
    for summary, place in zip(summaries, at, strict=True):
        if number := find_published(summary):
            ax.plot([number, number], [place - height / 2, place + height / 2], color=plots.BLACK, lw=2.2)


def draw_over_batches(summaries: Sequence[SystemSummary], metric: str, label: str) -> Figure:
    """Draw milliseconds against mini-batch sizes, a panel per model, on log scales."""
    figure, panels = _open_panels(summaries)
    for model, ax in panels.items():
        for system in SYSTEMS:
            of_system = sorted(
                (each for each in summaries if (each.model, each.system) == (model, system) and metric in each.metrics),
                key=lambda each: each.batch,
            )
            if not of_system:
                continue
            # A log scale cannot show 0.
            values = [max(1e3 * each.metrics[metric].median, plots.FLOOR) for each in of_system]
            colour, _, marker = STYLES[system]
            ax.plot([each.batch for each in of_system], values, marker=marker, color=colour, label=system)
        _scale_panel(ax, model, "examples per mini-batch")
    _add_legend(figure, panels, label)
    return figure


def draw_over_rows(summaries: Sequence[SystemSummary]) -> Figure:
    """Draw milliseconds against the number of rows, a panel per model.

    Solid lines are mini-batches of all rows, dashed lines of a hundredth."""
    figure, panels = _open_panels(summaries)
    for model, ax in panels.items():
        for system in SYSTEMS:
            colour, _, marker = STYLES[system]
            for part, line_style in ((1, "-"), (100, "--")):
                by_rows = {
                    each.rows: each.metrics["compute_s"].median
                    for each in summaries
                    if (each.model, each.system) == (model, system) and each.batch == each.rows // part
                }
                rows = sorted(by_rows)
                # Both lines of a system have one entry in the legend; the label of the axis explains the two styles.
                look = {"marker": marker, "color": colour, "ls": line_style, "label": system if part == 1 else None}
                ax.plot(rows, [1e3 * by_rows[count] for count in rows], **look)
        _scale_panel(ax, model, "rows")
    _add_legend(figure, panels, "ms per mini-batch (solid: all rows, dashed: 1 %)")
    return figure


def _open_panels(summaries: Sequence[SystemSummary]) -> tuple[Figure, dict[str, Any]]:
    """Return a figure, and its panels by model: one for each model with measurements."""
    models = [model for model in HYPERPARAMETERS if any(each.model == model and each.metrics for each in summaries)]
    figure, axes = plots.canvas(3.4, len(models))
    return figure, dict(zip(models, axes, strict=True))


def _scale_panel(ax: Any, title: str, label: str) -> None:
    ax.set(title=title, xlabel=label, xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        plots.number_decades(axis)


def _add_legend(figure: Figure, panels: Mapping[str, Any], label: str) -> None:
    first = next(iter(panels.values()))
    first.set_ylabel(label)
    figure.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=len(SYSTEMS))
