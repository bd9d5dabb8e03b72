"""A run's log over time and by worker: arrays for the figures of a report, and rows for its tables.

``events`` are the events of metrics.jsonl, ``live`` the ones left by ``surviving_events``, and ``pushes`` is the result
of ``read_pushes``, both in trainer.runlog.read. Legend: T ``train`` events, W workers, B time bins. NaN means unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from pipeline.core.arrays import Floats
from trainer.report import figures
from trainer.report.figures import Curve, Mark
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent, StageEvent, StartEvent, WarningEvent
from trainer.runlog.kinds.training import EpochEvent, TrainEvent

E = TypeVar("E", bound=LogEvent)
STEPS_A_BIN = 6  # per worker, on average; with fewer its throughput flickers between 0 and twice the true value
BINS = 100
ROWS_AT_ONCE = 1 << 20  # pushes; temporary arrays over all pushes would take many times their memory


class Incident(NamedTuple):
    """A restart, roll-back or warning, with the progress at that time: seconds of training and global epoch."""

    event: RestartEvent | RollbackEvent | WarningEvent
    seconds: float
    epoch: float


def select_kind(events: Iterable[LogEvent], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def column(events: Sequence[LogEvent], key: str) -> Floats:
    """Return one value per event, NaN if the event has none."""
    return np.array([getattr(event, key) for event in events], dtype=np.float64)


def incidents(live: Iterable[LogEvent]) -> list[Incident]:
    """Return the incidents in order, each with the progress of the last ``train`` event before it, 0 if there is none.

    live: the events of metrics.jsonl that no roll-back or restart has made void (see ``surviving_events``)."""
    result = []
    seconds = 0.0
    epoch = 0.0
    for event in live:
        if isinstance(event, TrainEvent):
            seconds = event.seconds
            epoch = event.epoch
        elif isinstance(event, RestartEvent | RollbackEvent | WarningEvent):
            result.append(Incident(event, seconds, epoch))
    return result


def marks(happened: Iterable[Incident], axis: str) -> list[Mark]:
    """Return restarts and roll-backs on an axis, seconds or epoch."""
    return [
        Mark("restart" if isinstance(incident.event, RestartEvent) else "rollback", getattr(incident, axis))
        for incident in happened
        if not isinstance(incident.event, WarningEvent)
    ]


def switch_marks(live: Iterable[LogEvent], axis: str) -> list[Mark]:
    """Return the begins of all stages but the first, on an axis, seconds or epoch. live: the events that count."""
    return [Mark("switch", getattr(event, axis)) for event in select_kind(live, StageEvent) if event.version]


def curves(live: Sequence[LogEvent], axis: str, value: str) -> list[Curve]:
    """Return the curves of loss or accuracy, of every source that has values.

    Args:
        live: the events that count.
        axis: "seconds" or "epoch", the horizontal axis.
        value: "loss" or "accuracy".
    """
    evaluated = (EvaluationEvent, f"train_{value}"), (EvaluationEvent, value)
    sources: tuple[tuple[type[LogEvent], str], ...] = ((TrainEvent, value), (EpochEvent, value), *evaluated)
    result = []
    for name, (kind, key) in zip(figures.CURVE_LOOKS, sources, strict=True):
        events = select_kind(live, kind)
        points = np.stack([column(events, axis), column(events, key)])
        points = points[:, np.argsort(points[0], kind="stable")]
        if np.isfinite(points[1]).any():
            result.append(Curve(name, *points))
    return result


def present_workers(events: Sequence[LogEvent], num_workers: int) -> dict[int, int]:
    """Return the number of workers at each ``train`` event, by the event's identity. A resume may change it.

    num_workers: for logs whose starts do not tell it."""
    counts = {}
    for event in events:
        if isinstance(event, StartEvent) and event.plan is not None:
            num_workers = event.plan.get("num_workers", num_workers)
        elif isinstance(event, TrainEvent):
            counts[id(event)] = num_workers
    return counts


def clock_table(trains: Sequence[TrainEvent], num_workers: int, present: Sequence[int]) -> Floats:
    """Return clocks [T, W] at ``train`` events. A worker that an event does not contain keeps its clock.

    NaN for workers that a resume has added or removed, before their first step and after they have left.

    Args:
        trains: the events.
        num_workers: the most workers that the run has had.
        present: number of workers at each event.
    """
    table = np.full((len(trains), num_workers), np.nan)
    for row, event in enumerate(trains):
        for worker in event.workers:
            if worker["index"] < num_workers:
                table[row, worker["index"]] = worker["clock"]
    # A clock is carried on only as long as a worker is there, which may leave and come back: infinity stops it.
    is_there = np.arange(num_workers) < np.asarray(present)[:, None]
    clocks: Floats = pd.DataFrame(np.where(is_there, table, np.inf)).ffill().fillna(0).to_numpy(copy=True)
    clocks[np.isinf(clocks)] = np.nan
    return clocks


def throughput_table(pushes: pd.DataFrame, num_workers: int) -> tuple[Floats, Floats]:
    """Return the edges of time bins in seconds, [B + 1], and images per second by worker and bin, [W, B].

    Images of rejected pushes count too. There are at most BINS bins, and fewer for a short run, so that each has about
    STEPS_A_BIN pushes per worker; B is 0 if there are not enough pushes for one."""
    bins = min(BINS, len(pushes) // (STEPS_A_BIN * max(1, num_workers)))
    edges = np.linspace(0, max(pushes["seconds"].max(), 1e-3) if bins else 0, bins + 1)
    if not bins:
        return edges, np.empty((num_workers, 0))
    images = np.zeros(num_workers * bins)
    for first in range(0, len(pushes), ROWS_AT_ONCE):
        part = pushes.iloc[first : first + ROWS_AT_ONCE]
        at = np.clip(np.searchsorted(edges, part["seconds"], side="right") - 1, 0, bins - 1)
        cells = part["worker"].to_numpy(np.int64) * bins + at
        images += np.bincount(cells, weights=part["examples"], minlength=num_workers * bins)
    return edges, images.reshape(num_workers, bins) / (edges[1] - edges[0])


def staleness_spread(accepted: pd.DataFrame, num_workers: int) -> Floats:
    """Return the quantiles ``figures.SPREAD`` of each worker's staleness, [W, 5]; NaN for workers without updates."""
    workers = accepted["worker"].to_numpy()
    # Sorted by worker, each worker's rows are one slice; a mask per worker would cost O(workers x pushes).
    order = np.argsort(workers, kind="stable")
    staleness = accepted["staleness"].to_numpy()[order]
    ends = np.cumsum(np.bincount(workers, minlength=num_workers))
    spread = np.full((num_workers, len(figures.SPREAD)), np.nan)
    for worker in range(num_workers):
        of_worker = staleness[ends[worker - 1] if worker else 0 : ends[worker]]
        if len(of_worker):
            spread[worker] = np.quantile(of_worker, figures.SPREAD)
    return spread


