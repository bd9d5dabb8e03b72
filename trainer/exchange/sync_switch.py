"""Sync-Switch: synchronous updates at first, asynchronous ones later (Li, Mangoubi, Xu and Guo, ICDCS 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from pipeline.core.specs import option
from trainer.exchange.base import Exchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.switching import Switching
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP


@dataclass(frozen=True)
class SyncSwitch(Switching):
    """BSP on the servers for a fraction of every worker's steps, then ASP on the same servers.

    The paper uses 0.0625, 0.125 and 0.5 for its three setups. The default is that of the largest cluster, on which ASP
    alone fails. With ``straggler`` BSP ends earlier once a worker is a straggler (trainer.coordination.stragglers)."""

    name: ClassVar[str] = "sync-switch"
    summary: ClassVar[str] = "bsp on the servers for a fraction of the run, then asp"

    fraction: float = option(0.5, "fraction of each worker's steps under bsp", least=0, most=1)
    straggler: float | None = option(
        None,
        "end bsp before --fraction once a worker's steps take at least so many times as long as those of the median worker",
        metavar="FACTOR",
        above=1,
        shown="only --fraction ends it",
        advanced=True,
    )
    straggler_window: int = option(
        20,
        "last steps of each worker whose median time --straggler reads; before so many no worker is a straggler",
        metavar="STEPS",
        least=1,
        advanced=True,
    )

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (ParameterServer(), BSP()), (ParameterServer(), ASP())

    def switch_step(self, steps: int, steps_per_epoch: int) -> int:
        return int(Fraction(str(self.fraction)) * steps)  # exact for decimals: 0.29 of 100 steps are 29

    def switch_reason(self) -> str:
        return f"fraction {self.fraction:g} of the steps"
