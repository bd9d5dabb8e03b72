"""A figure of a topology: its links by matching, and its spectrum."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.atomic import write_durably
from pipeline.core.errors import UsageError
from trainer.topology.description import TopologyDescription

FORMATS = ("png", "svg", "pdf")
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
MOST_LINKS = 5000  # more would be a single blot
LABELLED = 50  # workers that fit with their numbers
LEGEND = 8  # matchings that get a colour of their own


def check_drawing(path: Path, description: TopologyDescription) -> None:
    """Raise UsageError for a file of another format, and for a graph of too many links."""
    if path.suffix[1:].lower() not in FORMATS:
        raise UsageError(f"--draw {path} must end in {', '.join(f'.{name}' for name in FORMATS)}")
    links = len(description.shares)
    if links > MOST_LINKS:
        raise UsageError(
            f"--draw shows at most {MOST_LINKS:,} links, and topology {description.topology} has {links:,}"
        )


def draw(path: Path, description: TopologyDescription) -> None:
    """Write the figure to a local file, as PNG, SVG or PDF by the file's name. Raises UsageError."""
    check_drawing(path, description)
    data = picture(description, path.suffix[1:].lower())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except OSError as error:
        raise UsageError(f"--draw {path} cannot be written: {error.strerror}") from None


def picture(description: TopologyDescription, kind: str) -> bytes:
    """Return the figure: the graph on a circle with a colour per matching, and the eigenvalues of the mean of W.

    kind: one of FORMATS."""
    from pipeline.core.reporting.plots import canvas, style

    with style():
        figure, (left, right) = canvas(4.6, columns=2)
        _draw_graph(left, description)
        _draw_spectrum(right, description)
        buffer = io.BytesIO()
        # Without a date, the same description gives the same bytes.
        figure.savefig(buffer, format=kind, metadata=NO_DATE.get(kind))
    return buffer.getvalue()


def _draw_graph(axes: Any, description: TopologyDescription) -> None:
    """Draw the workers on a circle, and their links with a colour per matching and a width by their use."""
    from matplotlib.collections import LineCollection

    from pipeline.core.reporting.plots import BLACK, BLUE, GREY, PALETTE

    workers = description.plan.num_workers
    angles = np.pi / 2 - 2 * np.pi * np.arange(workers) / workers
    places = np.column_stack([np.cos(angles), np.sin(angles)])
    few = 0 < len(description.matchings) <= LEGEND
    # Random pairs have no matchings of their own: all links are drawn alike.
    groups = description.matchings or ((tuple((i, j) for i, j, _ in description.shares), 1.0),)
    thin = min(1.0, 300 / max(1, len(description.shares)))
    for number, (matching, share) in enumerate(groups):
        lines = LineCollection(
            [places[list(link)] for link in matching],
            colors=(PALETTE[number] if few else BLUE) if share else GREY,
            linewidths=thin * (0.5 + 2.5 * share),
            linestyles="solid" if share else "dotted",
            label=f"{number}: p = {share:.4f}" if few else None,
            zorder=1,
        )
        axes.add_collection(lines)
    labelled = workers <= LABELLED
    axes.scatter(*places.T, s=160 if labelled else 8, color="white", edgecolors=BLACK, zorder=2)
    for worker, place in enumerate(places if labelled else ()):
        axes.text(*place, str(worker), ha="center", va="center", fontsize=7, zorder=3)
    axes.set(title=_title(description), aspect="equal", xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))
    axes.axis("off")
    if few:
        axes.legend(title="matching", loc="center left", bbox_to_anchor=(1, 0.5))


def _title(description: TopologyDescription) -> str:
    budget = f", budget {description.budget:g}" if description.budget is not None else ""
    return f"{Path(description.topology).name}, {description.plan.num_workers:,} workers{budget}"


def _draw_spectrum(axes: Any, description: TopologyDescription) -> None:
    """Draw the eigenvalues of the mean of W in descending order."""
    from pipeline.core.reporting.plots import BLUE, GREY

    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(np.arange(1, len(description.mean_mixing) + 1), description.mean_mixing, "o", color=BLUE, markersize=4)
    axes.set(
        ylim=(-1.05, 1.05),
        xlabel="eigenvalues of the mean of W, from the largest",
        title=f"a = {description.weight:.4f}, s = {description.plan.contraction():.4f}",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
