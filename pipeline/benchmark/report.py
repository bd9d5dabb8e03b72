"""The benchmark's page: the thesis's figures and tables out of results.json, its numbers beside them. Opens offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from pipeline.benchmark import forecast, published, summary
from pipeline.benchmark.averaging import LOCAL_STEPS
from pipeline.benchmark.cells import ARMS, SETTINGS, Arm
from pipeline.benchmark.summary import Line, Spread
from pipeline.reporting import plots
from pipeline.reporting.page import EmbeddedFigure, embed_figure, plain, template

LOOK: dict[Arm, tuple[str, str, str]] = {  # colour, hatch, marker
    "mllib": (plots.ORANGE, "//", "s"),
    "ps-sync": (plots.BLUE, "", "o"),
    "ps-async": (plots.SKY, "..", "D"),
    "averaging": (plots.GREEN, "\\\\", "^"),
    "all-reduce": (plots.PURPLE, "xx", "v"),
}


def render(result: Mapping[str, Any]) -> str:
    """One HTML page of what results.json holds."""
    every = summary.lines(result["rows"])
    found = [line for line in every if not line.tasks]
    converge = [line for line in found if line.length is None]
    sizes = {(line.model, line.rows) for line in converge}
    here = [line for line in found if (line.model, line.rows) in sizes]
    scaled = forecast.scaled(every, int(result["machine"]["parallelism"]))
    page: str = template("pipeline.benchmark", "benchmark.html").render(
        headline=headline(found),
        goals=summary.goals(found),
        machine=result["machine"],
        plan=result["plan"],
        converge=converge,
        each=every,
        local_steps=LOCAL_STEPS,
        thesis=thesis,
        ms=_ms,
        parts={name: found for name, found in result["parts"].items() if found},
        reading={model: summary.read_throughput(found, model) for model in SETTINGS},
        findings=summary.findings(found),
        scaled=scaled,
        predicted=forecast.predicted_gaps(scaled),
        published=published,
        pictures={
            "converge": _converge_pictures(converge),
            "each": _each_pictures(here),
            "sizes": _size_pictures(found),
        },
    )
    return page


def headline(found: Sequence[Line]) -> str:
    failed = sum(bool(line.errors) for line in found)
    cells = len({(line.model, line.rows, line.batch, line.length) for line in found})
    return f"{cells} comparisons of {len({line.arm for line in found})} arms" + (
        f"; {failed} of them failed, their rows say why" if failed else ""
    )


def thesis(line: Line) -> int | None:
    """The thesis's number of mini-batches for a line."""
    return published.MINI_BATCHES.get((line.model, line.size), {}).get(line.arm)


def _ms(spread: Spread) -> str:
    middle, least, most = (plain(1e3 * value) for value in (spread.median, spread.least, spread.most))
    return middle if least == most else f"{middle} ({least} to {most})"


def _converge_pictures(found: Sequence[Line]) -> list[EmbeddedFigure]:
    if not any(line.figures for line in found):
        return []
    with plots.style():
        seconds = bars(found, "seconds", "seconds to converge")
        counts = bars(found, "mini_batches", "mini-batches to converge; a line: the thesis", marks=True)
        return [
            embed_figure(seconds, "Seconds to converge for each model, mini-batch and arm"),
            embed_figure(counts, "Mini-batches to converge, with the thesis's"),
        ]


def _each_pictures(found: Sequence[Line]) -> list[EmbeddedFigure]:
    if not any(line.figures for line in found):
        return []
    with plots.style():
        return [
            embed_figure(
                over_batches(found, "compute_s", "ms of computing a mini-batch"), "Computing against mini-batch size"
            ),
            embed_figure(
                over_batches(found, "read_s", "ms of reading a mini-batch"), "Reading against mini-batch size"
            ),
        ]


def _size_pictures(found: Sequence[Line]) -> list[EmbeddedFigure]:
    timed = [line for line in found if line.figures and (line.length or line.size == "all")]
    if len({(line.model, line.rows) for line in timed}) == len({line.model for line in timed}):
        return []
    with plots.style():
        return [embed_figure(over_sizes(timed), "Milliseconds of a mini-batch against the number of rows")]


