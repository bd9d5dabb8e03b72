"""Clients with a log of what a lost worker delays, for tests.benchmarks.recovery, which names this module in a run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.d_psgd import DPSGD
from trainer.exchange.matcha import MATCHA
from trainer.home.folders import Folders
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.peers import PeerBeat
from trainer.transport.sockets import Secret
from trainer.worker.clients.all_reduce import AllReduceClient
from trainer.worker.clients.base import Turn
from trainer.worker.clients.neighbours import NeighbourClient

LOG = "RECOVERY_LOG"  # environment variable with the path of the log


@dataclass(frozen=True)
class LoggedAllReduce(AllReduce):
    """All-reduce under its own name, so that a run differs in nothing but the log."""

    client: ClassVar[str] = __name__


@dataclass(frozen=True)
class LoggedDPSGD(DPSGD):
    """D-PSGD under its own name."""

    client: ClassVar[str] = __name__


@dataclass(frozen=True)
class LoggedMATCHA(MATCHA):
    """MATCHA under its own name."""

    client: ClassVar[str] = __name__


class Notes:
    """The lines of one worker's process in the log; each has the number of the view that the process knows."""

    def __init__(self, worker: int) -> None:
        self._file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._worker = worker
        self._newest = {"join": -1, "view": -1}

    def add(self, kind: str, number: int) -> None:
        """Append a line. Of the joins and of the receipts of a view only the first counts, because they are repeated."""
        if number > self._newest.get(kind, -1):
            os.write(self._file, f"{kind},{self._worker},{os.getpid()},{number},{time.monotonic()}\n".encode())
        if kind in self._newest:
            self._newest[kind] = max(self._newest[kind], number)


class LoggedClient(AllReduceClient):
    """Appends a line to the log whenever it asks to join a view, sends a heartbeat, or has ended a step."""

    def __init__(self, *arguments: Any) -> None:
        self._notes = Notes(arguments[2])  # before the thread of the heartbeats starts
        super().__init__(*arguments)

    def _send_join(self) -> None:
        super()._send_join()
        self._notes.add("join", self.replica.number)

    def _beat(self) -> PeerBeat:
        self._notes.add("beat", self.replica.number)
        return super()._beat()

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        view = self._view
        following = super().exchange(turn, report)
        self._notes.add("step", view)
        return following


class LoggedNeighbour(NeighbourClient):
    """Appends a line to the log whenever it has received a view, sends a heartbeat, or has ended a step."""

    def __init__(self, *arguments: Any) -> None:
        self._notes = Notes(arguments[2])  # before the thread of the heartbeats starts
        super().__init__(*arguments)

    def _obey(self, message: Message, bodies: tuple[Body, ...]) -> None:
        super()._obey(message, bodies)
        self._notes.add("view", self.replica.number)

    def _beat(self) -> PeerBeat:
        self._notes.add("beat", self.replica.number)
        return super()._beat()

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        following = super().exchange(turn, report)
        self._notes.add("step", self.replica.number)
        return following


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> LoggedClient | LoggedNeighbour:
    """Return the client of a worker, as ``open_client`` of the exchange's own module does."""
    if not isinstance(config.exchange, AllReduce):
        return LoggedNeighbour(config, facts, worker, addresses[0], secret)
    plain = replace(config, exchange=AllReduce(collective=config.exchange.collective))
    return LoggedClient(plain, facts, worker, addresses[0], secret, folders.checkpoints)
