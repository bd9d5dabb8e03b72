"""Progress, warnings and errors on standard error: lines for people, or JSON for collectors of logs (--log-format).

Results are printed on standard output in either format."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO
from unicodedata import category

TEXT = "text"
JSON = "json"
FORMATS = (TEXT, JSON)


class JsonFormatter(logging.Formatter):
    """The formatter of log records as JSON, so that the warnings of libraries are lines of the same form."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        level = record.levelname.lower()
        return json_line(record.name, record.getMessage(), level=level, seconds=record.created, fields=fields)


class _StandardError(logging.Handler):
    """A handler that writes to the present ``sys.stderr``, which a program may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


_handler = _StandardError()
_handler.setFormatter(JsonFormatter())


def choose_format(name: str) -> None:
    """Set the format of all further lines of this process: "text" or "json"."""
    root = logging.getLogger()
    if name == JSON:
        root.addHandler(_handler)  # a second time has no effect
    else:
        root.removeHandler(_handler)
    logging.captureWarnings(name == JSON)


def is_json() -> bool:
    """Return whether lines are written as JSON."""
    return _handler in logging.getLogger().handlers


def say(
    logger: str,
    message: str,
    *,
    text: str | None = None,
    file: TextIO | None = None,
    level: str = "info",
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a line.

    Args:
        logger: name of the part of the program, such as ``sharding.job``; only in JSON.
        message: the line.
        text: the line in the text format, if it is another one there, such as one with the time.
        file: where to write (default: standard error).
        level: debug, info, warning or error; only in JSON.
        fields: values of the line for programs; only in JSON.
    """
    line = json_line(logger, message, level=level, fields=fields) if is_json() else text or message
    print(line, file=file or sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text with its control characters escaped.

    A name in somebody else's data could otherwise move the cursor of a terminal and overwrite other lines."""
    if text.isprintable():
        return text
    return "".join(ascii(char)[1:-1] if category(char) in ("Cc", "Cs", "Zl", "Zp") else char for char in text)


def json_line(
    logger: str, message: str, *, level: str, seconds: float | None = None, fields: Mapping[str, Any] | None = None
) -> str:
    """Return a line of JSON: ts (UTC), level, logger, message, fields. seconds: since 1970 (default: now)."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    values = {
        "ts": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "message": message,
        "fields": {name: value for name, value in (fields or {}).items() if value is not None},
    }
    return json.dumps(values, default=str)


def wall_clock() -> str:
    """Return the present time in UTC to the second, as lines of text begin with it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
