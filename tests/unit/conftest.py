"""Settings of all pure tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

EMPTY = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush no file to the disk: no test here cuts the power, and flushes are half the time of a run in virtual time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save an empty image for each figure: for tests of texts, as drawing is most of the time that a report takes."""
    from matplotlib.figure import Figure

    def save_empty(_: Figure, target: Any, **options: Any) -> None:
        if hasattr(target, "write"):
            target.write(EMPTY)
        else:
            Path(target).write_bytes(EMPTY)

    monkeypatch.setattr(Figure, "savefig", save_empty)
