"""Real server processes of a run without a supervisor, honest workers, and fixtures of both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth

from pipeline.spark.shipping import PACKAGE
from tests.clusters import free_ports
from tests.support.configs import make_config
from tests.support.trainer_runs import until
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.transport.addresses import local_addresses
from trainer.transport.agreement import Agreement
from trainer.transport.messages.heads import pack
from trainer.transport.messages.supervisors import AskStatus
from trainer.transport.sockets import Secret, connect
from trainer.worker.clients.base import MustRejoin, Turn
from trainer.worker.clients.servers import ServerClient

ROOT = PACKAGE.parent
SECRET = Secret("the token of these tests")
NUMBERS = 1000
WORKERS = 2
FACTS = RunFacts(WORKERS, 100, NUMBERS, 0)
RUN: dict[str, Any] = {"steps": 10**6, "recipe": "constant", "learning_rate": 1.0, "momentum": 0.0}
START = """
import json, sys
from pathlib import Path
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.server.endpoint import Endpoint
from trainer.server.process import main
from trainer.transport.sockets import Secret
config, facts, index, addresses, token = json.loads(sys.argv[1])
folders = Folders.from_home(Path(config["run"]["output"]))
secret = Secret(token, config["processes"]["encryption"])
endpoint = Endpoint(index, addresses, secret, None, folders)
main(Config.from_json(config), RunFacts.from_json(facts), endpoint)
"""


def agreement(servers: int = 1, **values: Any) -> Agreement:
    """Return the agreement of a host of such a run."""
    return Agreement.from_config(make_config("", "o", servers=servers, **RUN | values), FACTS)


INTRODUCTION = agreement().introduction()


class Served:
    """Real server processes of a run without supervisor, and what can be asked of them."""

    def __init__(self, folder: Path, servers: int, addresses: list[str], *, start: str = START, **values: Any) -> None:
        """start: the program of a server; values: of the configuration."""
        self.folder, self.addresses, self.servers, self.start = folder, addresses, servers, start
        waits = {"start_wait_s": 0.1, "checkpoint_every_s": 1e6}
        self.config = make_config("", folder, servers=servers, **RUN | waits | values)
        self.agreement = agreement(servers, **values)
        self.secret = Secret(SECRET.token, self.config.processes.encryption)
        self._first_checkpoint()
        self.processes = [self._start(index) for index in range(servers)]
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.asker = connect(self.context, addresses[0], self.secret)
        until(lambda: self.status()["ready"], "the servers are ready")

    def _first_checkpoint(self) -> None:
        root = folder_of(self.folder / "checkpoints", 0)
        zeros = np.zeros(NUMBERS, np.float32)
        write_model(root, 0, zeros, zeros)
        clocks = dict.fromkeys(range(WORKERS), 0)
        write_state(root, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, NUMBERS, 0, self.config.identity()))

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        what = [self.config.to_json(), FACTS.to_json(), index, self.addresses, SECRET.token]
        with open(self.folder / f"server-{index}.txt", "wb") as text:
            command = [sys.executable, "-c", self.start, json.dumps(what)]
            return subprocess.Popen(command, cwd=ROOT, stdout=text, stderr=subprocess.STDOUT)

    def status(self) -> dict[str, Any]:
        self.asker.send_multipart([pack(AskStatus()), self.agreement.introduction()])
        assert self.asker.poll(60_000), self.said()
        answer: dict[str, Any] = json.loads(self.asker.recv_multipart()[1])
        return answer

    def said(self) -> str:
        return "\n".join((self.folder / f"server-{index}.txt").read_text() for index in range(self.servers))

    def peer(self, server: int = 0) -> zmq.Socket[bytes]:
        """A connection that the token admits."""
        return connect(self.context, self.addresses[server], self.secret)

    def worker(self, index: int = 0, *, use_memory: bool = True) -> Worker:
        return Worker(self, self.client(index, use_memory=use_memory))

    def client(
        self,
        index: int = 0,
        secret: Secret | None = None,
        of: Agreement | None = None,
        *,
        use_memory: bool = True,
        addresses: list[str] | None = None,
    ) -> ServerClient:
        """A worker's end, perhaps of a host that has another token, another configuration or another way there."""
        where = addresses or self.addresses
        return ServerClient(of or self.agreement, FACTS, index, where, secret or self.secret, use_memory=use_memory)

    def wait_for_malformed(self, count: int) -> None:
        until(lambda: self._all_alive() and self.status()["malformed"] >= count, f"{count} malformed messages")
        assert self.status()["malformed"] == count

    def _all_alive(self) -> bool:
        assert all(process.poll() is None for process in self.processes), self.said()
        return True

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.context.destroy(linger=0)


class Worker:
    """An honest worker that pushes ones, so that every number tells how many gradients were applied."""

    def __init__(self, served: Served, client: ServerClient) -> None:
        self.served, self.client = served, client
        self.turn: Turn | None = client.join()

    def step(self) -> None:
        """Get one gradient into the model, whatever it takes."""
        version = self.served.status()["version"]
        while self.served.status()["version"] == version:
            assert self.turn
            self.client.pushed[:] = 1.0
            try:
                self.turn = self.client.exchange(self.turn, StepMeasurements(1, 0.5, 1, 0.01))
            except MustRejoin:
                self.turn = self.client.join()

    def check(self) -> None:
        """Each update subtracts rate 1.0 / 2 workers from every number, on every server."""
        self.step()
        assert self.turn
        np.testing.assert_array_equal(self.client.pulled, np.full(NUMBERS, -0.5 * self.turn.version))
        assert self.served.status()["version"] == self.turn.version


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a single server."""
    served = Served(tmp_path_factory.mktemp("alone"), 1, local_addresses(f"wire-{time.time_ns()}", 1))
    yield served
    served.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Served]:
    """Two servers, for what only a follower hears."""
    served = Served(tmp_path, 2, local_addresses(f"wire-{time.time_ns()}", 2))
    yield served
    served.end()


@pytest.fixture(params=["on", "off"])
def networked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server reached over TCP, as from other hosts, with --encryption on or off."""
    served = Served(tmp_path, 1, [f"tcp://127.0.0.1:{free_ports(1)[0]}"], encryption=request.param)
    yield served
    served.end()


@pytest.fixture
def honest(alone: Served) -> Iterator[Worker]:
    """A worker that has done a step before the test, and must be able to do another after it."""
    worker = alone.worker()
    worker.step()
    yield worker
    worker.check()
    worker.client.close()
