"""MATCHA: D-PSGD over random matchings of a graph, which cost a share of its traffic (Wang et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.specs import option
from trainer.exchange.neighbours import NeighbourExchange

if TYPE_CHECKING:
    from trainer.exchange.mixing import TopologyPlan


@dataclass(frozen=True)
class MATCHA(NeighbourExchange):
    """D-PSGD over links drawn for each round: each matching has a probability that keeps the graph well connected.

    The seed of the run draws them, so that all workers know the links of a round without a message. With ``--every F``
    they are drawn in every F-th round only."""

    name: ClassVar[str] = "matcha"
    summary: ClassVar[str] = "like d-psgd, with some of the links in each round, drawn at random"

    budget: float = option(
        0.5, "mean share of the graph's matchings that a round uses; 1 is d-psgd", metavar="SHARE", least=1e-6, most=1
    )

    def plan(self, num_workers: int, seed: int) -> TopologyPlan:
        """Return the links of every round. Raises UsageError for a topology that these workers cannot have."""
        from trainer.exchange.mixing import build_plan  # loads numpy, which --help should not

        return build_plan(self.topology, num_workers, seed, budget=self.budget, every=self.every)
