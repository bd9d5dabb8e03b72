"""The picture of which exchange is cheapest when, from the figures of ``make bench-exchange``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pipeline.core.atomic import write_durably
from pipeline.core.reporting import plots
from tests.benchmarks.exchange_figures import (
    PLACES,
    CostReport,
    StepCost,
    by_case,
    cheapest,
    gloo_ms,
    in_millions,
    milliseconds,
)

LOOKS = {  # colour and marker
    "parameter-server": (plots.BLUE, "o"),
    "all-reduce": (plots.PURPLE, "v"),
    "d-psgd": (plots.GREEN, "^"),
    "matcha": (plots.ORANGE, "s"),
}
ROW_INCHES = 2.5
RING_POINTS = 13.0  # width of the ring around the cheapest exchange


def write_picture(path: Path, report: CostReport) -> None:
    """Draw the picture to a PNG file. Raises OSError."""
    with plots.style():
        figure = draw_costs(report)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    write_durably(path, buffer.getvalue())


def draw_costs(report: CostReport) -> Figure:
    """Draw wall times relative to gloo against the number of parameters: a row per place, a column per number of workers.

    Relative, because the milliseconds of all exchanges grow with the parameters, which hides how they differ."""
    costs = report.costs()
    cases = by_case(costs)
    gloo = gloo_ms(costs)
    places = [place for place in PLACES if any(case[0] == place for case in cases)]
    counts = sorted({workers for _, _, workers in cases})
    sizes = sorted({parameters for _, parameters, _ in cases})
    figure = Figure(figsize=(plots.WIDTH, 1.0 + ROW_INCHES * len(places)))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(places), len(counts), squeeze=False, sharex=True, sharey="row")
    for row, place in enumerate(places):
        for column, workers in enumerate(counts):
            ax = axes[row][column]
            of_panel = {size: cases[place, size, workers] for size in sizes if (place, size, workers) in cases}
            ax.set(xscale="log", yscale="log", title=f"{place}, {workers} workers")
            ax.margins(x=0.12, y=0.25)  # for the milliseconds below the cheapest
            _draw_panel(ax, of_panel, {size: gloo[size, workers] for size in of_panel})
            ax.set_xticks(sizes, [in_millions(size) for size in sizes])
            ax.xaxis.set_minor_locator(NullLocator())
        # Once the limits of the whole row are known.
        for ax in axes[row]:
            plots.number_decades(ax.yaxis)
    figure.supylabel("time of a step without gradients, relative to gloo's (over TCP in clear)", fontsize=10)
    figure.supxlabel(f"parameters\n{_machine(report)}", fontsize=9)
    _add_legend(figure, list(axes.flat))
    return figure


def _draw_panel(ax: Any, of_panel: Mapping[int, Mapping[str, StepCost]], gloo: Mapping[int, float]) -> None:
    """Draw a line per exchange, and a ring around the cheapest exchange of each size with its milliseconds.

    of_panel: costs by number of parameters and exchange. gloo: wall milliseconds by number of parameters."""
    ax.axhline(1, color=plots.GREY, ls="--", lw=1, label="gloo")
    for name, (colour, marker) in LOOKS.items():
        points = [(size, by_name[name].wall_ms / gloo[size]) for size, by_name in of_panel.items() if name in by_name]
        if points:
            ax.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)
    ring = {"ls": "", "marker": "o", "ms": RING_POINTS, "mfc": "none", "mec": plots.BLACK}
    below = {"xytext": (0, -RING_POINTS / 2), "textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8}
    for size, by_name in of_panel.items():
        wall_ms = by_name[cheapest(by_name)].wall_ms
        at = (size, wall_ms / gloo[size])
        ax.plot(*at, **ring, label="cheapest, with its ms")
        ax.annotate(milliseconds(wall_ms), at, **below)


def _add_legend(figure: Figure, axes: Sequence[Any]) -> None:
    """Name each line once, above the panels."""
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), markerscale=0.7)


def _machine(report: CostReport) -> str:
    machine = report.machine
    return f"{machine.get('processor', 'unknown processor')}, {machine.get('cores', '?')} cores"
