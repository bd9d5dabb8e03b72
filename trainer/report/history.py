"""What a run's log holds over time and by worker: arrays for the figures of a report and rows for its tables.

events are those of metrics.jsonl, live ones what ``result.surviving`` left of them; pushes as ``result.read_pushes`` gives
them. Legend: T ``train`` events, W workers, B time bins. NaN means "not known"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trainer.report import figures
from trainer.report.figures import Curve, Floats, Mark
from trainer.runlog.read import Event

STEPS_A_BIN = 6  # of a worker, on average: with fewer, its throughput over time flickers between nothing and twice
BINS = 100
ROWS_AT_ONCE = 1 << 20  # of pushes: what is computed of all at once takes many times their memory


class Incident(NamedTuple):
    """A restart, a roll-back or a warning, and where training stood: seconds of training and global epoch."""

    event: Event
    seconds: float
    epoch: float


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def column(events: Sequence[Event], key: str) -> Floats:
    """One value an event; NaN where it has none."""
    return np.array([event.get(key) for event in events], dtype=np.float64)


def incidents(live: Iterable[Event]) -> list[Incident]:
    """In order, each where training stood when it was last measured before it."""
    found, seconds, epoch = [], 0.0, 0.0
    for event in live:
        if event["event"] == "train":
            seconds, epoch = event["seconds"], event["epoch"]
        elif event["event"] in ("restart", "rollback", "warning"):
            found.append(Incident(event, seconds, epoch))
    return found


def marks(happened: Iterable[Incident], axis: str) -> list[Mark]:
    """Restarts and roll-backs on an axis: seconds or epoch."""
    return [Mark(i.event["event"], getattr(i, axis)) for i in happened if i.event["event"] != "warning"]


def curves(live: Sequence[Event], axis: str, value: str) -> list[Curve]:
    """Loss or accuracy over seconds or epoch, from every source that has any."""
    sources = (("train", value), ("epoch", value), ("eval", f"train_{value}"), ("eval", value))
    found = []
    for name, (kind, key) in zip(figures.CURVE_LOOKS, sources, strict=True):
        events = of_kind(live, kind)
        points = np.stack([column(events, axis), column(events, key)])
        points = points[:, np.argsort(points[0], kind="stable")]
        if np.isfinite(points[1]).any():
            found.append(Curve(name, *points))
    return found


def clock_table(trains: Sequence[Event], num_workers: int) -> Floats:
    """Clocks [T, W] at some evenly chosen ``train`` events; a worker that is not in one has not moved."""
    table = np.full((len(trains), num_workers), np.nan)
    for row, event in enumerate(trains):
        for worker in event["workers"]:
            if worker["index"] < num_workers:
                table[row, worker["index"]] = worker["clock"]
    filled: Floats = pd.DataFrame(table).ffill().fillna(0).to_numpy()
    return filled


def throughput_table(pushes: pd.DataFrame, num_workers: int) -> tuple[Floats, Floats]:
    """Edges [B + 1] in seconds and images a second [W, B], rejected mini-batches too; B may be 0. O(pushes)."""
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
    """``figures.SPREAD`` of each worker's staleness [W, 5]; NaN for one without updates."""
    workers = accepted["worker"].to_numpy()
    order = np.argsort(workers, kind="stable")
    staleness = accepted["staleness"].to_numpy()[order]
    ends = np.cumsum(np.bincount(workers, minlength=num_workers))
    spread = np.full((num_workers, len(figures.SPREAD)), np.nan)
    for worker in range(num_workers):
        mine = staleness[ends[worker - 1] if worker else 0 : ends[worker]]
        if len(mine):
            spread[worker] = np.quantile(mine, figures.SPREAD)
    return spread


def worker_rows(events: Sequence[Event], pushes: pd.DataFrame, num_workers: int) -> list[dict[str, Any]]:
    """What each worker did, for a table; None for what one without pushes has not."""
    restarts = Counter(event["index"] for event in of_kind(events, "restart") if event["role"] == "worker")
    accepted, images, stale, losses, loss_sums = np.zeros((5, num_workers))
    pushed, stalest = np.zeros((2, num_workers), np.int64)
    for first in range(0, len(pushes), ROWS_AT_ONCE):
        part = pushes.iloc[first : first + ROWS_AT_ONCE]
        pushed += np.bincount(part["worker"], minlength=num_workers)
        part = part[part["accepted"] == 1]
        workers = part["worker"].to_numpy()
        accepted += np.bincount(workers, minlength=num_workers)
        images += np.bincount(workers, weights=part["examples"], minlength=num_workers)
        stale += np.bincount(workers, weights=part["staleness"], minlength=num_workers)
        np.maximum.at(stalest, workers, part["staleness"].to_numpy())
        has_loss = part["loss"].notna().to_numpy()
        losses += np.bincount(workers[has_loss], minlength=num_workers)
        loss_sums += np.bincount(workers[has_loss], weights=part["loss"].to_numpy()[has_loss], minlength=num_workers)
    steps = step_seconds(of_kind(events, "train"))
    return [
        {
            "images": int(images[worker]) if accepted[worker] else None,
            "staleness_mean": float(stale[worker] / accepted[worker]) if accepted[worker] else None,
            "staleness_max": int(stalest[worker]) if accepted[worker] else None,
            "loss": float(loss_sums[worker] / losses[worker]) if losses[worker] else None,
            "worker": worker,
            "accepted": int(accepted[worker]),
            "rejected": int(pushed[worker] - accepted[worker]),
            "step_s": steps.get(worker),
            "restarts": restarts[worker],
        }
        for worker in range(num_workers)
    ]


def step_seconds(trains: Sequence[Event]) -> dict[int, float]:
    """Each worker's median of the computing seconds a step, over evenly chosen moments."""
    chosen = [trains[at] for at in figures.evenly(len(trains))]
    steps = [(worker["index"], worker["step_s"]) for event in chosen for worker in event["workers"]]
    medians = pd.DataFrame(steps, columns=["worker", "step_s"]).groupby("worker")["step_s"].median()
    return {int(worker): float(seconds) for worker, seconds in medians.items()}
