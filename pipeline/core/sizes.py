"""Sizes in bytes, as text."""

from __future__ import annotations

import math
import re

from pipeline.core.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of a size such as 512M or 1.5GiB: K, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024.

    Raises UsageError for other text. flag: names it."""
    if match := _SIZE.fullmatch(text.strip()):
        number, unit, binary = match.groups()
        factor = (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1) if unit else 1
        size = float(number) * factor
        if math.isfinite(size):
            return int(size)
    raise UsageError(f"{flag} {text!r} is no size, such as 512M or 2Gi")


def bytes_in_words(size: float) -> str:
    """Return a number of bytes as text with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