def worker_rows(events: Sequence[LogEvent], pushes: pd.DataFrame, num_workers: int) -> list[dict[str, Any]]:
    """Return a row per worker for the report's table. Values that are not known are None.

    images, staleness_mean, staleness_max and loss are of accepted pushes, where loss is the mean over the pushes that
    have one. accepted and rejected are numbers of pushes. step_s is the median time of a step in seconds.

    Args:
        events: the events that count.
        pushes: the pushes that count.
        num_workers: number of rows to return.
    """
    restarts = Counter(event.index for event in select_kind(events, RestartEvent) if event.role == "worker")
    accepted, images, stale, pushes_with_loss, loss_sums = np.zeros((5, num_workers))
    pushes_by_worker, stalest = np.zeros((2, num_workers), np.int64)
    # All sums by worker are gathered in one pass over bounded parts of the pushes.
    for first in range(0, len(pushes), ROWS_AT_ONCE):
        part = pushes.iloc[first : first + ROWS_AT_ONCE]
        pushes_by_worker += np.bincount(part["worker"], minlength=num_workers)
        part = part[part["accepted"] == 1]
        workers = part["worker"].to_numpy()
        accepted += np.bincount(workers, minlength=num_workers)
        images += np.bincount(workers, weights=part["examples"], minlength=num_workers)
        stale += np.bincount(workers, weights=part["staleness"], minlength=num_workers)
        np.maximum.at(stalest, workers, part["staleness"].to_numpy())
        has_loss = part["loss"].notna().to_numpy()
        pushes_with_loss += np.bincount(workers[has_loss], minlength=num_workers)
        loss_sums += np.bincount(workers[has_loss], weights=part["loss"].to_numpy()[has_loss], minlength=num_workers)
    steps = step_seconds(select_kind(events, TrainEvent))
    return [
        {
            "images": int(images[worker]) if accepted[worker] else None,
            "staleness_mean": float(stale[worker] / accepted[worker]) if accepted[worker] else None,
            "staleness_max": int(stalest[worker]) if accepted[worker] else None,
            "loss": float(loss_sums[worker] / pushes_with_loss[worker]) if pushes_with_loss[worker] else None,
            "worker": worker,
            "accepted": int(accepted[worker]),
            "rejected": int(pushes_by_worker[worker] - accepted[worker]),
            "step_s": steps.get(worker),
            "restarts": restarts[worker],
        }
        for worker in range(num_workers)
    ]


def step_seconds(trains: Sequence[TrainEvent]) -> dict[int, float]:
    """Return each worker's median computing seconds per step, over evenly chosen ``train`` events."""
    sample = [trains[at] for at in figures.evenly(len(trains))]
    steps = [(worker["index"], worker["step_s"]) for event in sample for worker in event.workers]
    medians = pd.DataFrame(steps, columns=["worker", "step_s"]).groupby("worker")["step_s"].median()
    return {int(worker): float(seconds) for worker, seconds in medians.items()}
