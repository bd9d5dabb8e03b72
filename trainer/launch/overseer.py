"""Who started a host's part of a run: it is told how the run goes, and says when the part is to end."""

from __future__ import annotations

from typing import Literal, Protocol

from trainer.report.progress import ProgressLine, Status

# Go on; leave a checkpoint and end; end at once, because others go on, or all is done.
Wanted = Literal["go", "checkpoint", "leave"]


class Overseer(Protocol):
    def wanted(self) -> Wanted:
        """Cheap: asked several times a second."""

    def update(self, status: Status) -> None: ...

    def message(self, text: str) -> None:
        """A line for people, which stays."""

    def close(self) -> None: ...


class Terminal(ProgressLine):
    """A person, or a scheduler, at this process. What they want comes by signals (see ``interruptible``)."""

    def wanted(self) -> Wanted:
        return "go"
