"""The figures of a report: plain data in, one matplotlib Figure out.

The colours are Okabe and Ito's, which colour-blind readers can distinguish. A shape, a hatch or a label always repeats
the meaning of a colour. No function reads a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from pipeline.core.reporting.plots import (
    ABOVE,
    BLACK,
    BLUE,
    BOXES,
    FLOOR,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    PALE,
    PALETTE,
    RED,
    SKY,
    canvas,
    drawable_names,
    name_rows,
    number_decades,
    number_ticks,
    separate_thousands,
    short,
)
from pipeline.core.shardset.parts import Neighbourhood
from pipeline.quality.metrics import expected_counts, hypergeometric_deviations
from pipeline.quality.moments import Floats, Ints

EVEN_SD = 10  # deviations of shards that are about even, which have a linear scale of colours
BARS = 400  # more workers or neighbourhoods are drawn as one outline, because a bar takes two milliseconds
LINE_CHARACTERS = 120  # of the names of classes below an axis: ten names of ten characters fit
COLUMNS = 2000  # the most columns of an outline, each as high as the largest worker or neighbourhood in it


def against_chance(table: Ints) -> tuple[Floats, Floats, Floats]:
    """Return mean, standard deviation and normalised deviation [W, L] of a table against a random split.

    The split has the table's shard and class sizes (hypergeometric). The third result is the deviation from the mean in
    standard deviations, 0 if the standard deviation is 0."""
    mean = expected_counts(table)
    deviation = hypergeometric_deviations(table)
    off = np.divide(table - mean, deviation, out=np.zeros(table.shape), where=deviation > 0)
    return mean, deviation, off


def shard_sizes(owners: Sequence[int], copies: Sequence[int]) -> Figure:
    """Draw the number of rows of each worker as a bar, with its copies stacked on top; very many as an outline.

    owners: rows per worker without copies. copies: copies per worker."""
    figure, (ax,) = canvas(2.6)
    workers = np.arange(len(owners))
    if len(owners) > BARS:
        outline_sizes(ax, owners, copies)
    else:
        ax.bar(workers, owners, color=BLUE, label="own rows")
        if any(copies):
            ax.bar(workers, copies, bottom=owners, color=ORANGE, hatch="///", edgecolor="white", label="copies")
    # A legend of own rows alone would say what the label of the axis does.
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(**ABOVE, ncols=3)
    ax.set(xlabel="worker", ylabel="rows", xlim=(-0.6, len(owners) - 0.4))
    number_ticks(ax.xaxis, len(owners))
    separate_thousands(ax.yaxis)
    return figure


def outline_sizes(ax: Axes, owners: Sequence[int], copies: Sequence[int]) -> None:
    """Draw the rows of workers as an outline, as for ``shard_sizes``: in a column of several workers, most and fewest."""
    firsts, edges = columns_of(len(owners))
    if any(copies):
        ax.stairs(np.maximum.reduceat(np.add(owners, copies), firsts), edges, fill=True, color=ORANGE, label="copies")
    most = np.maximum.reduceat(owners, firsts)
    if firsts[1] == 1:
        ax.stairs(most, edges, fill=True, color=BLUE, label="own rows")
        return
    ax.stairs(most, edges, fill=True, color=SKY, label=f"own rows: most of {firsts[1]} workers")
    # Without these, a worker with few rows would hide beside one with many.
    ax.stairs(np.minimum.reduceat(owners, firsts), edges, fill=True, color=BLUE, label=f"fewest of {firsts[1]} workers")


def columns_of(count: int) -> tuple[Ints, Floats]:
    """Divide positions into at most COLUMNS columns: the first position of each, and the edges between them.

    count: the number of positions, more than 1."""
    firsts = np.arange(0, count, -(-count // COLUMNS))
    return firsts, np.append(firsts, count) - 0.5


def name_classes(axis: Axis, classes: Sequence[int], names: Sequence[str]) -> None:
    """Label the positions of an axis with the names of their classes, or with the numbers if the names do not fit.

    names: of all classes, by number; empty if they are unknown."""
    number_ticks(axis, len(classes))
    labels = drawable_names(classes, names)
    if labels and len(labels) * (2 + max(map(len, labels))) <= LINE_CHARACTERS:
        axis.set_ticks(range(len(labels)), labels)
    else:
        # A tick shows the number of its class, not its position.
        axis.set_major_formatter(FuncFormatter(lambda at, _: str(classes[int(at)]) if 0 <= at < len(classes) else ""))


def class_heat_map(table: Ints, names: Sequence[str] = ()) -> Figure:
    """Draw the rows by worker and class, int64 [W, L] without copies. names: of the classes.

    A cell's colour is its deviation from the expectation of a random split, in standard deviations. Beyond EVEN_SD the
    scale is logarithmic, because skewed shards deviate by hundreds."""
    *_, off = against_chance(table)
    farthest = float(np.abs(off).max())
    # Deviations below 3 sd stay pale, and one extreme cell does not make all others pale.
    limit = max(3.0, farthest)
    norm = Normalize(-limit, limit) if limit <= EVEN_SD else SymLogNorm(3.0, vmin=-limit, vmax=limit)
    workers, classes = table.shape
    figure, (ax,) = canvas(min(1.5 + 0.28 * workers, 6.0))
    image = ax.imshow(off, cmap="PuOr_r", norm=norm, aspect="auto", interpolation="nearest")
    if workers <= MANY and classes <= 12:
        for (worker, label), count in np.ndenumerate(table):
            ink = "white" if abs(norm(off[worker, label]) - 0.5) > 0.325 else "#111"
            ax.text(label, worker, f"{count:,}", ha="center", va="center", color=ink, size=9)
    ax.set(xlabel="class", ylabel="worker")
    ax.spines[:].set_visible(False)
    name_classes(ax.xaxis, range(classes), names)
    number_ticks(ax.yaxis, workers)
    bar = figure.colorbar(image, ax=ax, fraction=0.03, pad=0.01)
    if limit > EVEN_SD:
        decades = 10 ** np.arange(1, math.floor(math.log10(limit)) + 1)
        marks = [*-decades[::-1], -3, 0, 3, *decades]
        bar.set_ticks(marks, labels=[f"{mark:,}" for mark in marks], minor=False)
        bar.minorticks_off()
    bar.set_label("sd from expected")
    bar.outline.set_visible(False)
    return figure


def class_boxes(table: Ints, names: Sequence[str] = ()) -> Figure:
    """Draw for each class the spread of its counts [W, L] over the workers, against a random split. names: of the classes.

    Fig. 7 of Provatas et al. 2021 has a box for each worker over the classes instead. Of more than BOXES classes, those with
    the largest deviations are shown."""
    mean, deviation, off = against_chance(table)
    classes = np.sort(np.argsort(-np.abs(off).max(axis=0), kind="stable")[:BOXES])
    centre = mean[:, classes].mean(axis=0)
    spread = deviation[:, classes].mean(axis=0)
    positions = np.arange(len(classes))
    figure, (ax,) = canvas(3.6)
    low = np.maximum(centre - 2 * spread, 0)  # counts cannot be negative
    band = centre + 2 * spread - low
    ax.bar(positions, band, 0.92, bottom=low, color=PALE, label="random split: expected count ± 2 sd")
    ax.hlines(centre, positions - 0.46, positions + 0.46, color=GREY, lw=1, ls="--", label="expected count")
    boxes = ax.boxplot(
        table[:, classes],
        positions=positions,
        widths=0.5,
        whis=(0, 100),
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": SKY, "edgecolor": BLUE},
        whiskerprops={"color": BLUE},
        capprops={"color": BLUE},
        medianprops={"color": "#111", "lw": 1.5},
    )
    boxes["boxes"][0].set_label("over the workers: minimum, quartiles, maximum")
    ax.set(xlabel="class", ylabel="examples per worker", xlim=(-0.6, len(classes) - 0.4))
    ax.legend(**ABOVE, ncols=3)
    name_classes(ax.xaxis, classes.tolist(), names)
    separate_thousands(ax.yaxis)
    return figure


def neighbourhood_sizes(groups: Sequence[Neighbourhood], num_workers: int) -> Figure:
    """Draw the size of every neighbourhood on a log scale; sparse ones are orange, hatched and crossed."""
    sizes = np.array([group.size for group in groups])
    sparse = np.array([group.sparse for group in groups], bool)
    positions = np.arange(len(sizes))
    figure, (ax,) = canvas(3.0)
    heights = np.maximum(sizes - 0.5, 0)  # from a base of 0.5, so that one example is visible on the log scale
    many = len(sizes) > BARS
    for is_kind, colour, hatch, label in (
        (~sparse, BLUE, None, "dense: divided among the workers"),
        (sparse, ORANGE, "///", "sparse: copied to every worker"),
    ):
        if is_kind.any() and many:
            firsts, edges = columns_of(len(sizes))
            tops = np.maximum.reduceat(np.where(is_kind, heights, 0), firsts) + 0.5
            ax.stairs(tops, edges, baseline=0.5, fill=True, color=colour, label=label)
        elif is_kind.any():
            look = {"bottom": 0.5, "color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.3}
            ax.bar(positions[is_kind], heights[is_kind], label=label, **look)
    if not many:
        ax.plot(positions[sparse], sizes[sparse] * 1.35, "x", color="#111", ms=5, mew=1.3)
    ax.axhline(num_workers, color=RED, lw=1.2, ls="--", label=f"{num_workers} workers: no more than one example each")
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(NullLocator())
    by_size = ", by size" * bool(np.all(np.diff(sizes) <= 0))  # a stream numbers them in the order of appearance
    ax.set(xlabel=f"neighbourhood{by_size}", ylabel="examples (log scale)", xlim=(-0.6, len(sizes) - 0.4))
    ax.set_ylim(0.5, max(float(sizes.max()), num_workers) * 2)
    ax.legend(**ABOVE, ncols=3)
    number_ticks(ax.xaxis, len(sizes))
    separate_thousands(ax.yaxis)
    return figure


def shard_ratios(ratios: Sequence[float | None], mean: float, shard_sd: float | None) -> Figure:
    """Draw each shard's distance from the whole set relative to a random split, and the range of random splits.

    Args:
        ratios: the relative distance of each worker's shard; None for an empty shard, which is not drawn.
        mean: their mean.
        shard_sd: standard deviation of one shard's ratio under a random split; None if unknown.
    """
    values = np.array(ratios, float)  # None becomes nan, which is not drawn
    figure, (ax,) = canvas(2.6)
    if shard_sd is not None:
        ax.axhspan(max(1 - 2 * shard_sd, 0), 1 + 2 * shard_sd, color=PALE, label="one shard of a random split: ± 2 sd")
    ax.axhline(1, color=GREY, lw=1.2, ls="--", label="average of random splits = 1")
    ax.axhline(mean, color=RED, lw=1.2, label=f"mean of these shards = {mean:.2f}")
    ax.plot(values, "o", color=BLUE, ms=6 if len(values) <= MANY else 3, label="shard")
    ax.set(xlabel="worker", ylabel="distance / random split", xlim=(-0.6, len(values) - 0.4))
    if np.nanmax(values) > 8:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0)
    separate_thousands(ax.yaxis)
    number_ticks(ax.xaxis, len(values))
    ax.legend(**ABOVE, ncols=4)
    return figure


def stacked_seconds(rows: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw seconds by phase, one stacked bar per row: {name: {phase: seconds}}."""
    phases = list(dict.fromkeys(phase for seconds in rows.values() for phase in seconds))
    figure, (ax,) = canvas(1.5 + 0.36 * len(rows))
    left = np.zeros(len(rows))
    widest = max(sum(seconds.values()) for seconds in rows.values())
    for index, phase in enumerate(phases):
        width = np.array([seconds.get(phase, 0.0) for seconds in rows.values()])
        colour = PALETTE[index % len(PALETTE)]
        # With more phases than colours, hatches keep equal colours apart.
        hatch = (None, "///", "...")[index // len(PALETTE) % 3]
        label = short(phase, 18) + (f" {width[0]:.2f} s" if len(rows) == 1 else "")
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0.5}
        ax.barh(range(len(rows)), width, 0.6, left=left, label=label, **look)
        ink = "white" if colour in (BLUE, RED, BLACK, GREEN) else "#111"
        behind = {"boxstyle": "square,pad=0.15", "fc": colour, "ec": "none"} if hatch else None
        for row in np.flatnonzero(width > 0.06 * widest):
            middle = left[row] + width[row] / 2
            ax.text(middle, row, f"{width[row]:.1f}", ha="center", va="center", color=ink, size=9, bbox=behind)
        left += width
    for row, total in enumerate(left):
        ax.text(total, row, f" {total:.1f} s", va="center", size=10)
    ax.set(xlabel="seconds", xlim=(0, max(widest, 1e-9) * 1.1))
    name_rows(ax, list(rows))
    if phases:
        ax.legend(**ABOVE, ncols=7 if len(rows) > 1 else 5)
    return figure


def against_one(rows: Mapping[str, float | None], label: str) -> Figure:
    """Draw bars from 1, the value of a random split, on a log scale: better to the left, worse to the right.

    rows: value by name; None is shown as not measured. label: label of the x axis."""
    figure, (ax,) = canvas(0.9 + 0.34 * len(rows))
    values = [max(value, FLOOR) for value in rows.values() if value is not None]
    for row, value in enumerate(rows.values()):
        if value is None:
            ax.text(1, row, "  not measured", va="center", color=GREY, size=9)
            continue
        end = max(value, FLOOR)  # a log axis has no 0
        colour, hatch, side = (BLUE, None, "right") if end <= 1 else (ORANGE, "///", "left")
        ax.barh(row, end - 1, 0.6, left=1, color=colour, hatch=hatch, edgecolor="white")
        text = f" {value:,.0f} " if value >= 1000 else f" {value:.3g} "
        ax.text(end, row, text, va="center", ha=side, size=9)
    ax.axvline(1, color="#111", lw=1)
    ax.set_xscale("log")
    ax.set(xlabel=label, xlim=(min([0.5, *values]) / 2.4, max([2.0, *values]) * 2.4))
    number_decades(ax.xaxis)
    name_rows(ax, list(rows))
    return figure
