"""The events of a run that is still going."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.home.folders import Folders
from trainer.home.segments import look
from trainer.run_files import METRICS, SEGMENTS
from trainer.runlog.read import Event, parse_event, read_events


class EventTail:
    """The events that were added to a growing metrics.jsonl, since now or from its beginning."""

    def __init__(self, path: Path, *, from_beginning: bool = False) -> None:
        self.path, self.offset = path, path.stat().st_size if path.exists() and not from_beginning else 0

    def new(self) -> Iterator[Event]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole_lines = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole_lines)
        for line in whole_lines.decode(errors="replace").split("\n"):
            if (event := parse_event(line)) is not None:
                yield event


class HomeTail:
    """The events of a whole run, from its beginning, on a host that does not lead it: those that the leading host has copied
    to the home, and this host's own. One listing a look."""

    def __init__(self, folders: Folders) -> None:
        self.home, self.own = folders.home, EventTail(folders.work / METRICS, from_beginning=True)
        self._seen: set[str] | None = None

    def new(self) -> Iterator[Event]:
        """Raises OSError."""
        log = look(self.home)
        if self._seen is None:
            self._seen = set()
            yield from read_events(self.home / METRICS)
        for part in log.of_leaders(METRICS):
            if part.name not in self._seen:
                lines = (self.home / SEGMENTS / part.name).read_bytes().decode(errors="replace").split("\n")
                self._seen.add(part.name)
                yield from (event for line in lines if (event := parse_event(line)) is not None)
        yield from self.own.new()


def tail_of(folders: Folders) -> EventTail | HomeTail:
    """The run's events from its beginning, for a process of any host."""
    return EventTail(folders.work / METRICS, from_beginning=True) if folders.leads else HomeTail(folders)
