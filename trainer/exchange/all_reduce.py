"""All-reduce: the workers add up their gradients among themselves, and each keeps the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.core.specs import option
from trainer.exchange.base import Exchange


@dataclass(frozen=True)
class AllReduce(Exchange):
    """The exchange in which every worker gets the sum of all gradients, without parameter servers.

    Worker j adds up range j of N: it receives N-1 pieces, adds them in the order of workers, and sends the sum to the
    N-1 others. Each worker thus sends 2(N-1)/N of the vector per training step, as in a ring, but in two rounds of
    messages instead of 2(N-1). The additions have the order of bsp on servers, so that the result has the same bits."""

    name: ClassVar[str] = "all-reduce"
    summary: ClassVar[str] = "workers add up their gradients among themselves, in the order of bsp"
    client: ClassVar[str] = "trainer.worker.clients.all_reduce"
    server: ClassVar[str] = "trainer.server.rounds"
    protocol: ClassVar[str | None] = "bsp"
    worker_timeout_s: ClassVar[float] = 2.0  # short, because all others wait for a frozen worker
    in_virtual_time: ClassVar[bool] = True
    carries_examples: ClassVar[bool] = True

    collective: Literal["mesh", "torch"] = option(
        "mesh",
        "sums of gradients. mesh: by the workers, with the bits of bsp; torch: torch.distributed, by gloo or, if every"
        " worker has a GPU of its own, by NCCL (tested in a group of 1 only), with sums that differ by rounding. Its"
        " connections are neither encrypted nor authenticated",
        advanced=True,
    )

    def vectors_per_gradient(self, num_workers: int) -> float:
        return 2 * (num_workers - 1) / num_workers

    def pushed_vectors_per_gradient(self, num_workers: int) -> float:
        return self.vectors_per_gradient(num_workers)


def adds_by_torch(exchange: Exchange) -> bool:
    """Return whether torch.distributed adds up the gradients of an exchange."""
    return isinstance(exchange, AllReduce) and exchange.collective == "torch"
