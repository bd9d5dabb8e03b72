"""The log of a run: metrics.jsonl, one event per line, and pushes.csv, one pushed gradient per line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from trainer.coordination.orders import Record
from trainer.run_files import METRICS, PUSHES
from trainer.runlog.kinds.parse import KINDS
from trainer.runlog.lines import RefusedLines

COLUMNS = (
    "generation,version,worker,clock,version_pulled,staleness,examples,loss,correct,seconds,accepted,step_s,read_s"
)

REFUSED = RefusedLines()  # of the logs that this process writes


def append(path: Path, data: str) -> None:
    """Append lines to a file in one write, so that lines of several processes never mix.

    A full disk does not fail the run: the lines are written with later ones, and the error is a warning on stderr."""
    REFUSED.append(path, data.encode())


def write_refused_lines(root: Path) -> None:
    """Write the lines of a run's log that a full disk has refused so far. Raises OSError if it still does.

    root: the folder of the log."""
    REFUSED.write(root)


# The clock of logged events, in seconds since 1970. A simulation sets its own.
CLOCK: ContextVar[Callable[[], float]] = ContextVar("CLOCK", default=time.time)


def log_event(root: Path, event: str, **values: Any) -> None:
    """Append an event with its ``time`` (seconds since 1970). NaN and infinities become null.

    Raises TypeError if ``values`` are not the fields of the event's kind in trainer.runlog.kinds."""
    if event in KINDS:
        KINDS[event](**values)
    line = {"event": event, "time": round(CLOCK.get()(), 3)} | {key: _plain(value) for key, value in values.items()}
    append(root / METRICS, json.dumps(line, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Return a value in plain JSON: NaN and infinities become None, keys text, and tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def log_pushes(root: Path, generation: int, pushes: Iterable[tuple[float, Record]]) -> None:
    """Append pushed gradients to pushes.csv, and the header if the file is new.

    Each comes with the training time in seconds at which it was used."""
    lines = [_line(generation, seconds, record) for seconds, record in pushes]
    if not lines:
        return
    path = root / PUSHES
    if not REFUSED.has(path) and not (path.exists() and path.stat().st_size):
        lines.insert(0, COLUMNS + "\n")
    append(path, "".join(lines))


def _line(generation: int, seconds: float, record: Record) -> str:
    """Return the line of a push in pushes.csv, in the order of COLUMNS."""
    step = record.measured
    return (
        f"{generation},{record.version},{record.worker},{record.clock},{record.version_pulled},{record.staleness},"
        f"{step.examples},{step.loss:.6g},{step.correct},{seconds:.3f},{int(record.accepted)},"
        f"{step.seconds:.6f},{step.read_s:.6f}\n"
    )
