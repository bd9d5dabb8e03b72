"""D-PSGD: every worker averages its model with all its neighbours (Lian et al. 2017, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.exchange.neighbours import NeighbourExchange


@dataclass(frozen=True)
class DPSGD(NeighbourExchange):
    """Decentralised parallel SGD. All links have the weight that averages fastest (Xiao and Boyd 2004).

    With ``--every 2``, momentum 0, the learning rate and drops of He and Dube (2023), and shards of the strategy
    ``submodular``, it is their RCD-SGD (algorithm 3)."""

    name: ClassVar[str] = "d-psgd"
    summary: ClassVar[str] = "each worker averages its own model with those of its neighbours"