def bars(found: Sequence[Line], figure: str, label: str, *, marks: bool = False) -> Figure:
    """A group of bars a cell, one an arm, from the least to the most on a log scale; marks: the thesis's numbers."""
    cells = list(dict.fromkeys((line.model, line.size) for line in found))
    drawn, (ax,) = plots.canvas(1.2 + 0.62 * len(cells))
    height = 0.8 / len(ARMS)
    for number, arm in enumerate(ARMS):
        mine = [line for line in found if line.arm == arm and figure in line.figures]
        at = [cells.index((line.model, line.size)) + (number - (len(ARMS) - 1) / 2) * height for line in mine]
        spreads = [line.figures[figure] for line in mine]
        middle = np.array([spread.median for spread in spreads])
        reach = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]] if mine else None
        colour, hatch, _ = LOOK[arm]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.3, "label": arm}
        ax.barh(at, middle, height * 0.92, xerr=reach, error_kw={"lw": 1, "ecolor": plots.BLACK}, **look)
        for line, place in zip(mine, at, strict=True) if marks else ():
            if told := thesis(line):
                ax.plot([told, told], [place - height / 2, place + height / 2], color=plots.BLACK, lw=2.2)
    ax.set(xlabel=label, xscale="log")
    _plain_ticks(ax.xaxis)
    plots.name_rows(ax, [f"{model}, {size}" for model, size in cells])
    ax.legend(**plots.ABOVE, ncols=len(ARMS))
    return drawn


def _plain_ticks(axis: Any) -> None:
    """Numbers, not powers, on a log scale."""
    plots.separate_thousands(axis)
    axis.set_minor_formatter(NullFormatter())


def over_batches(found: Sequence[Line], figure: str, label: str) -> Figure:
    """Lines over mini-batch sizes, a panel a model, on log scales."""
    drawn, panels = _panels(found)
    for model, ax in panels.items():
        for arm in ARMS:
            mine = sorted(
                (line for line in found if (line.model, line.arm) == (model, arm) and figure in line.figures),
                key=lambda line: line.batch,
            )
            if not mine:
                continue
            values = [max(1e3 * line.figures[figure].median, plots.FLOOR) for line in mine]
            colour, _, marker = LOOK[arm]
            ax.plot([line.batch for line in mine], values, marker=marker, color=colour, label=arm)
        _log_log(ax, model, "examples in a mini-batch")
    _legend(drawn, panels, label)
    return drawn


def over_sizes(found: Sequence[Line]) -> Figure:
    """A mini-batch against the number of rows, a panel a model: solid lines for all rows, dashed for a hundredth."""
    drawn, panels = _panels(found)
    for model, ax in panels.items():
        for arm in ARMS:
            colour, _, marker = LOOK[arm]
            for part, line_style in ((1, "-"), (100, "--")):
                mine = {
                    line.rows: line.figures["compute_s"].median
                    for line in found
                    if (line.model, line.arm) == (model, arm) and line.batch == line.rows // part
                }
                places = sorted(mine)
                look = {"marker": marker, "color": colour, "ls": line_style, "label": arm if part == 1 else None}
                ax.plot(places, [1e3 * mine[rows] for rows in places], **look)
        _log_log(ax, model, "rows")
    _legend(drawn, panels, "ms of a mini-batch: all rows; dashed: 1 %")
    return drawn


def _panels(found: Sequence[Line]) -> tuple[Figure, dict[str, Any]]:
    models = [model for model in SETTINGS if any(line.model == model and line.figures for line in found)]
    drawn, axes = plots.canvas(3.4, len(models))
    return drawn, dict(zip(models, axes, strict=True))


def _log_log(ax: Any, title: str, label: str) -> None:
    ax.set(title=title, xlabel=label, xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        _plain_ticks(axis)


def _legend(drawn: Figure, panels: Mapping[str, Any], label: str) -> None:
    first = next(iter(panels.values()))
    first.set_ylabel(label)
    drawn.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=len(ARMS))
