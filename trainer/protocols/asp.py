"""Asynchronous parallel (ASP): every gradient is applied when it arrives, and no worker waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.protocols.base import Protocol


@dataclass(frozen=True)
class ASP(Protocol):
    """Asynchronous parallel. With equally fast workers the staleness is about n - 1."""

    name: ClassVar[str] = "asp"
    summary: ClassVar[str] = "applies every gradient as soon as it arrives"
    synchronous: ClassVar[bool] = False
