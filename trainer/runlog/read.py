"""A run's log read back without what a roll-back took away."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoints.generations import Generations
from trainer.home.place import Place
from trainer.runlog.events import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

Event = dict[str, Any]
NAMES = COLUMNS.split(",")
INTEGERS = [name for name in NAMES if name not in ("loss", "seconds", "step_s", "read_s")]


def read_events(path: Place) -> list[Event]:
    """The events of metrics.jsonl as they came, those since taken back too; an absent file has none.

    A line that a full disk or a killed process cut off is left out, without losing the one that may follow it."""
    try:
        lines = path.read_bytes().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := parse_event(line)) is not None]


# The events that take back what is of later versions, and what they call the version that the run goes on from.
CUTS = {"start": "resumed_from", "rollback": "to_version", "generation": "version"}


class Surviving:
    """The events that still count, as they come: going back to a version (or starting again) voids all of later versions.

    One that names its generation may come late: it is void, too, if a later generation began before its version."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._generations = Generations()

    def add(self, event: Event) -> None:
        if event["event"] in CUTS:
            back_to = event.get(CUTS[event["event"]]) or 0
            self.events = [earlier for earlier in self.events if earlier.get("version", 0) <= back_to]
        if event["event"] == "generation":
            self._generations = self._generations.begin(event["generation"], event["version"])
        elif not self._generations.count(event.get("generation", self._generations.latest), event.get("version", 0)):
            return
        self.events.append(event)


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events that still count."""
    found = Surviving()
    for event in events:
        found.add(event)
    return found.events


def evaluations(events: Iterable[Event]) -> list[Event]:
    """The evaluations that still count, by version."""
    return evaluations_of(surviving(events))


def evaluations_of(live: Iterable[Event]) -> list[Event]:
    """The same of the events that still count."""
    return sorted((event for event in live if event["event"] == "eval"), key=lambda event: int(event["version"]))


def best(evaluated: Iterable[Event]) -> Event | None:
    """The evaluation of the highest accuracy, the earliest of equals."""
    return max(evaluated, key=lambda event: event.get("accuracy") or 0.0, default=None)


def read_pushes(path: Place) -> pd.DataFrame:
    """The pushes that still count, one a row, columns as in the file: a generation that begins at version v voids all
    rows of earlier ones from v on. Rows cut off by a crash are left out. About 1.5 s and 0.2 GB for a million."""
    import pandas as pd  # half a second, which the processes of a run do without

    try:
        source = path if isinstance(path, Path) else BytesIO(path.read_bytes())
        frame = pd.read_csv(source, names=NAMES, header=None, skiprows=1, on_bad_lines="skip", index_col=False)
    except FileNotFoundError:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in NAMES})
    frame = frame.apply(pd.to_numeric, errors="coerce").dropna(subset=[*INTEGERS, "seconds"])
    return _without_void(frame.astype(dict.fromkeys(INTEGERS, "int64"))).reset_index(drop=True)


def parse_event(line: str) -> Event | None:
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
