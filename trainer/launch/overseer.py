"""The overseer of a host's part of a run: receives its progress, and decides when the part ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from trainer.report.progress import ProgressLine
from trainer.transport.status import RunStatus

# go: continue; checkpoint: write a checkpoint and end; change: the same, and the run continues at once with other workers;
# leave: end at once, because others continue, or all is done.
Wanted = Literal["go", "checkpoint", "change", "leave"]


class Overseer(Protocol):
    """The interface by which a supervisor reports progress and learns when its part ends."""

    def wanted(self) -> Wanted:
        """Return the wanted action. Must be cheap: called several times per second."""

    def update(self, status: RunStatus) -> None: ...

    def message(self, text: str) -> None:
        """Print a message on its own line, unlike the progress, which is overwritten."""

    def close(self) -> None: ...


class Terminal(ProgressLine):
    """The overseer of a part that was started by hand or by a scheduler: the terminal.

    Requests to end come as signals (see ``interruptible``).

    Args:
        quiet: show nothing.
        is_to_change: returns whether the run should stop in order to continue with other workers.
    """

    def __init__(self, *, quiet: bool, is_to_change: Callable[[], bool] = lambda: False) -> None:
        super().__init__(quiet=quiet)
        self._is_to_change = is_to_change

    def wanted(self) -> Wanted:
        return "change" if self._is_to_change() else "go"
