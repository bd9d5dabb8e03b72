"""The plot of the images in two dimensions: a sample on its principal axes, and the mean of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Patch

from pipeline.core.reporting.plots import BLUE, MANY, ORANGE, PALE, PALETTE, canvas
from pipeline.quality.measure import ImageSample, SparseImage
from pipeline.quality.metrics import Quality, expected_shift
from pipeline.quality.moments import Floats, Ints, thumbnails

MARKERS = ("o", "s", "^", "D", "v", "P")
UNEQUAL = 0.05  # the share by which the smallest shard is smaller than the largest, from which the plot says so
NUMBERED = 5  # shard centres that are labelled with the worker's number
INSIDE_95 = 2.45  # sqrt(5.99) standard deviations hold 95 % of a two-dimensional normal


def principal_axes(features: Floats) -> Floats:
    """Return the two leading principal axes [F, 2]; a missing axis is zero.

    The largest entry of each axis is positive, so that the plot does not flip between runs."""
    centred = (features - features.mean(axis=0)).astype(np.float64)
    is_wide = centred.shape[1] > len(centred)
    # Long vectors have fewer rows than numbers: the products of rows have the same eigenvalues as those of numbers.
    variances, vectors = np.linalg.eigh(centred @ centred.T if is_wide else centred.T @ centred)
    leading = vectors[:, ::-1][:, :2] * (variances[::-1][:2] > 1e-9 * max(variances[-1], 1e-300))
    if is_wide:
        leading = centred.T @ leading / np.sqrt(np.maximum(variances[::-1][:2], 1e-300))
    axes = np.zeros((features.shape[1], 2))
    signs = np.sign(leading[np.abs(leading).argmax(axis=0), range(leading.shape[1])])
    axes[:, : leading.shape[1]] = leading * np.where(signs == 0, 1, signs)
    return axes


def projection(
    measured: Quality, sample: ImageSample, by: str, num_groups: int, sparse: Sequence[SparseImage]
) -> Figure:
    """Draw the sample by group, the sparse images crossed, and for several workers the shards' centres.

    Args:
        measured: the figures of the set.
        sample: the sample.
        by: the kind of group, for labels.
        num_groups: the number of groups; 0 draws all points in one colour.
        sparse: images of sparse neighbourhoods.
    """
    mean = sample.features.mean(axis=0)
    axes = principal_axes(sample.features)
    points = (sample.features - mean) @ axes
    workers = len(measured.shards)
    figure, panels = canvas(4.9, 2, width_ratios=(1.25, 1)) if workers > 1 else canvas(4.9)
    scatter_groups(panels[0], points, sample.groups, by, num_groups)
    if sparse:
        rare = (thumbnails(np.stack([image.pixels for image in sparse])) - mean) @ axes
        panels[0].scatter(*rare.T, s=70, marker="X", color=ORANGE, edgecolor="#111", label="sparse", zorder=3)
    if 0 < num_groups <= MANY:
        panels[0].legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=7,
            columnspacing=0.8,
            handletextpad=0.1,
            markerscale=1.5,
        )
    if workers > 1:
        owners = np.array([shard.owners for shard in measured.shards])
        has_rows = owners > 0
        whole = np.average(measured.feature_means[has_rows], axis=0, weights=owners[has_rows])
        # The ellipse is the distribution of the mean of a random shard of average size.
        centres, shard_sd = comparable_centres(
            (measured.feature_means - whole) @ axes, owners, measured.rows, points.var(axis=0)
        )
        are_equal = owners.min() > (1 - UNEQUAL) * owners.max()
        draw_centres(panels[1], centres, shard_sd, scaled=not are_equal)
    for ax in panels:
        ax.set(xlabel="first principal component", ylabel="second")
        ax.tick_params(labelsize=8)
    return figure


def scatter_groups(ax: Any, points: Floats, groups: Ints, by: str, num_groups: int) -> None:
    """Scatter points by group, with a colour and a marker per group, or a colour scale beyond MANY groups.

    Args:
        ax: the axes.
        points: [rows, 2].
        groups: [rows].
        by: the kind of group, for labels.
        num_groups: the number of groups; 0: none.
    """
    ax.set_title(f"{len(points):,} images" + f" by {by}" * (num_groups > 0))
    if num_groups > MANY:
        image = ax.scatter(*points.T, c=groups, s=7, cmap="viridis", lw=0, rasterized=True)
        bar = ax.figure.colorbar(image, ax=ax, fraction=0.04, pad=0.01, label=f"{by} number")
        bar.outline.set_visible(False)
        return
    for group in np.unique(groups):
        colour = PALETTE[group % len(PALETTE)]
        marker = MARKERS[group // len(PALETTE) % len(MARKERS)]
        look = {"s": 11, "color": colour, "marker": marker, "alpha": 0.75, "lw": 0, "rasterized": True}
        ax.scatter(*points[groups == group].T, label=str(group), **look)


def comparable_centres(centres: Floats, owners: Ints, rows: int, variances: Floats) -> tuple[Floats, Floats]:
    """Scale the means of shards to a random shard of average size, because smaller shards stray farther.

    Returns the scaled means [W, 2], and the standard deviations of the mean of such a shard, [2].

    Args:
        centres: shard means minus the mean of the whole set, [W, 2].
        owners: rows of each shard, [W].
        rows: rows of the set.
        variances: of the rows, [2].
    """
    sizes = (round(rows / len(owners)), *owners.tolist())
    sds = np.sqrt([[expected_shift(size, rows, float(variance)) for variance in variances] for size in sizes])
    scale = np.divide(sds[0], sds[1:], out=np.ones_like(centres), where=sds[1:] > 0)
    return centres * scale, sds[0]


def draw_centres(ax: Any, centres: Floats, shard_sd: Floats, *, scaled: bool) -> None:
    """Draw shard means minus the whole set's mean [W, 2], over the ellipse of random shards.

    shard_sd: standard deviations of the mean of a random shard, [2]; scaled: whether shards differ in size."""
    ax.add_patch(Ellipse((0, 0), *(2 * INSIDE_95 * shard_sd), color=PALE, zorder=0))
    ax.plot(0, 0, "+", color="#111", ms=12, mew=1.5)
    ax.plot(*centres.T, "o", color=BLUE, ms=5 if len(centres) <= MANY else 3)
    # Number only the farthest shards: near the cross the numbers would overlap, and those shards need no attention.
    distance = np.nan_to_num(np.hypot(*centres.T), nan=-1.0)
    for worker in np.argsort(-distance, kind="stable")[:NUMBERED]:
        if distance[worker] >= 0:
            ax.annotate(str(worker), centres[worker], xytext=(4, 3), textcoords="offset points", size=9)
    reach = 1.15 * max(INSIDE_95 * float(shard_sd.max()), float(np.nanmax(np.abs(centres), initial=0.0)), 1e-9)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach))
    ax.set_title("centres of the shards, enlarged")
    shard = f"shard{', scaled to the average size' * scaled} (farthest {min(NUMBERED, len(centres))} numbered)"
    handles = [
        Line2D([], [], color=BLUE, marker="o", ls="", label=shard),
        Line2D([], [], color="#111", marker="+", ls="", ms=9, label="whole set"),
        Patch(color=PALE, label="where 95 % of random shards lie"),
    ]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
