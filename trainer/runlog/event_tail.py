"""The events of a run that is still going."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class EventTail:
    """The events that were added to a growing metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole_lines = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole_lines)
        for line in whole_lines.splitlines():
            with suppress(ValueError):
                yield json.loads(line)
