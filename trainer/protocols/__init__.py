"""The consistency protocols by name."""

from __future__ import annotations

from pipeline.core.specs import registry
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP
from trainer.protocols.downpour import Downpour
from trainer.protocols.dssp import DSSP
from trainer.protocols.k_asp import KASP
from trainer.protocols.k_batch_asp import KBatchASP
from trainer.protocols.k_batch_bsp import KBatchBSP
from trainer.protocols.k_bsp import KBSP
from trainer.protocols.n_softsync import NSoftsync
from trainer.protocols.ssp import SSP

PROTOCOLS: dict[str, type[Protocol]] = registry(
    ASP, BSP, SSP, DSSP, KBSP, KBatchBSP, KASP, KBatchASP, NSoftsync, Downpour
)

__all__ = ["PROTOCOLS", "Protocol"]
