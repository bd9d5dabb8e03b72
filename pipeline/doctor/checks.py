"""The result of a check, and its output as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pipeline.core.reporting.tables import table

Level = Literal["ok", "warning", "FAILED"]
OK: Level = "ok"
WARNING: Level = "warning"
FAILED: Level = "FAILED"


class Check(NamedTuple):
    """The result of one check, a line of the screen.

    Attributes:
        name: the subject of the check, such as "open files".
        level: ok, warning or FAILED.
        text: the result.
        advice: the next step; empty if the level is ok, or if the text names it.
    """

    name: str
    level: Level
    text: str
    advice: str = ""


def has_failed(checks: Iterable[Check]) -> bool:
    """True if the level of any check is FAILED."""
    return any(check.level == FAILED for check in checks)


def format_checks(checks: Sequence[Check]) -> str:
    """Return the checks as text: a line per check, and a last line that counts warnings and failures."""
    lines = []
    for check in checks:
        text = " ".join(check.text.split())
        lines.append((check.level, check.name, f"{text}; {check.advice}" if check.advice else text))
    failed = sum(check.level == FAILED for check in checks)
    warnings = sum(check.level == WARNING for check in checks)
    return f"{table(lines)}\n{len(checks)} checks: {failed} failed, {warnings} with a warning"


def as_json(checks: Sequence[Check]) -> str:
    """Return the checks as a JSON object: "failed" (true or false) and "checks", a list of objects with Check's fields."""
    return json.dumps({"failed": has_failed(checks), "checks": [check._asdict() for check in checks]}, indent=1)


def group_by_value(values: Sequence[tuple[str, str]]) -> str:
    """Return (owner, value) pairs as text that names each value once: ``17 (driver), 21 (a, b)``, or ``17`` if all agree."""
    owners: dict[str, list[str]] = {}
    for owner, value in values:
        owners.setdefault(value, []).append(owner)
    if len(owners) == 1:
        return next(iter(owners))
    return ", ".join(f"{value} ({shorten_names(names)})" for value, names in owners.items())


def shorten_names(names: Sequence[str], most: int = 4) -> str:
    """Return names as one text, each once; of more than ``most`` names, the first ones and the number of the others."""
    each = list(dict.fromkeys(names))
    more = [f"{len(each) - most} more"] if len(each) > most else []
    return ", ".join(each[:most] + more)
