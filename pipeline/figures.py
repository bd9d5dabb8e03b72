"""The pictures of a report: plain data in, one matplotlib Figure out.

Colours are those of Okabe and Ito, which stay apart for the colour-blind; what a colour says is also said by
a shape, a hatch or a label. Nothing here reads a file."""

import io
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Patch
from matplotlib.ticker import FixedFormatter, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY, PALE = "#CC79A7", "#56B4E9", "#D9C900", "#666666", "#E3E3E3"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, "#222222")
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 10.0  # inches
MANY = 24  # beyond this many workers, classes or groups, labels give way to a scale
BOXES = 100  # classes in one box plot
NUMBERED = 5  # shard centres that carry their worker's number

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "report",  # the same data give the same bytes
    "savefig.dpi": 130,
    # Class names and neighbourhoods come from the data: a dollar sign is no formula.
    "text.parse_math": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save figures inside this block: the report's look, whatever the user's matplotlibrc says."""
    with rc_context():
        rcdefaults()
        rcParams.update(STYLE)
        yield


def canvas(height: float, columns: int = 1, **options: Any) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure of the report's width, outside pyplot's global state, and its axes [columns]."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, axes[0]


def svg_uri(figure: Figure) -> str:
    """The figure as a data: URI. As an image its ids cannot collide with another figure's on the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + b64encode(buffer.getvalue()).decode()


def png_uri(image_CHW: npt.NDArray[np.uint8]) -> str:
    """One image as a data: URI: three or more channels as RGB, fewer as grey."""
    channels = 3 if len(image_CHW) >= 3 else 1
    pixels = np.moveaxis(image_CHW[:channels], 0, -1)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels if channels == 3 else pixels[..., 0])).save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode()


