"""The base of exchanges in which every worker keeps its own model and averages it with its neighbours' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pipeline.core.specs import option
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.base import Exchange

if TYPE_CHECKING:
    from trainer.exchange.mixing import TopologyPlan


@dataclass(frozen=True)
class NeighbourExchange(Exchange):
    """An exchange of models between neighbours of a graph, without servers and without a barrier for all workers.

    In round k every worker computes a gradient at its own model. If the round has links, it also replaces its model by
    a weighted mean with its neighbours' models. The result of a run is the mean of all models."""

    client: ClassVar[str] = "trainer.worker.clients.neighbours"
    server: ClassVar[str] = "trainer.server.rounds"
    worker_timeout_s: ClassVar[float] = AllReduce.worker_timeout_s  # its neighbours wait for a frozen worker
    in_virtual_time: ClassVar[bool] = True
    carries_examples: ClassVar[bool] = True
    protocol: ClassVar[str | None] = "bsp"

    topology: str = option(
        "ring",
        "graph of neighbours: ring, complete, torus, graph0 (8 workers), with d-psgd also exponential and random-pair, or"
        " the path of a file of links",
        metavar="NAME",
    )
    every: int = option(1, "exchange models in every F-th round, beginning with the first", metavar="F", least=1)
    order: Literal["avg-then-grad", "grad-then-avg"] = option(
        "avg-then-grad",
        "avg-then-grad: subtract from the mean of the models the gradient of a worker's model before it, as in RCD-SGD;"
        " grad-then-avg: average models from which the gradient is subtracted, as in MATCHA's code",
    )
    weigh_by: Literal["examples", "workers"] = option(
        "examples",
        "weight of gradients if the workers' mini-batches differ in size: in proportion to their examples, or equal for"
        " all workers; models are always averaged by the weights of the links",
        advanced=True,
    )

    def plan(self, num_workers: int, seed: int) -> TopologyPlan:
        from trainer.exchange.mixing import build_plan  # loads numpy, which --help should not

        return build_plan(self.topology, num_workers, seed, every=self.every)
