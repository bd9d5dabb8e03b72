"""The figures of a study: accuracy and loss over epochs, spread, shard quality, class counts, staleness and time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

from pipeline.core.reporting.plots import ABOVE, GREY, PALETTE, canvas, name_rows, number_decades
from trainer.study.analysis.curves import Curves
from trainer.study.analysis.published import RUNS, published_of
from trainer.study.analysis.results import StudySetting
from trainer.study.analysis.sides import PRIMARY, ComparisonSide, sharding_seconds
from trainer.study.analysis.statistics import Interval, f_interval, summarise
from trainer.study.report.words import QUALITIES_IN_FULL

DECADE = 10.0
COSTS = (
    ("training time in seconds", "seconds", 1.0),
    ("MB of gradients and parameters sent", "sent_bytes", 1e6),
)
LOSSES = ((1, "training rows"), (0, "evaluation rows"))  # places in the palette, and labels

PANELS = 3  # runs of the paper's figure 7
MAX_LINES = 60  # runs drawn one by one


def learning(setting: StudySetting) -> Figure | None:
    """Draw accuracy over epochs, a panel per member: every run and the median.

    Shows how far apart runs of one configuration may end. Returns None if no member was evaluated at two epochs or more.
    """
    curves_by_member = [
        (name, m.curves) for name, m in setting.members.items() if m.curves and len(m.curves.epochs) > 1
    ]
    if not curves_by_member:
        return None
    figure, axes = canvas(3.2, columns=len(curves_by_member), sharey=True)
    for ax, (name, curves), colour in zip(axes, curves_by_member, _colours(len(curves_by_member)), strict=True):
        # More lines would hide each other; the median is over all runs.
        for line in curves.accuracy[:MAX_LINES]:
            ax.plot(curves.epochs, line, color=colour, lw=0.6, alpha=0.4)
        ax.plot(curves.epochs, np.median(curves.accuracy, axis=0), color="black", lw=1.4)
        ax.set_title(_wrapped(name), fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_xlabel("epoch")
    axes[0].set_ylabel("evaluation accuracy")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    return figure


def losses(setting: StudySetting) -> Figure | None:
    """Draw the losses of every run over epochs, a panel per member, on training rows (pale) and evaluation rows.

    The paper's figure 1 has these two losses of repeated runs with random shards. Returns None if no member has a loss at
    two evaluations or more."""
    rows = [(name, m, _loss_curves(m)) for name, m in setting.members.items()]
    rows = [row for row in rows if row[2]]
    if not rows:
        return None
    figure, axes = canvas(3.2, columns=len(rows), sharey=True)
    for ax, (name, _, curves) in zip(axes, rows, strict=True):
        for curve in curves[:MAX_LINES]:
            # The losses of training rows are not evaluated in every configuration.
            if None not in curve["train_loss"]:
                ax.plot(curve["epoch"], curve["train_loss"], color=PALETTE[1], lw=0.6, alpha=0.5)
            ax.plot(curve["epoch"], curve["loss"], color=PALETTE[0], lw=0.6, alpha=0.5)
        ax.set_title(_wrapped(name), fontsize=9)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_xlabel("epoch")
    axes[0].set_ylabel("loss")
    lines = [axes[0].plot([], [], color=PALETTE[at], lw=1.6, label=label)[0] for at, label in LOSSES]
    figure.legend(lines, [label for _, label in LOSSES], loc="outside upper center", ncols=2)
    return figure


def _loss_curves(member: ComparisonSide) -> list[dict[str, Any]]:
    """Return the curves of a member's runs that have losses of two evaluations or more."""
    curves = [record["curve"] for record in member.records if record["curve"]]
    with_losses = [curve for curve in curves if len(curve["epoch"]) > 1 and None not in curve["loss"]]
    return [{"train_loss": [None]} | curve for curve in with_losses]


def sharding_times(setting: StudySetting) -> Figure | None:
    """Draw the seconds in which the shards of each member were made, a dot a run (the paper's figure 8 has such times).

    Every set counts once, because runs with equal shards share one. Returns None without a time."""
    rows = [(name, sharding_seconds(m.records)) for name, m in setting.members.items()]
    rows = [(name, seconds) for name, seconds in rows if seconds]
    if not rows:
        return None
    figure, (ax,) = canvas(0.9 + 0.36 * len(rows))
    for at, ((_, seconds), colour) in enumerate(zip(rows, _colours(len(rows)), strict=True)):
        ax.plot(seconds, [at] * len(seconds), "o", color=colour, ms=4, alpha=0.5, mec="none")
        ax.plot([np.median(seconds)], [at], "|", color="black", ms=14, mew=1.6)
    name_rows(ax, [name for name, _ in rows])
    ax.set_xscale("log")
    ax.set_xlabel("seconds of sharding: every set, and the median")
    figure.draw_without_rendering()  # number_decades needs the limits
    number_decades(ax.xaxis)
    return figure


