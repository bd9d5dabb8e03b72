"""The consistency protocols by name."""

from __future__ import annotations

from pipeline.specs import registry
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP
from trainer.protocols.ssp import SSP

PROTOCOLS: dict[str, type[Protocol]] = registry(ASP, BSP, SSP)

__all__ = ["PROTOCOLS", "Protocol"]
