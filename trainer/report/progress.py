"""What a person sees while a run trains: one line that is rewritten on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

SILENCE_S = 10.0  # between two plain lines
USUAL_SIZE = {"ncols": 120, "nrows": 24}
BAR = "{percentage:3.0f}%|{bar:12}| {elapsed}<{remaining}  {desc}"

Status = Mapping[str, Any]


def number(value: float | None, form: str) -> str:
    """A measured value, or a dash where there is none yet or it is no number any more."""
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def length(status: Status) -> str:
    """of E, the whole run in epochs. An epoch is so many accepted pushes, so the share that is done gives it."""
    accepted, total = status["accepted"], status["total"]
    return f" of {status['epoch'] * total / accepted:.4g}" if accepted and total else ""


def line(status: Status) -> str:
    """The state of the run in one line, the most asked-for first: a narrow terminal cuts the end off.

    status: accepted and total pushes, epoch, loss, accuracy, images_per_s, staleness_mean, alive and num_workers, and
    eval_accuracy and eval_loss, the last ones; a measured value that does not exist (yet) is None."""
    parts = [
        f"epoch {status['epoch']:.2f}{length(status)}",
        f"loss {number(status['loss'], '.4f')}",
        f"accuracy {number(status['accuracy'], '.1%')}",
        f"{number(status['images_per_s'], ',.0f')} images/s",
        f"staleness {number(status['staleness_mean'], '.1f')}",
        f"workers {status['alive']}/{status['num_workers']}",
    ]
    if status.get("eval_accuracy") is not None:
        parts.insert(3, f"evaluation {status['eval_accuracy']:.1%}")
    elif status.get("eval_loss") is not None:
        parts.insert(3, f"evaluation loss {number(status['eval_loss'], '.4f')}")
    return "  ".join(parts)


def size(terminal: TextIO) -> dict[str, Any]:
    """tqdm's options for the size. Some terminals say that theirs is 0 x 0, where tqdm would show nothing."""
    columns, rows = os.get_terminal_size(terminal.fileno())
    return {"dynamic_ncols": True} if columns and rows else USUAL_SIZE


class ProgressLine:
    """Shows ``line(status)`` on standard error: a bar on a terminal, else a plain line about every ten seconds.

    Call update as often as there is news; it costs some 0.1 ms. now is a clock in seconds."""

    def __init__(
        self, *, quiet: bool = False, file: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._now, self._quiet = file or sys.stderr, now, quiet
        self._terminal = self._file.isatty()
        self._bar: Any = None
        self._unsaid: str | None = None
        self._begin = now()
        self._next = self._begin

    def update(self, status: Status) -> None:
        if self._quiet:
            return
        if self._terminal:
            self._draw(status)
            return
        self._unsaid = line(status)
        if self._now() >= self._next:
            self._say_pending()

    def message(self, text: str) -> None:
        """A line of its own, which stays: a restart, a warning."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=self._file)
        else:
            self._say(text)

    def close(self) -> None:
        """Leave the last state standing. May be called twice."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._say_pending()

    def _draw(self, status: Status) -> None:
        if self._bar is None:
            # A resumed run has done a part already, which must not count as this run's speed.
            start = {"initial": status["accepted"], "total": status["total"], "desc": line(status)}
            self._bar = tqdm(**start, **size(self._file), file=self._file, bar_format=BAR)
        # Set, not added up: a rollback takes accepted pushes back.
        self._bar.n = status["accepted"]
        self._bar.set_description_str(line(status))

    def _say_pending(self) -> None:
        if self._unsaid is not None:
            self._say(self._unsaid)
            self._unsaid, self._next = None, self._now() + SILENCE_S

    def _say(self, text: str) -> None:
        print(f"[{self._now() - self._begin:7.1f} s] {text}", file=self._file, flush=True)
