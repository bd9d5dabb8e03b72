"""The report of a run, finished or not: one HTML file for offline use, made from metrics.jsonl and pushes.csv only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, overload

import numpy as np
import pandas as pd

from pipeline.core.errors import DataError
from pipeline.core.reporting.page import EmbeddedFigure, embed_figure, origin, plain, template
from pipeline.core.reporting.plots import MANY, style
from trainer.home.place import Place, StorePlace, write_whole
from trainer.report import figures
from trainer.report.findings import (
    describe_classes,
    describe_consensus,
    describe_incident,
    describe_neighbourhoods,
    findings,
    headline,
    mixture_rows,
    title,
    weakest_groups,
)
from trainer.report.history import (
    Incident,
    clock_table,
    column,
    curves,
    incidents,
    marks,
    present_workers,
    select_kind,
    staleness_spread,
    switch_marks,
    throughput_table,
    worker_rows,
)
from trainer.report.settings import compact, flags_in_words, plan_in_words
from trainer.run_files import METRICS, PUSHES, REPORT, RESULT
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import ConsensusEvent
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.runlog.read import read_pushes, surviving_events
from trainer.runlog.result import REPORTED, summarise
from trainer.runlog.thinned import thinned_log

MOST_GROUPS = 20  # in the table of classes, and of neighbourhoods
REDRAWS = 3  # most repetitions of a report of a run that ends, or is resumed, while it is drawn
FEWEST_BINS = 4  # a figure over time needs more bins than this


def draw_learning(live: Sequence[LogEvent], happened: Sequence[Incident]) -> dict[str, EmbeddedFigure]:
    """Return figures of loss and accuracy over epochs and over seconds, and of the learning rate, by name."""
    embedded_figures: dict[str, EmbeddedFigure] = {}
    for axis, place in (("epoch", "over epochs"), ("seconds", "over seconds")):
        losses = curves(live, axis, "loss")
        accuracies = curves(live, axis, "accuracy")
        if losses or accuracies:
            # A switch explains a bend of the curves that nothing else does.
            happenings = marks(happened, axis) + switch_marks(live, axis)
            figure = figures.learning_curves(losses, accuracies, happenings, axis)
            subject = " and ".join(["loss"] * bool(losses) + ["accuracy"] * bool(accuracies)).capitalize()
            embedded_figures[place] = embed_figure(figure, f"{subject} {place}")
    trains = select_kind(live, TrainEvent)
    if len(trains) > 1:
        figure = figures.learning_rate(column(trains, "epoch"), column(trains, "learning_rate"))
        embedded_figures["learning rate"] = embed_figure(figure, "Learning rate over epochs")
    return embedded_figures


def draw_consensus(live: Sequence[LogEvent]) -> dict[str, EmbeddedFigure]:
    """Return the figure of an exchange in which every worker has a model of its own; none for other exchanges.

    live: the events that no roll-back has made void."""
    events = select_kind(live, ConsensusEvent)
    if len(events) < 2:
        return {}
    figure = figures.consensus(*(column(events, key) for key in ("epoch", "distance", "sent_bytes")))
    return {"consensus": embed_figure(figure, "Distance of the models from their mean, and data sent, over epochs")}


def draw_confusion(summary: Mapping[str, Any]) -> dict[str, EmbeddedFigure]:
    """Return the figure of correct and wrong predictions; none if they were not counted.

    summary: the content of result.json."""
    counts = summary["confusion"]
    if not counts or len(counts) < 2:
        return {}
    figure = figures.confusion(np.array(counts), summary["class_names"])
    return {"confusion": embed_figure(figure, "Share of the rows of each class that is predicted as each class")}


def draw_speed(live: Sequence[LogEvent], happened: Sequence[Incident]) -> dict[str, EmbeddedFigure]:
    trains = select_kind(live, TrainEvent)
    if len(trains) < 2:
        return {}
    figure = figures.throughput(column(trains, "seconds"), column(trains, "images_per_s"), marks(happened, "seconds"))
    return {"throughput": embed_figure(figure, "Images per second over time")}


def draw_workers(
    live: Sequence[LogEvent], pushes: pd.DataFrame, happened: Sequence[Incident], num_workers: int
) -> dict[str, EmbeddedFigure]:
    """Return the figures that compare workers over time, by name: clocks, and throughput.

    A figure is left out if there are too few ``train`` events, or too few pushes.

    Args:
        live: the events that count.
        pushes: the pushes that count.
        happened: the incidents to mark.
        num_workers: workers of the run.
    """
    embedded_figures: dict[str, EmbeddedFigure] = {}
    trains = [event for event in select_kind(live, TrainEvent) if event.workers]
    trains = [trains[at] for at in figures.evenly(len(trains))]
    if len(trains) > 1:
        plan = select_kind(live, StartEvent)[-1].plan
        present = present_workers(live, num_workers)
        table = clock_table(trains, num_workers, [present[id(event)] for event in trains])
        # The bound of a synchronous protocol is no staleness bound, so it is not drawn.
        bound = None if plan is None or plan["synchronous"] else plan["clock_bound"]
        figure = figures.clocks(column(trains, "seconds"), table, bound, marks(happened, "seconds"))
        embedded_figures["clocks"] = embed_figure(figure, "Clocks of the workers over time")
    edges, images_per_s = throughput_table(pushes, num_workers)
    if len(edges) > FEWEST_BINS:
        figure = figures.worker_throughput(edges, images_per_s)
        embedded_figures["worker throughput"] = embed_figure(figure, "Images per second by worker over time")
    return embedded_figures


def draw_staleness(accepted: pd.DataFrame, num_workers: int) -> dict[str, EmbeddedFigure]:
    if not accepted["staleness"].any():
        return {}
    histogram = np.bincount(accepted["staleness"])
    figure = figures.staleness(histogram, staleness_spread(accepted, num_workers))
    return {"staleness": embed_figure(figure, "Staleness of the updates, in all and by worker")}


def render(events: Sequence[LogEvent], pushes: pd.DataFrame) -> str:
    """Return the report as one HTML page without external links. Takes about 2 s on one core.

    events: at least one ``start``."""
    summary = summarise(events, pushes)
    live = surviving_events(events)
    start = select_kind(events, StartEvent)[-1]
    # A resume may have changed the number of workers.
    plans = [each.plan or {} for each in select_kind(events, StartEvent)]
    num_workers = max(summary["num_workers"], 1, *(plan.get("num_workers", 1) for plan in plans))
    if len(pushes) and pushes["worker"].max() >= num_workers:  # a damaged row can look valid
        pushes = pushes[pushes["worker"] < num_workers]
    happened = incidents(live)
    compute = (start.simulated or {}).get("compute", "real")
    trained = {} if compute == "real" else {"model": f"simulated computation ({compute})"}
    with style():
        embedded_figures = draw_learning(live, happened)
        embedded_figures |= draw_confusion(summary)
        embedded_figures |= draw_consensus(live)
        embedded_figures |= draw_speed(live, happened)
        if num_workers > 1:
            embedded_figures |= draw_workers(live, pushes, happened, num_workers)
        is_accepted = pushes["accepted"].to_numpy() == 1  # selection by pandas takes three times the memory
        accepted = {name: pushes[name].to_numpy()[is_accepted] for name in ("worker", "staleness")}
        embedded_figures |= draw_staleness(pd.DataFrame(accepted, copy=False), num_workers)
    page: str = template("trainer.report", "report.html").render(
        title=title(summary | trained, max(summary["num_workers"], 1)),
        begun=start_sentences(select_kind(events, StartEvent)),
        origin=origin(start.made, start.versions or {}),  # of the last start of a resumed run
        findings=findings(live, summary),
        headline=headline(summary),
        mixture=mixture_rows(summary),
        figures=embedded_figures,
        classes=describe_classes(summary),
        neighbourhoods=describe_neighbourhoods(summary),
        weakest={
            "class": weakest_groups(summary, "class", summary["class_names"]),
            "neighbourhood": weakest_groups(summary, "neighbourhood"),
        },
        max_groups=MOST_GROUPS,
        consensus=describe_consensus(live),
        kinds={incident.event.kind for incident in happened},
        staleness_max=summary["staleness"]["max"],
        workers=worker_rows(live, pushes, num_workers) if len(pushes) else [],
        incidents=[describe_incident(incident) for incident in happened],
        max_table=MANY,
        shards=plain((start.config.get("data") or {}).get("shards")),
        plan=plan_in_words(start.plan),
        derived={key: compact(value) for key, value in (start.plan or {}).items()},
        settings=flags_in_words(start.config, start.simulated or {}),
    )
    return page


def start_sentences(starts: Sequence[StartEvent]) -> str:
    """Return the sentences below the title: the first start and the last one.

    The date of a run in virtual time is in the section "Origin" only."""
    if starts[-1].simulated is not None:
        return "Simulated: all seconds on this page are virtual time."
    sentences = [_start_in_words("Started", starts[0])]
    if len(starts) > 1:
        sentences.append(_start_in_words("Resumed", starts[-1]))
    return " ".join(sentences)


def _start_in_words(verb: str, start: StartEvent) -> str:
    host = start.made.get("host")
    where = f" on host {host}" if host else ""
    return f"{verb} {datetime.fromtimestamp(start.time or 0.0, UTC):%Y-%m-%d %H:%M} UTC{where}."


Read = tuple[list[LogEvent], pd.DataFrame]


@overload
def write_report(output: Path, read: Read | None = None) -> Path: ...
@overload
def write_report(output: StorePlace, read: Read | None = None) -> StorePlace: ...
def write_report(output: Place, read: Read | None = None) -> Place:
    """Write OUTPUT/report.html about the run so far and return its path. Takes seconds for a million pushes.

    Replaces an earlier report atomically. If the run ends meanwhile, its own report may be the one that was replaced, and
    the report is drawn again. Raises DataError if no run was started in OUTPUT, or if its log is damaged.

    read: the events of ``thinned_log`` and the columns ``REPORTED`` of the pushes, if the caller has read them."""
    result = _read_result(output)
    path = _draw_report(output, read)
    for _ in range(REDRAWS if read is None else 0):
        result, before = _read_result(output), result
        if result == before:  # a run writes its result before its report
            break
        path = _draw_report(output, None)
    return path


def _read_result(output: Place) -> bytes | None:
    """Return the content of result.json, or None before the end of the run."""
    try:
        return (output / RESULT).read_bytes()
    except FileNotFoundError:
        return None


def _draw_report(output: Place, read: Read | None) -> Place:
    """Write the report once. See ``write_report``."""
    events, pushes = read or (thinned_log(output / METRICS), None)
    starts = select_kind(events, StartEvent)
    if starts and (not starts[-1].config or starts[-1].versions is None):
        raise DataError(f"{output / METRICS} is damaged: its last start event lacks the run's configuration")
    if not starts:
        raise DataError(
            f"{output / METRICS} contains no run: nothing was trained in this folder, so there is no report"
        )
    path = output / REPORT
    # Only now: reading a million pushes takes seconds.
    if pushes is None:
        pushes = read_pushes(output / PUSHES, REPORTED)
    write_whole(path, render(events, pushes).encode())
    return path
