"""The figures of a run's report: functions from arrays to a matplotlib Figure, in the style of the shard report.

Legend: E points of a curve, T times, W workers, B time bins, V staleness values. NaN means unknown and is not drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.core.arrays import Floats, Ints
from pipeline.core.reporting.plots import (
    ABOVE,
    BLUE,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    canvas,
    drawable_names,
    number_decades,
    number_ticks,
    separate_thousands,
    short,
)

SPREAD = (0.01, 0.25, 0.5, 0.75, 0.99)  # the quantiles of a box's whiskers, sides and middle
POINTS = 600  # per curve; more are indistinguishable at the report's width
LINES = 200  # most lines or boxes of workers in a figure; of more workers a sample or bands are drawn
NAME_CHARACTERS = 16  # of the name of a class beside the grid
NUMBERED = 20  # most classes of a grid whose cells have numbers
BARS = 60  # most bars of a histogram
WIDE_SPREAD = 100.0  # losses that differ by more than this factor need a log scale
CURVE_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "training, as it goes": {"color": SKY, "lw": 0.9, "alpha": 0.7},
    "training, mean of an epoch": {"color": BLUE, "lw": 1.4, "marker": "o", "ms": 4},
    "training images, evaluated": {"color": GREEN, "lw": 1.4, "marker": "^", "ms": 5, "ls": "--"},
    "evaluation images": {"color": RED, "lw": 1.8, "marker": "s", "ms": 4},
}
MARK_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "restart": {"color": PURPLE, "lw": 1.5, "ls": ":"},
    "rollback": {"color": "#111", "lw": 1.2, "ls": "--"},
    "switch": {"color": ORANGE, "lw": 1.2, "ls": "-."},
}


class Curve(NamedTuple):
    """A curve with points x, y: [E]. name: a key of ``CURVE_LOOKS``, which defines its look."""

    name: str
    x: Floats
    y: Floats


class Mark(NamedTuple):
    """An incident, or the switch to another stage, at position x of the horizontal axis."""

    kind: Literal["restart", "rollback", "switch"]
    x: float


def evenly(count: int, limit: int = POINTS) -> Ints:
    """Return at most ``limit`` evenly spaced positions in 0..count-1, including the first and the last."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64)


def thin(values: Floats) -> Floats:
    """Return a sample of entries along the first axis, large enough that a line through them looks the same."""
    return values[evenly(len(values))]


def finite(values: Floats) -> Floats:
    """Replace infinities by NaN, which matplotlib leaves out of lines and limits."""
    return np.where(np.isfinite(values), values, np.nan)


def draw_marks(ax: Any, marks: Sequence[Mark]) -> None:
    """Draw a vertical line at each mark, with one legend entry per kind."""
    for kind, look in MARK_LOOKS.items():
        for index, x in enumerate(mark.x for mark in marks if mark.kind == kind):
            ax.axvline(x, label="_" if index else kind, zorder=0.5, **look)


