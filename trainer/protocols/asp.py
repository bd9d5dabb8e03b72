"""Asynchronous parallel: every gradient is an update, nobody waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import Protocol


@dataclass(frozen=True)
class ASP(Protocol):
    """With equally fast workers the staleness concentrates at n - 1."""

    name: ClassVar[str] = "asp"
    summary: ClassVar[str] = "every gradient is applied as it comes"
    synchronous: ClassVar[bool] = False
