"""A comparison of protocols under one profile: throughput, staleness and time to a loss, in a table and a figure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from pipeline.core.atomic import write_durably
from pipeline.core.errors import UsageError
from pipeline.core.reporting.tables import table
from pipeline.core.specs import OPTION, find
from trainer.config import Config, Optimiser
from trainer.context import RunContext
from trainer.options import Options
from trainer.plan import check_shares
from trainer.protocols import PROTOCOLS, Protocol
from trainer.report.progress import number
from trainer.report.terminal import duration
from trainer.runlog.run_folder import resolve_output
from trainer.simulation.options import SimulationSettings
from trainer.simulation.run import drawn_ratios, run_in, size_of

PICTURE = "comparison.png"
TABLE = "comparison.json"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProtocolMeasurements:
    """The measurements of one protocol's simulated run. All times are virtual.

    Attributes:
        label: the protocol, as written after --compare.
        images_per_s: training images per second.
        updates: number of updates.
        refused: number of refused gradients.
        staleness_mean: in versions.
        staleness_max: in versions.
        total_s: seconds of training.
        seconds: float64 [G], times of accepted gradients.
        loss: float64 [G], mean loss of the last N accepted gradients at these times, for N workers.
        to_loss: seconds until ``loss`` is as low as the goal, None if never.
    """

    label: str
    images_per_s: float | None
    updates: int
    refused: int
    staleness_mean: float | None
    staleness_max: int | None
    total_s: float | None
    seconds: Floats
    loss: Floats
    to_loss: float | None = None


def parse_protocols(text: str) -> dict[str, Protocol]:
    """Parse a list such as ``asp,ssp:3,dssp:3:15`` and return the protocols by their text. Raises UsageError.

    Values after a colon are assigned to the protocol's parameters in the order of their definition."""
    protocols: dict[str, Protocol] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, *values = part.split(":")
        kind = find(PROTOCOLS, "--compare", name)
        names = [item.name for item in fields(kind) if OPTION in item.metadata]
        if len(values) > len(names):
            raise UsageError(f"--compare {part}: {name} takes {' and '.join(names) or 'no parameter'}")
        hints = get_type_hints(kind)
        # Parameters without a value keep their defaults.
        protocols[part] = kind(
            **{key: _value(part, value, hints[key]) for key, value in zip(names, values, strict=False)}
        )
    if not protocols:
        raise UsageError("--compare names no protocol: give a list such as asp,bsp,ssp:3")
    return protocols


def _value(part: str, text: str, hint: Any) -> Any:
    """Convert a parameter's text to the type of its field. Raises UsageError. part: the protocol, for the message."""
    if hint in (int, int | None):
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"--compare {part}: {text!r} is no whole number") from None
    return text != "no" if hint is bool else text


def compare(
    config: Config,
    simulated: SimulationSettings,
    protocols: dict[str, Protocol],
    options: Options,
    *,
    optimiser: Optimiser | None = None,
    loss: float | None = None,
) -> list[ProtocolMeasurements]:
    """Simulate each protocol in its own subfolder of the output, and write a table and a figure beside them.

    A finished run in a subfolder is not simulated again. Raises UsageError and JobError.

    Args:
        config: the configuration of all runs, except for the protocol and the folder.
        simulated: the virtual cluster.
        protocols: by label.
        options: quiet and silent apply to the comparison as a whole; the runs themselves print nothing.
        optimiser: as given by the user, without defaults, so that each protocol gets its own default rate and momentum;
            the configuration's if None.
        loss: the goal of "time to loss"; default: the lowest loss that all runs reach.
    """
    output = resolve_output(config.run.output)
    context = RunContext.from_config(config, output)
    num_workers = size_of(context, simulated)[0]
    for protocol in protocols.values():  # before the first run, which may take long
        check_shares(replace(config, protocol=protocol), num_workers, drawn_ratios(context, simulated, num_workers))
    quiet = replace(options, silent=True, quiet=True)
    runs = []
    for label, protocol in protocols.items():
        if not (options.quiet or options.silent):
            print(f"{label} ...", flush=True)
        folder = output / re.sub(r"[^\w.-]", "-", label)
        one = replace(config, optimiser=optimiser or config.optimiser, protocol=protocol)
        one = replace(one, run=replace(config.run, output=str(folder)))
        runs.append(_measure(label, run_in(replace(context, config=one, home=folder), simulated, quiet)))
    goal = loss if loss is not None else _reached_by_all(runs)
    # The default goal depends on all runs, so the time to it is only known now.
    runs = [replace(run, to_loss=_time_to(run, goal)) for run in runs]
    _write(output, runs, goal)
    if not options.silent:
        print(describe(runs, goal))
        print(f"picture: {output / PICTURE}")
    return runs


