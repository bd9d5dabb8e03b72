"""The events of a run that is still going."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.runlog.read import Event, parse_event


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