def short(name: object, limit: int = 14) -> str:
    """A name cut to `limit` characters."""
    text = str(name)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def grouped(axis: Any) -> None:
    """Write an axis' numbers with thousands separators."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def name_ticks(axis: Any, names: Sequence[str], rotate: bool = False) -> None:
    """Name every position while they are few, number some of them when they are many."""
    if len(names) <= MANY:
        axis.set_ticks(range(len(names)), [short(name) for name in names])
        if rotate and max(map(len, names)) > 4 and len(names) > 10:
            for label in axis.get_ticklabels():
                label.set(rotation=35, ha="right", rotation_mode="anchor")
    else:
        axis.set_major_locator(MaxNLocator(12, integer=True))


def expected_counts(table: Ints) -> tuple[Floats, Floats]:
    """Mean and standard deviation [W, L] of a random split with these shard and class sizes
    (hypergeometric)."""
    total = table.sum()
    shards, classes = table.sum(axis=1)[:, None], table.sum(axis=0)[None, :]
    mean = shards * classes / max(total, 1)
    variance = mean * (1 - classes / max(total, 1)) * (total - shards) / max(total - 1, 1)
    return mean, np.sqrt(np.maximum(variance, 0))


def shard_sizes(owners: Sequence[int], copies: Sequence[int]) -> Figure:
    """Rows a worker, duplicates stacked on top."""
    figure, (ax,) = canvas(2.6)
    workers = np.arange(len(owners))
    ax.bar(workers, owners, color=BLUE, label="own examples")
    if any(copies):
        ax.bar(workers, copies, bottom=owners, color=ORANGE, hatch="///", edgecolor="white", label="duplicates")
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    ax.set(xlabel="worker", ylabel="rows", xlim=(-0.6, len(owners) - 0.4))
    name_ticks(ax.xaxis, [str(worker) for worker in workers])
    grouped(ax.yaxis)
    return figure


def class_heat_map(table: Ints, names: Sequence[str]) -> Figure:
    """Owners per worker and class, coloured by how many standard deviations of a random split they are
    off."""
    mean, deviation = expected_counts(table)
    off = np.divide(table - mean, deviation, out=np.zeros(table.shape), where=deviation > 0)
    limit = max(3.0, min(float(np.abs(off).max()), 10.0))
    workers, classes = table.shape
    figure, (ax,) = canvas(min(1.5 + 0.28 * workers, 6.0))
    image = ax.imshow(off, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    if workers <= MANY and classes <= 12:
        for (worker, label), count in np.ndenumerate(table):
            dark = abs(off[worker, label]) > 0.65 * limit
            ax.text(
                label,
                worker,
                f"{count:,}",
                ha="center",
                va="center",
                color="white" if dark else "#111",
                size=9,
            )
    ax.set(xlabel="class", ylabel="worker")
    ax.spines[:].set_visible(False)
    name_ticks(ax.xaxis, names, rotate=True)
    name_ticks(ax.yaxis, [str(worker) for worker in range(workers)])
    bar = figure.colorbar(
        image, ax=ax, fraction=0.03, pad=0.01, extend="both" if np.abs(off).max() > limit else "neither"
    )
    bar.set_label("fewer   ←   sd from expected   →   more")
    bar.outline.set_visible(False)
    return figure


def class_boxes(table: Ints, names: Sequence[str]) -> Figure:
    """For each class the spread of its counts over the workers, against a random split (Provatas et al. 2021,
    Fig. 7).

    Of more than BOXES classes, those that stray farthest from the expected count are shown."""
    mean, deviation = expected_counts(table)
    off = np.divide(np.abs(table - mean), deviation, out=np.zeros(table.shape), where=deviation > 0).max(axis=0)
    shown = np.sort(np.argsort(-off, kind="stable")[:BOXES])
    table, names = table[:, shown], [names[label] for label in shown]
    centre, spread = mean[:, shown].mean(axis=0), deviation[:, shown].mean(axis=0)
    positions = np.arange(len(shown))
    figure, (ax,) = canvas(3.6)
    # Counts cannot be negative, nor does the band go there.
    low = np.maximum(centre - 2 * spread, 0)
    band = centre + 2 * spread - low
    ax.bar(positions, band, 0.92, bottom=low, color=PALE, label="random split: expected ± 2 sd")
    ax.hlines(centre, positions - 0.46, positions + 0.46, color=GREY, lw=1, ls="--", label="expected count")
    boxes = ax.boxplot(
        table,
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
    boxes["boxes"][0].set_label("over the workers: quartiles, median, least to most")
    ax.set(xlabel="class", ylabel="examples on a worker", xlim=(-0.6, len(shown) - 0.4))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    name_ticks(ax.xaxis, names, rotate=True)
    grouped(ax.yaxis)
    if len(shown) > MANY:  # a tick names its class, not its place among those shown
        ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: str(shown[int(at)]) if 0 <= at < len(shown) else ""))
    return figure


def neighbourhood_sizes(groups: Sequence[Mapping[str, Any]], num_workers: int) -> Figure:
    """Size of every neighbourhood, largest first, on a log scale; the sparse ones orange, hatched and
    crossed."""
    sizes = np.array([group["size"] for group in groups])
    sparse = np.array([bool(group["sparse"]) for group in groups])
    positions = np.arange(len(sizes))
    figure, (ax,) = canvas(3.0)
    # Log bars need a foot below 1, or a neighbourhood of one example has no height.
    for chosen, colour, hatch, label in (
        (~sparse, BLUE, None, "dense: divided among the workers"),
        (sparse, ORANGE, "///", "sparse: copied to every worker"),
    ):
        if chosen.any():
            heights = np.maximum(sizes[chosen], 1) - 0.5
            ax.bar(
                positions[chosen],
                heights,
                bottom=0.5,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                lw=0.3,
                label=label,
            )
    ax.plot(positions[sparse], sizes[sparse] * 1.35, "x", color="#111", ms=5, mew=1.3)
    ax.axhline(num_workers, color=RED, lw=1.2, ls="--", label=f"{num_workers} workers: no more than one example each")
    ax.set_yscale("log")
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="neighbourhood, by size", ylabel="examples (log scale)", xlim=(-0.6, len(sizes) - 0.4))
    ax.set_ylim(0.5, max(float(sizes.max()), num_workers) * 2)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    name_ticks(ax.xaxis, [str(index) for index in positions])
    grouped(ax.yaxis)
    return figure


def scatter_groups(ax: Axes, points: Floats, groups: Ints, names: Sequence[str], grouped_by: str) -> None:
    """Scatter points [rows, 2], a colour and a marker for each group; numbers alone beyond MANY groups."""
    if len(names) > MANY:
        image = ax.scatter(points[:, 0], points[:, 1], c=groups, s=7, cmap="viridis", lw=0, rasterized=True)
        bar = ax.figure.colorbar(image, ax=ax, fraction=0.04, pad=0.01, label=f"{grouped_by} number")
        bar.outline.set_visible(False)
        return
    for group, name in enumerate(names):
        chosen = points[groups == group]
        if len(chosen):
            ax.scatter(
                chosen[:, 0],
                chosen[:, 1],
                s=11,
                color=PALETTE[group % len(PALETTE)],
                marker=MARKERS[group // len(PALETTE) % len(MARKERS)],
                alpha=0.75,
                lw=0,
                label=short(name),
                rasterized=True,
            )


def draw_centres(ax: Axes, centres: Floats, shard_sd: Floats) -> None:
    """Shard means less the whole set's mean [W, 2], over the ellipse where random shards would lie."""
    # 95 % of a two-dimensional normal lie within sqrt(5.99) = 2.45 standard deviations.
    ax.add_patch(Ellipse((0, 0), *(2 * 2.45 * shard_sd), color=PALE, zorder=0))
    ax.plot(0, 0, "+", color="#111", ms=12, mew=1.5)
    ax.plot(centres[:, 0], centres[:, 1], "o", color=BLUE, ms=5 if len(centres) <= MANY else 3)
    # Near the cross numbers would cover each other, and those shards are the ones nobody asks about.
    distance = np.nan_to_num(np.hypot(*centres.T), nan=-1.0)
    for worker in np.argsort(-distance, kind="stable")[:NUMBERED]:
        if distance[worker] >= 0:
            ax.annotate(str(worker), centres[worker], xytext=(4, 3), textcoords="offset points", size=9)
    reach = 1.15 * max(2.45 * float(shard_sd.max()), float(np.nanmax(np.abs(centres), initial=0.0)), 1e-9)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach))
    ax.set_title("centres of the shards, enlarged")
    ax.legend(
        handles=[
            Line2D(
                [],
                [],
                color=BLUE,
                marker="o",
                ls="",
                label=f"shard (farthest {min(NUMBERED, len(centres))} numbered)",
            ),
            Line2D([], [], color="#111", marker="+", ls="", ms=9, label="whole set"),
            Patch(color=PALE, label="where 95 % of random shards lie"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=2,
    )


def projection(
    points: Floats,
    groups: Ints,
    names: Sequence[str],
    grouped_by: str,
    rare: Floats,
    centres: Floats,
    shard_sd: Floats,
) -> Figure:
    """The sample in two dimensions, and beside it the centre of each shard, enlarged.

    points: [rows, 2]; rare: [sparse images, 2]; centres: [W, 2] shard means less the whole set's mean;
    shard_sd: [2] their standard deviation under a random split."""
    if len(centres) > 1:
        figure, (left, right) = canvas(4.9, 2, width_ratios=(1.25, 1))
        draw_centres(right, centres, shard_sd)
    else:
        figure, (left,) = canvas(4.9)
    scatter_groups(left, points, groups, names, grouped_by)
    if len(rare):
        left.scatter(rare[:, 0], rare[:, 1], s=70, marker="X", color=ORANGE, edgecolor="#111", label="sparse", zorder=3)
    left.set_title(f"{len(points):,} images by {grouped_by}")
    if len(names) <= MANY:
        left.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=7 if max(map(len, names)) < 4 else 4,
            columnspacing=0.8,
            handletextpad=0.1,
            markerscale=1.5,
        )
    for ax in figure.axes[:2] if len(centres) > 1 else [left]:
        ax.set(xlabel="first principal component", ylabel="second")
        ax.tick_params(labelsize=8)
    return figure


def shard_ratios(ratios: Sequence[float | None], mean: float, shard_sd: float | None) -> Figure:
    """Each shard's distance from the whole set relative to a random split, with what a random split may
    give."""
    values = np.array([np.nan if ratio is None else ratio for ratio in ratios], float)
    figure, (ax,) = canvas(2.6)
    if shard_sd is not None:
        ax.axhspan(max(1 - 2 * shard_sd, 0), 1 + 2 * shard_sd, color=PALE, label="random split ± 2 sd")
    ax.axhline(1, color=GREY, lw=1.2, ls="--", label="random split on average = 1")
    ax.axhline(mean, color=RED, lw=1.2, label=f"mean of these shards = {mean:.2f}")
    ax.plot(values, "o", color=BLUE, ms=6 if len(values) <= MANY else 3, label="shard")
    ax.set(xlabel="worker", ylabel="distance ratio", xlim=(-0.6, len(values) - 0.4))
    if np.nanmax(values) > 8:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0)
    grouped(ax.yaxis)
    name_ticks(ax.xaxis, [str(worker) for worker in range(len(values))])
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    return figure


