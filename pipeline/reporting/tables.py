"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[tuple[str, str]]) -> str:
    """(name, text) pairs as a table of two columns, indented."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)
