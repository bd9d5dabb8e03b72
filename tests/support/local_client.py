"""The worker's side of the exchange of tests/support/local_exchange.py."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.home.folders import Folders
from trainer.transport.sockets import Secret
from trainer.worker.clients import servers
from trainer.worker.clients.base import Client, Turn


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> LocalClient:
    return LocalClient(config, servers.open_client(config, facts, worker, addresses, secret, folders))


class LocalClient:
    """Puts the worker's own model in the place of the parameters that another client pulls. For models without BatchNorm."""

    def __init__(self, config: Config, inner: Client) -> None:
        self.inner = inner
        self.pulled = inner.pulled
        self.pushed = inner.pushed
        self.rate = config.learning_rate
        self.own_share = config.exchange.params()["own_share"]
        self.own = self.pulled.copy()

    def join(self) -> Turn | None:
        turn = self.inner.join()
        self.own[:] = self.pulled
        return turn

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        self.own -= self.rate * self.pushed
        following = self.inner.exchange(turn, report)
        self.own[:] = self.own_share * self.own + (1 - self.own_share) * self.pulled
        self.pulled[:] = self.own
        return following

    def poll_cancelled(self, turn: Turn) -> bool:
        return self.inner.poll_cancelled(turn)

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        return self.inner.give_up(turn, report)

    def close(self) -> None:
        self.inner.close()