def stacked_seconds(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Figure:
    """Seconds by phase, one stacked bar a row: (name, {phase: seconds})."""
    phases = list(dict.fromkeys(phase for _, seconds in rows for phase in seconds))
    figure, (ax,) = canvas(1.5 + 0.36 * len(rows))
    left = np.zeros(len(rows))
    positions = np.arange(len(rows))
    widest = max((sum(seconds.values()) for _, seconds in rows), default=0.0)
    for index, phase in enumerate(phases):
        width = np.array([float(seconds.get(phase, 0.0)) for _, seconds in rows])
        colour, hatch = PALETTE[index % len(PALETTE)], (None, "///", "...")[index // len(PALETTE) % 3]
        ax.barh(
            positions,
            width,
            0.6,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            lw=0.5,
            label=short(phase, 18) + (f" {width[0]:.2f} s" if len(rows) == 1 else ""),
        )
        for row, value in enumerate(width):
            if widest and value > 0.06 * widest:
                ink = "white" if colour in (BLUE, RED, "#222222", GREEN) else "#111"
                ax.text(left[row] + value / 2, row, f"{value:.1f}", ha="center", va="center", color=ink, size=9)
        left += width
    for row, value in enumerate(left):
        ax.text(value, row, f" {value:.1f} s", va="center", size=10)
    ax.set(xlabel="seconds", xlim=(0, max(widest, 1e-9) * 1.1), ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(positions, [short(name, 24) for name, _ in rows])
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    if phases:
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=7 if len(rows) > 1 else 5)
    return figure


def against_one(rows: Sequence[tuple[str, float | None]], label: str, floor: float = 1e-3) -> Figure:
    """Bars that start at 1, where a random split lies: to the left better, to the right worse, on a log
    scale."""
    figure, (ax,) = canvas(0.9 + 0.34 * len(rows))
    known = [max(value, floor) for _, value in rows if value is not None]
    low, high = min([0.5, *known]) / 1.6, max([2.0, *known]) * 1.6
    for row, (_, value) in enumerate(rows):
        if value is None:
            ax.text(1, row, "  not measured", va="center", color=GREY, size=9)
            continue
        drawn = max(value, floor)
        better = drawn <= 1
        ax.barh(
            row,
            drawn - 1,
            0.6,
            left=1,
            color=BLUE if better else ORANGE,
            hatch=None if better else "///",
            edgecolor="white",
        )
        ax.text(
            drawn,
            row,
            f" {value:,.0f} " if value >= 1000 else f" {value:.3g} ",
            va="center",
            ha="right" if better else "left",
            size=9,
        )
    ax.axvline(1, color="#111", lw=1)
    ax.set_xscale("log")
    ax.set(xlabel=label, xlim=(low / 1.5, high * 1.5), ylim=(len(rows) - 0.5, -0.5))
    ax.xaxis.set_minor_formatter(NullFormatter())
    grouped(ax.xaxis)
    ax.yaxis.set_ticks(range(len(rows)))
    ax.yaxis.set_major_formatter(FixedFormatter([short(name, 24) for name, _ in rows]))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figure
