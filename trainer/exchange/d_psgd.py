"""D-PSGD: every worker averages its model with all its neighbours (Lian et al. 2017, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.exchange.neighbours import NeighbourExchange


@dataclass(frozen=True)
class DPSGD(NeighbourExchange):
    """Decentralised parallel SGD. The weights of a graph's links are its fastest constant weights (Xiao and Boyd 2004).

    With ``--every 2`` and learning-rate drops of its own it is the training of RCD-SGD (He and Dube 2023, algorithm 3)."""

    name: ClassVar[str] = "d-psgd"
    summary: ClassVar[str] = "each worker averages its own model with those of its neighbours"