def spread_over_epochs(setting: StudySetting) -> Figure | None:
    """Draw the standard deviation of the accuracy over seeds at every epoch, with its 95 % interval.

    Returns None if no member has two runs, or if one was evaluated at a single epoch."""
    curves_by_member = [
        (name, m.curves) for name, m in setting.members.items() if m.curves and len(m.curves.accuracy) > 1
    ]
    if not curves_by_member or any(len(curves.epochs) < 2 for _, curves in curves_by_member):
        return None
    figure, (ax,) = canvas(3.4)
    for (name, curves), colour in zip(curves_by_member, _colours(len(curves_by_member)), strict=True):
        low, high = _spread_band(curves)
        ax.fill_between(curves.epochs, 100 * low, 100 * high, color=colour, alpha=0.12, lw=0)
        ax.plot(curves.epochs, 100 * curves.spread, color=colour, lw=1.6, marker="o", ms=3, label=name)
    # A log scale cannot show a deviation of 0.
    if all(curves.spread.min() > 0 for _, curves in curves_by_member):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_minor_formatter("{x:g}")
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel("standard deviation over seeds in points")
    ax.legend(**ABOVE, ncols=min(4, len(curves_by_member)))
    return figure


def ratios(setting: StudySetting, baseline: str) -> Figure | None:
    """Draw the baseline's standard deviation of the final accuracy over each member's, and the published ratio.

    A row per member, with its intervals by the F distribution and the bootstrap. Returns None if no ratio is positive
    and finite."""
    rows = [(name, c) for name, m in setting.members.items() if (c := m.comparisons[PRIMARY]) and _drawable(c.sd_ratio)]
    if not rows:
        return None
    figure, (ax,) = canvas(0.9 + 0.42 * len(rows))
    printed = published_of(setting.dataset)
    ax.axvline(1, color=GREY, lw=1, ls="--")
    for at, (name, comparison) in enumerate(rows):
        for ends, height, name_of_test, colour in (
            (comparison.sd_ratio_f, at - 0.12, "F", PALETTE[0]),
            (comparison.sd_ratio_bootstrap, at + 0.12, "bootstrap", PALETTE[1]),
        ):
            if all(map(_drawable, ends)):
                label = f"95 % by {name_of_test}" if at == 0 else None
                ax.plot(ends, [height] * 2, color=colour, lw=2.2, label=label)
        ax.plot([comparison.sd_ratio], [at], "o", color="black", ms=6, label="this study" if at == 0 else None)
        # The published ratios have random sharding as their baseline.
        published = printed.rows.get(name) if printed and baseline == "random" else None
        if printed and published:
            ratio = printed.rows["random"].accuracy_sd / published.accuracy_sd
            ax.plot(f_interval(ratio, RUNS), [at + 0.26] * 2, color=PALETTE[3], lw=1.2)
            ax.plot([ratio], [at + 0.26], "D", color=PALETTE[3], ms=5, label=f"published, {RUNS} runs, and 95 %")
    name_rows(ax, [name for name, _ in rows])
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("{x:g}")
    ax.tick_params(axis="x", which="minor", labelsize=8)
    ax.set_xlabel(
        f"standard deviation of {baseline} / standard deviation of the row (above 1: steadier than {baseline})"
    )
    legend_once(ax, columns=4)
    return figure


