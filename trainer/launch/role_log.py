"""The lines of a supervisor in the log of a role's process: its starts, with their cause, and its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.core import console


@dataclass(frozen=True)
class RoleLog:
    """The log file of a role. path: the file; role: name of the role."""

    path: Path
    role: str

    def add(self, message: str) -> None:
        """Append a line with the time. A full disk loses lines of a log, but never stops a run."""
        line = f"{console.wall_clock()} {self.role} {message}"
        if console.is_json():
            line = console.json_line("sharding.role", message, level="info", fields={"role": self.role})
        with suppress(OSError), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
