"""Settings of all pure tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush no file to the disk: no test here cuts the power, and flushes are half the time of a run in virtual time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