def legend(figure: Figure, axes: Iterable[Any]) -> None:
    """Add one legend above the whole figure, with every name of its panels once."""
    handles_by_label = {
        label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if handles_by_label:
        figure.legend(handles_by_label.values(), handles_by_label.keys(), loc="outside upper center", ncols=6)


def few_ticks(axis: Any) -> None:
    """Set few enough ticks that large numbers do not touch below a panel of half the report's width."""
    axis.set_major_locator(MaxNLocator(6))
    separate_thousands(axis)


def learning_curves(losses: Sequence[Curve], accuracies: Sequence[Curve], marks: Sequence[Mark], xlabel: str) -> Figure:
    """Draw loss on the left and accuracy on the right, over the same axis.

    Args:
        losses, accuracies: the curves of each panel.
        marks: incidents, drawn in both panels.
        xlabel: "seconds" or "epoch".
    """
    # Models with real targets and the toy loss have no accuracies.
    panels = [(name, curves) for name, curves in (("loss", losses), ("accuracy", accuracies)) if curves]
    figure, axes = canvas(3.6, len(panels))
    for ax, (ylabel, curves) in zip(axes, panels, strict=True):
        for curve in curves:
            look = {"markevery": max(1, len(curve.x) // 40), **CURVE_LOOKS[curve.name]}
            ax.plot(thin(curve.x), thin(finite(curve.y)), label=curve.name, **look)
        draw_marks(ax, marks)
        ax.set(xlabel="training time in seconds" if xlabel == "seconds" else xlabel, ylabel=ylabel)
        few_ticks(ax.xaxis)
        if curves is losses:
            scale_losses(ax, losses)
        else:
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    legend(figure, axes)
    return figure


def scale_losses(ax: Any, losses: Sequence[Curve]) -> None:
    """Use a log scale if a diverging loss would flatten all other curves."""
    values = np.concatenate([finite(curve.y) for curve in losses] or [np.empty(0)])
    values = values[values > 0]
    if len(values) and values.max() > WIDE_SPREAD * values.min():
        log_scale(ax)
        ax.set_ylabel("loss (log scale)")


def log_scale(ax: Any) -> None:
    """Use a vertical log scale with plain numbers."""
    ax.set_yscale("log")
    number_decades(ax.yaxis)


def learning_rate(epoch: Floats, rate: Floats) -> Figure:
    """Draw the learning rate of the global mini-batch over the global epoch.

    Both are [E]. The vertical axis is logarithmic if the largest rate is more than five times the smallest."""
    figure, (ax,) = canvas(1.9)
    ax.plot(thin(epoch), thin(rate), color=BLUE, lw=1.6, drawstyle="steps-post")
    ax.set(xlabel="epoch", ylabel="learning rate", xlim=(0, None))
    if rate.min() > 0 and rate.max() > 5 * rate.min():
        log_scale(ax)
    else:
        ax.set_ylim(0, 1.15 * max(float(rate.max()), 1e-12))
    return figure


def consensus(epoch: Floats, distance: Floats, sent_bytes: Floats) -> Figure:
    """Draw the distance of the workers' models from their mean, and the data that they have sent, over epochs, all [E]."""
    figure, (left, right) = canvas(1.9, 2)
    dots: dict[str, Any] = {"lw": 1.6, "marker": "o", "ms": 4, "markevery": max(1, len(epoch) // 40)}
    left.plot(thin(epoch), thin(finite(distance)), color=BLUE, **dots)
    left.set(xlabel="epoch", ylabel="distance", xlim=(0, None), ylim=(0, None))
    right.plot(thin(epoch), thin(sent_bytes / 1e6), color=GREEN, **dots)
    right.set(xlabel="epoch", ylabel="MB of models sent", xlim=(0, None), ylim=(0, None))
    for ax in (left, right):
        few_ticks(ax.xaxis)
    return figure


def confusion(counts: Ints, names: Sequence[str] = ()) -> Figure:
    """Draw the share of each class's rows that is predicted as each class.

    A class without rows is white. Up to ``NUMBERED`` classes have numbers in their cells, in percent, and names.

    counts: [K, K], by class and predicted class, of K classes. names: of the classes; empty if they are unknown."""
    rows = counts.sum(1, keepdims=True)
    shares = np.divide(counts, rows, out=np.full(counts.shape, np.nan), where=rows > 0)
    figure, (ax, _) = canvas(3.6, 2, width_ratios=(2, 1))
    # The second axis stays empty: a square grid of the full width would fill the screen.
    figure.axes[1].set_axis_off()
    image = ax.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    if len(counts) <= NUMBERED:
        for (row, predicted), share in np.ndenumerate(shares):
            if np.isfinite(share):
                colour = "white" if share > 0.5 else "black"
                ax.text(predicted, row, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=7)
    ax.set(xlabel="predicted class", ylabel="class")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(NUMBERED if len(counts) <= NUMBERED else 10, integer=True))
    if len(counts) <= NUMBERED and (labels := drawable_names(range(len(counts)), names)):
        labels = [short(label, NAME_CHARACTERS) for label in labels]
        ax.set_yticks(range(len(labels)), labels)
        ax.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    figure.colorbar(image, ax=ax, format=PercentFormatter(1), label="share of the class's rows")
    return figure


def cut_tail(histogram: Ints) -> tuple[Ints, Ints, int]:
    """Return at most BARS bars for counts [V] by staleness: edges [n + 1], counts [n] and the updates beyond the last edge.

    Updates beyond twice the 99.5th percentile are counted but not drawn, because a few very stale ones would squeeze
    all others into one bar. All bars have the same width, a whole number."""
    below = np.cumsum(histogram)
    usual = 2 * int(np.searchsorted(below, 0.995 * below[-1])) + 1
    length = min(usual, len(histogram))
    width = -(-length // BARS)
    edges = np.arange(0, length + width, width)
    counts = np.add.reduceat(histogram[: edges[-1]], edges[:-1])
    return edges, counts, int(below[-1] - counts.sum())


def staleness(histogram: Ints, spread: Floats) -> Figure:
    """Draw the staleness of all updates, counts [V]; for several workers also ``SPREAD`` by worker, [W, 5]."""
    figure, axes = canvas(3.2, 2) if len(spread) > 1 else canvas(3.2)
    draw_histogram(axes[0], histogram)
    if len(spread) > 1:
        draw_spread(axes[1], spread)
    return figure


def draw_histogram(ax: Any, histogram: Ints) -> None:
    """Draw the shares of updates by staleness as bars, and the mean staleness as a line.

    histogram: number of updates with staleness 0, 1, 2, ..., [V]."""
    edges, counts, beyond = cut_tail(histogram)
    total = histogram.sum()
    width = edges[1] - edges[0]
    ax.bar(edges[:-1], counts / total, 0.9 * width, align="center" if width == 1 else "edge", color=BLUE)
    mean = float(np.arange(len(histogram)) @ histogram / total)
    ax.axvline(mean, color=RED, lw=1.2, ls="--", label=f"mean {mean:.2f}")
    ax.legend(**ABOVE)
    late = f"; {beyond:,} more, up to {len(histogram) - 1:,}" if beyond else ""
    ax.set(xlabel=f"staleness in updates{late}", ylabel="share of updates")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    separate_thousands(ax.xaxis)


def draw_spread(ax: Any, spread: Floats) -> None:
    """Draw the distribution of each worker's staleness: a box per worker, or bands for more than LINES workers.

    spread: the quantiles ``SPREAD`` of the staleness in updates, [W, 5]. A worker without updates, a row of NaN, has no
    box."""
    if len(spread) > LINES:
        draw_bands(ax, spread)
    else:
        draw_boxes(ax, spread)
    ax.set(xlabel="worker", ylabel="staleness in updates", xlim=(-0.6, len(spread) - 0.4), ylim=(0, None))
    number_ticks(ax.xaxis, len(spread))
    separate_thousands(ax.yaxis)


def draw_bands(ax: Any, spread: Floats) -> None:
    """Draw the quantiles of ``SPREAD`` over the workers: two bands around a line, the median."""
    workers = np.arange(len(spread))
    (low, first, middle, third, high) = spread.T
    ax.fill_between(workers, low, high, color=SKY, alpha=0.35, lw=0, rasterized=True)
    ax.fill_between(workers, first, third, color=BLUE, alpha=0.45, lw=0, rasterized=True)
    ax.plot(workers, middle, color="#111", lw=0.8, rasterized=True)


def draw_boxes(ax: Any, spread: Floats) -> None:
    """Draw a box per worker, with its whiskers, sides and middle at the quantiles of ``SPREAD``."""
    keys = ("whislo", "q1", "med", "q3", "whishi")
    workers = np.flatnonzero(~np.isnan(spread).any(axis=1))
    boxes = [dict(zip(keys, spread[worker], strict=True)) for worker in workers]
    look = {"boxprops": {"facecolor": SKY, "edgecolor": BLUE}, "medianprops": {"color": "#111", "lw": 1.5}}
    lines = {"whiskerprops": {"color": BLUE}, "capprops": {"color": BLUE}}
    ax.bxp(
        boxes, positions=workers, widths=0.6, patch_artist=True, showfliers=False, manage_ticks=False, **look, **lines
    )


def throughput(seconds: Floats, images_per_s: Floats, marks: Sequence[Mark]) -> Figure:
    """Draw the training images per second of all workers together over the training time, both [T]."""
    figure, (ax,) = canvas(2.3)
    ax.plot(thin(seconds), thin(finite(images_per_s)), color=BLUE, lw=1.2)
    draw_marks(ax, marks)
    ax.set(xlabel="training time in seconds", ylabel="images per second", xlim=(0, None), ylim=(0, None))
    for axis in (ax.xaxis, ax.yaxis):
        separate_thousands(axis)
    legend(figure, [ax])
    return figure


def worker_throughput(edges: Floats, images_per_s: Floats) -> Figure:
    """Draw images per second by worker, [W, B], between edges [B + 1] in seconds. White means 0."""
    workers = len(images_per_s)
    figure, (ax,) = canvas(min(1.6 + 0.16 * workers, 5.0))
    rows = np.arange(workers + 1) - 0.5
    image = ax.pcolormesh(edges, rows, images_per_s, cmap="Blues", vmin=0, rasterized=True)
    ax.set(xlabel="training time in seconds", ylabel="worker")
    ax.invert_yaxis()
    number_ticks(ax.yaxis, workers)
    separate_thousands(ax.xaxis)
    bar = figure.colorbar(image, ax=ax, fraction=0.03, pad=0.01)
    bar.set_label("images per second")
    bar.outline.set_visible(False)
    return figure


def clocks(seconds: Floats, table: Floats, bound: int | None, marks: Sequence[Mark]) -> Figure:
    """Draw the workers' clocks, and beside them how far each worker is ahead of the slowest.

    Args:
        seconds: [T].
        table: steps done, [T, W]; NaN for workers that the run does not have at that time.
        bound: SSP's staleness bound, None if the run has none.
        marks: incidents.
    """
    figure, axes = canvas(3.3, 2)
    # The lead over the slowest worker is the quantity that SSP bounds.
    ahead = table - np.nanmin(table, axis=1, keepdims=True)
    times = (~np.isnan(ahead)).sum(axis=0)
    pace = np.divide(np.nansum(ahead, axis=0), times, out=np.full(len(times), np.nan), where=times > 0)
    for ax, values in zip(axes, (table, ahead), strict=True):
        draw_workers(ax, seconds, values, pace)
        draw_marks(ax, marks)
        ax.set_xlabel("training time in seconds")
        few_ticks(ax.xaxis)
        separate_thousands(ax.yaxis)
    axes[0].set_ylabel("steps done")
    axes[1].set_ylabel("steps ahead of the slowest")
    axes[1].set_ylim(0, max(1.05 * float(np.nanmax(ahead)), 1.15 * (bound or 0), 1))
    if bound is not None:
        axes[1].axhline(bound, color=RED, lw=1.2, ls="-.", label=f"staleness bound {bound}")
    legend(figure, axes)
    return figure


def draw_workers(ax: Any, seconds: Floats, values: Floats, pace: Floats) -> None:
    """Draw a thin line per worker, [T, W], or for a sample of very many workers; highlight the slowest and the fastest.

    Args:
        ax: the axes.
        seconds: [T].
        values: [T, W].
        pace: mean lead of each worker, [W], which defines the slowest and the fastest one; NaN for one without steps.
    """
    workers = values.shape[1]
    many = workers > MANY
    lines = values[:, evenly(workers, LINES)]
    ax.plot(seconds, lines, color=GREY, lw=0.7, alpha=0.25 if many else 0.6, rasterized=many)
    for worker, role, look in (
        (np.nanargmin(pace), "slowest", {"color": ORANGE, "ls": "-"}),
        (np.nanargmax(pace), "fastest", {"color": BLUE, "ls": "--"}),
    ):
        ax.plot(seconds, values[:, worker], lw=1.6, label=f"{role} on average: worker {worker}", **look)
