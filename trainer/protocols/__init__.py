"""The consistency protocols by name."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import Config
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP
from trainer.protocols.ssp import SSP

PROTOCOLS: dict[str, Callable[[Config], Protocol]] = {
    "asp": lambda config: ASP(),
    "bsp": lambda config: BSP(),
    "ssp": lambda config: SSP(config.staleness_bound),
}
