"""Asynchronous parallel: every gradient is an update, nobody waits (SPEC 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.protocols.base import Gradient, Protocol, View


@dataclass(frozen=True)
class ASP(Protocol):
    """With equally fast workers the staleness concentrates at n - 1."""

    synchronous = False

    def take(self, view: View) -> Sequence[Gradient]:
        return view.waiting[:1]
