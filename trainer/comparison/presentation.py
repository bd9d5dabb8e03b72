"""The table and the figure of a comparison."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.atomic import write_durably
from pipeline.core.reporting.plots import PALETTE, canvas, number_decades, style
from pipeline.core.reporting.tables import table
from trainer.comparison.measurements import Measurements
from trainer.report.figures import thin
from trainer.report.progress import number
from trainer.report.terminal import duration

PICTURE = "comparison.png"
TABLE = "comparison.json"
LINES = ("-", "--", ":")  # of the contenders that share a colour
ROW_INCHES = 0.19
PANEL_INCHES = 3.2
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


class Goals(NamedTuple):
    """The loss and the evaluation accuracy to which times are measured; None if there is none."""

    loss: float | None
    accuracy: float | None


def describe(runs: Sequence[Measurements], goals: Goals, *, subject: str, clock: str) -> str:
    """Return the comparison as a text table, a row per run. Columns without any value are left out.

    Args:
        runs: the measurements.
        goals: to which times are measured.
        subject: title of the first column.
        clock: title of the column of training times.
    """
    columns: dict[str, Callable[[Measurements], str]] = {
        subject: lambda run: run.label,
        "images/s": lambda run: number(run.images_per_s, ",.0f"),
        "updates": lambda run: f"{run.updates:,}",
        "refused": lambda run: f"{run.refused:,}",
        "staleness": lambda run: number(run.staleness_mean, ".2f"),
        # A largest staleness of 0 is a measurement, None is not.
        "most": lambda run: str(run.staleness_max if run.staleness_max is not None else "-"),
        "sent": lambda run: "-" if run.sent_bytes is None else _size(run.sent_bytes),
        clock: lambda run: duration(run.total_s),
        _goal("s to loss", goals.loss): lambda run: number(run.to_loss, ".2f"),
        _goal("s to accuracy", goals.accuracy): lambda run: number(run.to_accuracy, ".2f"),
        "final loss": lambda run: number(run.final_loss, ".4g"),
        "accuracy": lambda run: number(run.final_accuracy, ".4f"),
        "consensus": lambda run: number(run.consensus, ".3g"),
    }
    cells = {name: [cell(run) for run in runs] for name, cell in columns.items()}
    filled = {name: column for name, column in cells.items() if name.startswith("s to loss") or {*column} != {"-"}}
    return table(list(zip(*filled.values(), strict=True)), tuple(filled), right=range(1, len(filled)), indent="  ")


def _goal(words: str, goal: float | None) -> str:
    return words if goal is None else f"{words} {goal:.4g}"


def _unit(sent_bytes: float) -> tuple[str, float]:
    """Return the largest unit of which there is at least one, and its bytes."""
    return next(((unit, size) for unit, size in UNITS if sent_bytes >= size), UNITS[-1])


def _size(sent_bytes: int) -> str:
    unit, size = _unit(sent_bytes)
    return f"{sent_bytes / size:.3g} {unit}"


def draw(runs: Sequence[Measurements], goals: Goals, *, unit_of_time: str) -> bytes:
    """Return the figure as PNG: curves over training time; throughput, staleness and traffic by run.

    unit_of_time: such as "second" or "virtual second"."""
    labels = [run.label for run in runs]
    line_styles = [
        {"color": PALETTE[at % len(PALETTE)], "ls": LINES[at // len(PALETTE) % len(LINES)]} for at in range(len(runs))
    ]
    unit, size = _unit(max((run.sent_bytes or 0 for run in runs), default=0))
    bars: dict[str, tuple[str, list[float]]] = {
        "Throughput": (f"images per {unit_of_time}", [run.images_per_s or 0 for run in runs]),
        "Staleness": ("mean staleness in updates", [run.staleness_mean or 0 for run in runs]),
        "Traffic": (f"{unit} of gradients and parameters sent", [(run.sent_bytes or 0) / size for run in runs]),
    }
    # Runs of a toy loss have no accuracy, and no panel for it.
    curves = 2 if any(len(run.accuracy) for run in runs) else 1
    columns = curves + len(bars)
    with style():
        figure, axes = canvas(max(3.2, ROW_INCHES * len(runs) + 1.2), columns=columns)
        figure.set_figwidth(PANEL_INCHES * columns)
        handles = _draw_losses(axes[0], runs, line_styles, goals.loss)
        if curves > 1:
            _draw_accuracies(axes[1], runs, line_styles, goals.accuracy)
        for side in axes[:curves]:
            side.set_xlabel(f"{unit_of_time}s of training")
        for side, (title, (label, values)) in zip(axes[curves:], bars.items(), strict=True):
            side.barh(range(len(runs)), values, color=[line_style["color"] for line_style in line_styles])
            side.set(xlabel=label, title=title, yticks=range(len(runs)), yticklabels=labels)
            side.invert_yaxis()
        for side in axes[curves + 1 :]:  # their rows are those of the first bars
            side.set_yticklabels([])
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 8))
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def write_comparison(output: Path, runs: Sequence[Measurements], goals: Goals, *, unit_of_time: str) -> None:
    """Write the table as JSON and the figure to a folder, which is created. unit_of_time: as for ``draw``."""
    output.mkdir(parents=True, exist_ok=True)
    plain = [{name: value for name, value in vars(run).items() if not isinstance(value, np.ndarray)} for run in runs]
    write_durably(output / TABLE, (json.dumps({**goals._asdict(), "runs": plain}, indent=1) + "\n").encode())
    write_durably(output / PICTURE, draw(runs, goals, unit_of_time=unit_of_time))


def _draw_losses(axes: Any, runs: Sequence[Measurements], line_styles: Sequence[Any], goal: float | None) -> list[Any]:
    """Draw the curves of the training loss, and return a handle for each."""
    handles = [
        axes.plot(thin(run.seconds), thin(run.loss), lw=1.2, **line_style)[0]
        for run, line_style in zip(runs, line_styles, strict=True)
    ]
    losses = np.concatenate([run.loss for run in runs])
    # Without a loss (--compute none), or with a loss of 0, a log scale is impossible.
    if len(losses) and losses.min() > 0:
        axes.set_yscale("log")
    if goal is not None:
        axes.axhline(goal, color="#888", lw=0.8, ls=":")
    if axes.get_yscale() == "log":
        number_decades(axes.yaxis)
    title = "Loss" if len(losses) else "No loss was computed"
    axes.set(ylabel="training loss", title=title)
    return handles


def _draw_accuracies(axes: Any, runs: Sequence[Measurements], line_styles: Sequence[Any], goal: float | None) -> None:
    """Draw the curves of evaluation accuracy, and the goal as a dotted line."""
    for run, line_style in zip(runs, line_styles, strict=True):
        axes.plot(run.evaluated_s, run.accuracy, lw=1.2, marker=".", **line_style)
    if goal is not None:
        axes.axhline(goal, color="#888", lw=0.8, ls=":")
    axes.set(ylabel="evaluation accuracy", title="Accuracy")
