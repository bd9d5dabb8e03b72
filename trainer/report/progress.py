"""The progress of a run on standard error: one line that is rewritten on a terminal, elsewhere an occasional line."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from pipeline.core import console
from trainer.transport.status import RunStatus

LOGGER = "sharding.training"
SILENCE_S = 10.0  # least time between two plain lines
USUAL_SIZE = {"ncols": 120, "nrows": 24}
BAR = "{percentage:3.0f}%|{bar:12}| {elapsed}<{remaining}  {desc}"


def number(value: float | None, form: str) -> str:
    """Return a measured value as text, or a dash if it is missing or not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def length(status: RunStatus) -> str:
    """Return " of E", the length of the run in epochs; "" if unknown."""
    return f" of {status.epochs:.4g}" if status.epochs else ""


def line(status: RunStatus) -> str:
    """Return the state of the run in one line, most important values first: a narrow terminal cuts off the end."""
    parts = [
        f"epoch {status.epoch:.2f}{length(status)}",
        f"loss {number(status.loss, '.4f')}",
        f"accuracy {number(status.accuracy, '.1%')}",
        f"{number(status.images_per_s, ',.0f')} images/s",
        f"staleness {number(status.staleness_mean, '.1f')}",
        f"workers {status.alive}/{status.num_workers}",
    ]
    # Models with real targets have an evaluation loss but no accuracy.
    after = f" after epoch {status.eval_epoch:.4g}" if status.eval_epoch is not None else ""
    if status.eval_accuracy is not None:
        parts.insert(3, f"evaluation {status.eval_accuracy:.1%}{after}")
    elif status.eval_loss is not None:
        parts.insert(3, f"evaluation loss {number(status.eval_loss, '.4f')}{after}")
    return "  ".join(parts)


def size(terminal: TextIO) -> dict[str, Any]:
    """Return tqdm's options for its size.

    Some terminals report 0 x 0, for which tqdm would show nothing, and consoles of development environments have none."""
    try:
        columns, rows = os.get_terminal_size(terminal.fileno())
    except (OSError, ValueError, AttributeError):
        return USUAL_SIZE
    return {"dynamic_ncols": True} if columns and rows else USUAL_SIZE


def is_terminal(file: TextIO | None) -> bool:
    """True if a stream is a terminal. A program may replace standard error by None, or by an object that cannot tell."""
    isatty = getattr(file, "isatty", None)
    return bool(isatty and isatty())


class ProgressLine:
    """A display of ``line(status)`` on standard error: a bar on a terminal, else a plain line about every ten seconds.

    update may be called for every change of the status; it costs about 0.1 ms.

    Args:
        quiet: show nothing.
        file: where to write; standard error by default.
        now: a clock in seconds.
    """

    def __init__(
        self, *, quiet: bool = False, file: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file or sys.stderr
        self._now = now
        self._quiet = quiet or self._file is None
        self._terminal = is_terminal(self._file) and not console.is_json()
        self._bar: Any = None
        self._pending: RunStatus | None = None  # the newest status that has not been printed
        self._begin = now()
        self._next = self._begin  # earliest time of the next plain line

    def update(self, status: RunStatus) -> None:
        """Show a status: at once on a terminal, elsewhere as a line if the last one is old enough."""
        if self._quiet:
            return
        if self._terminal:
            self._draw(status)
            return
        self._pending = status
        if self._now() >= self._next:
            self._say_pending()

    def message(self, text: str) -> None:
        """Print a permanent line, for a restart or a warning."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._file)
        else:
            self._say(text)

    def close(self) -> None:
        """Show the last state permanently. May be called twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._say_pending()

    def _draw(self, status: RunStatus) -> None:
        """Draw the bar with a status. It is created with the first one, which has its total."""
        if self._bar is None:
            # The pushes before a resumption must not count for the speed of this start.
            start = {"initial": status.accepted, "total": status.total, "desc": line(status)}
            self._bar = tqdm(**start, **size(self._file), file=self._file, bar_format=BAR)
        # Set instead of incremented, because a roll-back reduces the number of accepted pushes.
        self._bar.n = status.accepted
        self._bar.set_description_str(line(status))

    def _say_pending(self) -> None:
        if self._pending is not None:
            self._say(line(self._pending), self._pending)
            self._pending = None
            self._next = self._now() + SILENCE_S

    def _say(self, text: str, status: RunStatus | None = None) -> None:
        """Print a line with the time. status: the values of the line in JSON; None for a message."""
        elapsed = self._now() - self._begin
        fields = {"elapsed_s": round(elapsed, 1)} | (status.to_json() if status else {})
        full = f"{console.wall_clock()} [{elapsed:7.1f} s] {text}"
        console.say(LOGGER, text, text=full, file=self._file, fields=fields)
