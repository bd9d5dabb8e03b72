"""Exchanges with two stages of equal updates, for tests: with momentum kept, a switch changes no bit of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.exchange import Exchange
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.d_psgd import DPSGD
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.switching import Switching
from trainer.protocols import Protocol
from trainer.protocols.asp import ASP
from trainer.protocols.bsp import BSP


@dataclass(frozen=True)
class TwoHalves(Switching):
    """bsp on the servers for the first half of a run and for the second."""

    name: ClassVar[str] = "two-halves"
    summary: ClassVar[str] = "bsp, then bsp"

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (ParameterServer(), BSP()), (ParameterServer(), BSP())

    def switch_step(self, steps: int, steps_per_epoch: int) -> int:
        return steps // 2

    def switch_reason(self) -> str:
        return "half of the steps"


@dataclass(frozen=True)
class AllReduceThenServers(TwoHalves):
    """All-reduce for the first half of a run, bsp on the servers for the second."""

    name: ClassVar[str] = "all-reduce-then-servers"
    summary: ClassVar[str] = "all-reduce, then bsp"
    server: ClassVar[str] = "trainer.server.stages"

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (AllReduce(), BSP()), (ParameterServer(), BSP())


@dataclass(frozen=True)
class NeighboursThenServers(TwoHalves):
    """D-PSGD for the first half of a run, which no run can have."""

    name: ClassVar[str] = "neighbours-then-servers"
    summary: ClassVar[str] = "d-psgd, then bsp"

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (DPSGD(), BSP()), (ParameterServer(), BSP())


@dataclass(frozen=True)
class AspThenBsp(TwoHalves):
    """asp for the first half of a run, whose momentum depends on the number of workers, bsp for the second."""

    name: ClassVar[str] = "asp-then-bsp"
    summary: ClassVar[str] = "asp, then bsp"

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (ParameterServer(), ASP()), (ParameterServer(), BSP())
