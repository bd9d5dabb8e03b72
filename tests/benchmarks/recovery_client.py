"""The client of all-reduce with a log of its joins and steps, for tests.benchmarks.recovery, which names it in a run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.home.folders import Folders
from trainer.transport.sockets import Secret
from trainer.worker.clients.all_reduce import AllReduceClient
from trainer.worker.clients.base import Turn

LOG = "RECOVERY_LOG"  # environment variable with the path of the log


@dataclass(frozen=True)
class LoggedAllReduce(AllReduce):
    """All-reduce under its own name, so that a run differs in nothing but the log."""

    client: ClassVar[str] = __name__


class LoggedClient(AllReduceClient):
    """Appends a line to the log whenever it asks to join a view, and whenever a step ends."""

    def __init__(self, *arguments: Any) -> None:
        self._log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._asked_for = -1
        super().__init__(*arguments)

    def _note(self, kind: str, number: int) -> None:
        os.write(self._log, f"{kind},{self.worker},{os.getpid()},{number},{time.monotonic()}\n".encode())

    def _send_join(self) -> None:
        super()._send_join()
        # A request is repeated until the view begins; the first one counts.
        if self.replica.number != self._asked_for:
            self._asked_for = self.replica.number
            self._note("join", self.replica.number)

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        following = super().exchange(turn, report)
        self._note("step", turn.generation)
        return following


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> LoggedClient:
    """Return the client of a worker, as trainer.worker.clients.all_reduce.open_client does."""
    assert isinstance(config.exchange, AllReduce)
    plain = replace(config, exchange=AllReduce(collective=config.exchange.collective))
    return LoggedClient(plain, facts, worker, addresses[0], secret, folders.checkpoints)