def _measure(label: str, result: Any) -> ProtocolMeasurements:
    """Return the measurements of a finished run, without the time to a loss.

    Its loss curve is the moving average over as many accepted pushes as there are workers."""
    pushes = result.pushes()
    used = pushes[pushes["accepted"] == 1]
    loss = used["loss"].rolling(result.num_workers).mean().to_numpy()
    is_known = ~np.isnan(loss) & bool(np.nansum(loss))  # all False if no losses were computed: they are all 0 then
    return ProtocolMeasurements(
        label,
        result.images_per_second,
        result.updates,
        result.rejected,
        result.staleness["mean"],
        result.staleness["max"],
        result.seconds,
        used["seconds"].to_numpy()[is_known],
        loss[is_known],
    )


def _reached_by_all(runs: Sequence[ProtocolMeasurements]) -> float | None:
    """Return the lowest loss that every run reaches; None if a run has no losses."""
    if any(not len(run.loss) for run in runs):
        return None
    return float(max(run.loss.min() for run in runs))


def _time_to(run: ProtocolMeasurements, goal: float | None) -> float | None:
    """Return the virtual seconds until the loss is first at most ``goal``; None if it never is, or without a goal."""
    below = np.flatnonzero(run.loss <= (np.nan if goal is None else goal))
    return float(run.seconds[below[0]]) if len(below) else None


def describe(runs: Sequence[ProtocolMeasurements], goal: float | None) -> str:
    """Return the comparison as a text table, a row per protocol. goal: the loss of "time to loss", or None."""
    to_loss = f"s to loss {goal:.4g}" if goal is not None else "s to loss"
    header = ("protocol", "images/s", "updates", "refused", "staleness", "most", "virtual time", to_loss)
    rows = []
    for run in runs:
        rows.append(
            (
                run.label,
                number(run.images_per_s, ",.0f"),
                f"{run.updates:,}",
                f"{run.refused:,}",
                number(run.staleness_mean, ".2f"),
                # A largest staleness of 0 is a measurement, None is not.
                str(run.staleness_max if run.staleness_max is not None else "-"),
                duration(run.total_s),
                number(run.to_loss, ".2f"),
            )
        )
    return table(rows, header, right=range(1, len(header)), indent="  ")


def _write(output: Path, runs: Sequence[ProtocolMeasurements], goal: float | None) -> None:
    """Write the table as JSON and the figure. goal: the loss of "time to loss", None if there is none."""
    output.mkdir(parents=True, exist_ok=True)
    plain = [{name: value for name, value in vars(run).items() if not isinstance(value, np.ndarray)} for run in runs]
    write_durably(output / TABLE, (json.dumps({"loss": goal, "runs": plain}, indent=1) + "\n").encode())
    write_durably(output / PICTURE, _picture(runs, goal))


def _picture(runs: Sequence[ProtocolMeasurements], goal: float | None) -> bytes:
    """Return the figure as PNG: loss over virtual time, throughput, and mean staleness, by protocol."""
    import io

    from pipeline.core.reporting.plots import canvas, number_decades, style
    from trainer.report.figures import thin

    labels = [run.label for run in runs]
    with style():
        figure, (left, middle, right) = canvas(3.2, columns=3)
        colors = [f"C{at}" for at in range(len(runs))]
        for run, color in zip(runs, colors, strict=True):
            left.plot(thin(run.seconds), thin(run.loss), label=run.label, color=color)
        losses = np.concatenate([run.loss for run in runs])
        # Without a loss (--compute none), or with a loss of 0, a log scale is impossible.
        if len(losses) and losses.min() > 0:
            left.set_yscale("log")
        if goal is not None:
            left.axhline(goal, color="#888", lw=0.8, ls=":")
            left.legend()
        if left.get_yscale() == "log":
            number_decades(left.yaxis)
        title = "Loss" if len(losses) else "No loss was computed"
        left.set(xlabel="virtual seconds of training", ylabel="training loss", title=title)
        middle.barh(labels, [run.images_per_s or 0 for run in runs], color=colors)
        middle.set(xlabel="images per virtual second", title="Throughput")
        right.barh(labels, [run.staleness_mean or 0 for run in runs], color=colors)
        right.set(xlabel="mean staleness in updates", title="Staleness")
        for axes in (middle, right):
            axes.invert_yaxis()
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=120)
    return data.getvalue()
