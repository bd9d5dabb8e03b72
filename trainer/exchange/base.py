"""The interface of exchanges: how the gradients of all workers become the parameters of their next steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.core.specs import Spec
from trainer.protocols.base import Protocol

if TYPE_CHECKING:
    from trainer.exchange.mixing import TopologyPlan


@dataclass(frozen=True)
class Exchange(Spec):
    """An exchange. Its fields are its parameters, and each exchange has its own file.

    An exchange decides who sends what to whom; the protocol decides when. This part is pure, as it belongs to the
    configuration, which a command line reads without sockets and torch. The code of workers is in ``client``.
    An exchange can also be a sequence of stages, each of which is another exchange with a protocol.

    Attributes:
        client: the module of the worker's side, whose ``open_client(config, facts, worker, addresses, secret, folders)``
            returns a trainer.worker.clients.base.Client.
        server: the module of server 0, and of any other server.
        protocol: the protocol whose updates the exchange makes; None if it works with any protocol.
        worker_timeout_s: default of --heartbeat-timeout-s for workers: seconds without a heartbeat before a restart.
        in_virtual_time: whether runs in virtual time and replays support it.
        carries_examples: whether workers can give examples to each other (--gossip).
    """

    client: ClassVar[str]
    server: ClassVar[str] = "trainer.server.process"
    protocol: ClassVar[str | None] = None
    worker_timeout_s: ClassVar[float] = 15.0
    in_virtual_time: ClassVar[bool] = False
    carries_examples: ClassVar[bool] = False

    def plan(self, num_workers: int, seed: int) -> TopologyPlan | None:
        """Return the links of every round; None if workers do not exchange models with neighbours.

        Raises UsageError if these workers cannot have them. num_workers: workers of the run; seed: of the run."""
        return None

    @property
    def held_out_share(self) -> float:
        """The share of the training rows that no worker trains on, because their loss decides about a switch."""
        return 0.0

    @property
    def switches_by_rule(self) -> bool:
        """True if a rule decides when the run switches, rather than its configuration."""
        return False

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        """Return the exchange and protocol of each stage; empty if a run is one stage with the run's own protocol."""
        return ()

    def vectors_per_gradient(self, num_workers: int) -> float:
        """Return the elements that all processes send per gradient, as a multiple of the model's size.

        On servers it is 2: the gradient, and the parameters that answer it."""
        return 2.0

    def pushed_vectors_per_gradient(self, num_workers: int) -> float:
        """Return the elements that a worker sends per gradient, as a multiple of the model's size."""
        return 1.0
