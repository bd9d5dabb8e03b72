"""The events of a run that is still training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from trainer.home.folders import Folders
from trainer.home.place import BLOCK_BYTES, line_blocks
from trainer.home.segments import list_segments, unread
from trainer.run_files import METRICS
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.read import events_in, iter_events


class EventTail:
    """The new events of a growing metrics.jsonl.

    from_beginning: whether the events that are already there count as new."""

    def __init__(self, path: Path, *, from_beginning: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() and not from_beginning else 0

    def new(self) -> Iterator[LogEvent]:
        """Yield the new events whose lines are complete; one piece of the file is in memory at a time."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for block in line_blocks(iter(lambda: file.read(BLOCK_BYTES), b"")):
                if not block.endswith(b"\n"):
                    return
                self.offset += len(block)
                yield from events_in(block)


class HomeTail:
    """The events of a run from its beginning, on a host that does not lead it.

    They are those that the leading host has copied to the home, and this host's own. One listing per call of
    ``new``."""

    def __init__(self, folders: Folders) -> None:
        self.home = folders.home
        self.own = EventTail(folders.work / METRICS, from_beginning=True)
        self._num_events = 0  # of the home's metrics.jsonl that were yielded
        self._offsets: dict[str, int] | None = None  # None until that file is read to its end

    def new(self) -> Iterator[LogEvent]:
        """Yield the new events. Raises OSError."""
        listing = list_segments(self.home)
        if self._offsets is None:
            # After an error the next call continues with the first event that was not yielded.
            for event in islice(iter_events(self.home / METRICS), self._num_events, None):
                self._num_events += 1
                yield event
            self._offsets = {}
        for data in unread(self.home, listing.leader_segments(METRICS), self._offsets):
            yield from events_in(data)
        yield from self.own.new()


def tail_of(folders: Folders) -> EventTail | HomeTail:
    """Return the events of a run from its beginning, for a process on any host."""
    return EventTail(folders.work / METRICS, from_beginning=True) if folders.leads else HomeTail(folders)
