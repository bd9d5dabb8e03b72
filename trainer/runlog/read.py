"""A run's log read back without what a roll-back took away."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.runlog.events import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

Event = dict[str, Any]
NAMES = COLUMNS.split(",")
INTEGERS = [name for name in NAMES if name not in ("loss", "seconds", "step_s", "read_s")]


def read_events(path: Path) -> list[Event]:
    """The events of metrics.jsonl as they came, those since taken back too; an absent file has none.

    A line that a full disk or a killed process cut off is left out, without losing the one that may follow it."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [event for line in lines if (event := _parse(line)) is not None]


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events that still count: going back to a version (or starting again) voids all of later versions."""
    kept: list[Event] = []
    for event in events:
        if event["event"] in ("rollback", "start"):
            back_to = event.get("to_version" if event["event"] == "rollback" else "resumed_from") or 0
            kept = [earlier for earlier in kept if earlier.get("version", 0) <= back_to]
        kept.append(event)
    return kept


def evaluations(events: Iterable[Event]) -> list[Event]:
    """The evaluations that still count, by version."""
    return sorted((e for e in surviving(events) if e["event"] == "eval"), key=lambda e: int(e["version"]))


def best(evaluated: Iterable[Event]) -> Event | None:
    """The evaluation of the highest accuracy, the earliest of equals."""
    return max(evaluated, key=lambda event: event.get("accuracy") or 0.0, default=None)


def read_pushes(path: Path) -> pd.DataFrame:
    """The pushes that still count, one a row, columns as in the file: a generation that begins at version v voids all
    rows of earlier ones from v on. Rows cut off by a crash are left out. About 1.5 s and 0.2 GB for a million."""
    import pandas as pd  # half a second, which the processes of a run do without

    if not path.exists():
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in NAMES})
    frame = pd.read_csv(path, names=NAMES, header=None, skiprows=1, on_bad_lines="skip", index_col=False)
    frame = frame.apply(pd.to_numeric, errors="coerce").dropna(subset=[*INTEGERS, "seconds"])
    return _without_void(frame.astype(dict.fromkeys(INTEGERS, "int64"))).reset_index(drop=True)


def _parse(line: str) -> Event | None:
    """The event of a line, or the last whole one if it was appended to a torn one."""
    for text in (line, line[max(line.rfind('{"event"'), 0) :]):
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            return event
    return None


def _without_void(frame: pd.DataFrame) -> pd.DataFrame:
    first = frame[frame["accepted"] == 1].groupby("generation")["version"].min()
    generations = np.sort(frame["generation"].unique())
    begins = first.reindex(generations, fill_value=np.iinfo(np.int64).max).to_numpy()
    until = np.minimum.accumulate(begins[::-1])[::-1]  # the least begin of a generation and all later ones
    limits = np.append(until[1:], np.iinfo(np.int64).max)
    return frame[frame["version"].to_numpy() < limits[np.searchsorted(generations, frame["generation"])]]