def legend_once(ax: Any, columns: int) -> None:
    """Draw a legend above a figure with one entry per label, although every row adds its own."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ax.legend(list(unique.values()), list(unique), **ABOVE, ncols=columns)


def deviations(setting: StudySetting) -> Figure | None:
    """Draw each run's final accuracy minus the mean of its member, in points, and the member's standard deviation.

    Deviations of all members share an axis, however far apart the means are, which stand beside the names. Returns None
    without accuracies."""
    rows = [(name, m) for name, m in setting.members.items() if PRIMARY in m.summaries]
    if not rows:
        return None
    figure, (ax,) = canvas(0.9 + 0.42 * len(rows))
    rng = np.random.default_rng(0)
    ax.axvline(0, color=GREY, lw=1, ls="--")
    for at, ((_, member), colour) in enumerate(zip(rows, _colours(len(rows)), strict=True)):
        values = np.array([record[PRIMARY] for record in member.records if record[PRIMARY] is not None])
        # Random vertical offsets keep equal accuracies apart.
        heights = at + 0.25 * (rng.random(len(values)) - 0.5)
        summary = member.summaries[PRIMARY]
        ax.plot(100 * (values - summary.mean), heights, "o", color=colour, ms=3.5, alpha=0.6, mec="none")
        if not math.isnan(summary.sd):
            ax.plot([-100 * summary.sd, 100 * summary.sd], [at, at], "|-", color="black", lw=1.5, ms=10, zorder=1)
        ax.text(1.01, at, f"{100 * summary.mean:.1f} %", transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    name_rows(ax, [name for name, _ in rows])
    ax.set_xlabel("final accuracy minus the mean on the right, in points: every run, and one standard deviation")
    return figure


def accuracy_by_cost(setting: StudySetting) -> Figure | None:
    """Draw median accuracy over own mini-batches, mean training time and bytes sent, a line per member.

    Over epochs, cheap and dear members look alike. Own mini-batches are drawn if members differ in them, as they do with
    examples of other workers; time and bytes if all runs have them. Returns None unless two members were evaluated at two
    times or more, or without any such axis."""
    rows = [(name, m, m.curves) for name, m in setting.members.items() if m.curves and len(m.curves.epochs) > 1]
    members = [member for _, member, _ in rows]
    panels = []
    if len({member.own_batches for member in members}) > 1:
        panels.append(("mini-batches of a worker's own rows", [list(member.own_batches) for member in members]))
    # Ledgers of earlier versions have no times and bytes, and some exchanges report bytes at other times.
    for label, key, unit in COSTS:
        costs = [[value / unit for value in _costs(member, key)] for member in members]
        panels += [(label, costs)] if all(costs) else []
    if len(rows) < 2 or not panels:
        return None
    figure, axes = canvas(3.4, columns=len(panels), sharey=True)
    for ax, (label, values) in zip(axes, panels, strict=True):
        for at, ((name, _, curves), places) in enumerate(zip(rows, values, strict=True)):
            # More members than colours: the others are dashed.
            look: Any = {"color": PALETTE[at % len(PALETTE)], "ls": ("-", "--", ":")[at // len(PALETTE) % 3]}
            ax.plot(places, np.median(curves.accuracy, axis=0), **look, lw=1.6, marker="o", ms=3, label=name)
        ax.set_xlabel(label)
    axes[0].set_ylabel("evaluation accuracy, median")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(rows)))
    return figure


def class_counts(setting: StudySetting) -> Figure | None:
    """Draw the rows of a class in a shard, a box per member: minimum, quartiles and maximum over classes and workers.

    Whiskers that the paper has for most workers with random shards are drawn beside the box of random. Returns None if no
    counts were recorded."""
    rows = [(name, counts) for name, m in setting.members.items() if (counts := _class_counts(m)) is not None]
    if not rows:
        return None
    figure, (ax,) = canvas(0.9 + 0.36 * len(rows))
    boxes = [_box(counts) for _, counts in rows]
    # The boxes lie, so that long names of members can stand beside them.
    ax.bxp(boxes, positions=range(len(rows)), orientation="horizontal", widths=0.5, medianprops={"color": "black"})
    printed = published_of(setting.dataset)
    names = [name for name, _ in rows]
    if printed and printed.whiskers and "random" in names:
        look = {"color": PALETTE[3], "lw": 1.5, "ms": 7, "label": "published whiskers of most workers, random"}
        ax.plot(printed.whiskers, [names.index("random") + 0.38] * 2, "|-", **look)
        ax.legend(**ABOVE)
    name_rows(ax, names)
    ax.set_xlabel("rows of one class in one shard")
    return figure


def shard_counts(setting: StudySetting, baseline: str) -> Figure | None:
    """Draw the rows of a class in each shard, a box per shard over classes, of the first three runs of the baseline.

    As figure 7 of the paper, a panel per run. Returns None if no run of the baseline has recorded them, as in ledgers of
    earlier versions and for more than 64 shards."""
    member = setting.members.get(baseline)
    records = [record for record in member.records if "shard_counts" in record["sharding"]] if member else []
    if not records:
        return None
    figure, axes = canvas(2.6, columns=min(PANELS, len(records)), sharey=True)
    # There may be more records than panels.
    for ax, record in zip(axes, records, strict=False):
        boxes = [_box(counts) for counts in record["sharding"]["shard_counts"]]
        ax.bxp(boxes, positions=range(len(boxes)), widths=0.6, medianprops={"color": "black"}, manage_ticks=False)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.set_title(f"{baseline}, seed {record['run'].rpartition('/')[2]}", fontsize=9)
        ax.set_xlabel("worker")
    axes[0].set_ylabel("rows of one class")
    return figure


def quality(setting: StudySetting) -> Figure | None:
    """Draw each run's distance from its member's median final accuracy over the unevenness of its shards.

    Two panels, one per measure of shards on the horizontal axis: MMD2 relative to a random split, and chi-square of
    classes. They share the vertical axis, the distance in percentage points. A dot is a run; its colour is its member.
    Returns None if no member has both a final accuracy and a known MMD2."""
    rows = [
        (name, m)
        for name, m in setting.members.items()
        if PRIMARY in m.summaries and not math.isnan(m.quality["mmd_ratio"])
    ]
    if not rows:
        return None
    figure, axes = canvas(3.4, columns=2, sharey=True)
    for ax, (key, label) in zip(axes, QUALITIES_IN_FULL.items(), strict=True):
        values: list[float] = []
        for (name, member), colour in zip(rows, _colours(len(rows)), strict=True):
            finished = [record for record in member.records if record[PRIMARY] is not None]
            accuracy = np.array([record[PRIMARY] for record in finished])
            measured = [record["sharding"].get(key) for record in finished]
            values += [value for value in measured if value]
            ax.plot(
                measured,
                100 * np.abs(accuracy - np.median(accuracy)),
                "o",
                ms=3.5,
                alpha=0.6,
                color=colour,
                mec="none",
                label=name,
            )
        if values and max(values) > DECADE * min(values):  # otherwise a log scale would have a single tick
            ax.set_xscale("symlog", linthresh=0.1 if key == "mmd_ratio" else 1)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel(label)
    axes[0].set_ylabel("distance from the median in points")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(rows)))
    return figure


def staleness(setting: StudySetting) -> Figure | None:
    """Draw the mean staleness and training time of every member; None if no run ended with a model."""
    rows = [(name, m) for name, m in setting.members.items() if not math.isnan(m.staleness)]
    if not rows:
        return None
    figure, axes = canvas(0.9 + 0.36 * len(rows), columns=2, sharey=True)
    for ax, values, label in (
        (axes[0], [m.staleness for _, m in rows], "mean staleness in updates"),
        (axes[1], [m.seconds for _, m in rows], "mean training time in seconds"),
    ):
        ax.barh(range(len(rows)), values, color=_colours(len(rows)), height=0.6)
        ax.set_xlabel(label)
        name_rows(ax, [name for name, _ in rows])
    return figure


def _box(counts: Sequence[float]) -> dict[str, Any]:
    """Return a box of minimum, quartiles and maximum; the ledger lacks the counts from which boxplot computes them."""
    return dict(zip(("whislo", "q1", "med", "q3", "whishi"), counts, strict=True)) | {"fliers": []}


def _colours(count: int) -> list[str]:
    return [PALETTE[at % len(PALETTE)] for at in range(count)]


def _costs(member: ComparisonSide, key: str) -> list[float]:
    """Return the mean cost up to each evaluation over a member's runs; empty if a run lacks it, as in older ledgers."""
    curves = [record["curve"] for record in member.records if record["failed"] is None]
    if not curves or any(key not in curve for curve in curves):
        return []
    return [sum(values) / len(values) for values in zip(*(curve[key] for curve in curves), strict=True)]


def _class_counts(member: ComparisonSide) -> list[float] | None:
    """Return minimum, quartiles and maximum of the rows of one class in one shard; None if they were not recorded.

    Minimum and maximum are over all runs of the member, quartiles are means over its runs."""
    counts = [record["sharding"]["class_counts"] for record in member.records if "class_counts" in record["sharding"]]
    if not counts:
        return None
    table = np.array(counts)
    return [float(table[:, 0].min()), *table[:, 1:4].mean(axis=0).tolist(), float(table[:, 4].max())]


def _spread_band(curves: Curves) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of each epoch's standard deviation, assuming normal values: two arrays [epochs]."""
    ends: list[Interval] = [summarise(column).sd_interval for column in curves.accuracy.T.tolist()]
    return np.array([end.low for end in ends]), np.array([end.high for end in ends])


def _drawable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _wrapped(name: str) -> str:
    return name.replace("-", "-\n", 1) if len(name) > 14 else name
