"""A worker's and server 0's connections in all-reduce, each against a peer that a test plays message by message."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.configs import make_config
from tests.support.trainer_runs import until
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.home.folders import Folders
from trainer.server import rounds
from trainer.server.endpoint import Endpoint
from trainer.transport.addresses import local_addresses
from trainer.transport.agreement import Agreement
from trainer.transport.messages import LinkLoss, Message, PeerJoin, PeerView, Regroup, pack, pack_json, unpack
from trainer.transport.sockets import Secret, close, connect, serve
from trainer.worker.clients import all_reduce
from trainer.worker.clients.all_reduce import AllReduceClient
from trainer.worker.clients.base import MustRejoin, Turn

SECRET = Secret("the token of these tests")
ELEMENTS = 8
REPORT = StepMeasurements(1, 0.5, 1, 0.01)
Socket = zmq.Socket[bytes]


@pytest.fixture
def address() -> str:
    return local_addresses(f"links-{time.time_ns()}", 1)[0]


def run_config(folder: Path) -> Config:
    """All-reduce of many steps, from a first checkpoint in its folder."""
    config = make_config("", folder, exchange="all-reduce", same_host="socket", steps=10**6, model="logistic")
    root = folder_of(folder / "checkpoints", 0)
    zeros = np.zeros(ELEMENTS, np.float32)
    write_slice(root, 0, 1, 0, 0, ELEMENTS, ELEMENTS, zeros, zeros)
    write_state(root, RunState(0, 0, 0, 0, 0.0, None, False, {0: 0}, 0.0, 1, ELEMENTS, 0, config.identity()))
    return config


def received(socket: Socket, kind: type[Message]) -> tuple[Message, list[bytes]]:
    """The next message of a kind, with the frames around it; others are passed over."""
    while socket.poll(20_000):
        frames = socket.recv_multipart()
        message = unpack(memoryview(frames[1] if socket.type == zmq.ROUTER else frames[0]))
        if isinstance(message, kind):
            return message, frames
    raise AssertionError(f"no {kind.__name__} came")


class Leader:
    """Server 0, played by a test."""

    def __init__(self, address: str, workers: int) -> None:
        self.address = address
        self.workers = workers
        self.context: zmq.Context[Socket] = zmq.Context()
        self.socket = serve(self.context, address, SECRET, 1 << 20)

    def admit(self) -> bytes:
        """Let the worker that asks join a view with others that nobody plays, and return its connection."""
        request, frames = received(self.socket, PeerJoin)
        assert isinstance(request, PeerJoin)
        other = {"process": 1, "address": "ipc://@links-nobody", "host": "", "memory": {}}
        members = [other | {"process": request.process}, *[other] * (self.workers - 1)]
        progress = {"accepted": 0, "examples": 0, "until": None, "clocks": [0] * self.workers}
        view = pack_json({"members": members, "source": None, "copies": [], **progress})
        self.socket.send_multipart([frames[0], pack(PeerView(1, 0, 0)), view])
        return frames[0]

    def restart(self) -> None:
        """Close all connections and listen again, as a network does that fails for a moment."""
        close(self.context)
        self.context = zmq.Context()
        self.socket = serve(self.context, self.address, SECRET, 1 << 20)


@pytest.fixture
def start(tmp_path: Path, address: str) -> Iterator[Any]:
    """Start a worker and a leader of a run of so many workers; both end with the test."""
    ends: list[Any] = []

    def begin(workers: int) -> tuple[AllReduceClient, Leader]:
        leader = Leader(address, workers)
        facts = RunFacts(workers, 100, ELEMENTS, 0)
        client = AllReduceClient(run_config(tmp_path), facts, 0, address, SECRET, tmp_path / "checkpoints")
        ends.extend([client.close, lambda: close(leader.context)])
        return client, leader

    yield begin
    for end in ends:
        end()


def joined(client: AllReduceClient, leader: Leader, pool: ThreadPoolExecutor) -> tuple[Turn, bytes]:
    """The first turn of a worker, and its connection."""
    turn = pool.submit(client.join)
    identity = leader.admit()
    first = turn.result(20)
    assert first
    return first, identity


def test_a_single_worker_hears_server_0_between_its_steps(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds are complete without any message, so that it waits for none."""
    monkeypatch.setattr(all_reduce, "WATCH_S", 0.0)
    client, leader = start(1)
    with ThreadPoolExecutor(1) as pool:
        turn, identity = joined(client, leader, pool)
    leader.socket.send_multipart([identity, pack(Regroup(2)), b""])

    def has_left() -> bool:
        """Do a step; True if the worker has heard that it must leave."""
        nonlocal turn
        try:
            turn = client.exchange(turn, REPORT)
        except MustRejoin:
            return True
        return False

    until(has_left, "the worker leaves", seconds=20)


def test_a_worker_tells_that_its_connection_to_server_0_broke(start: Any) -> None:
    """Messages may be lost, and the next connection is one that server 0 does not know."""
    client, leader = start(2)
    with ThreadPoolExecutor(1) as pool:
        turn, _ = joined(client, leader, pool)
        ended = pool.submit(client.exchange, turn, REPORT)
        leader.restart()
        loss, frames = received(leader.socket, LinkLoss)
        assert loss == LinkLoss(0, client.process, 1)
        leader.socket.send_multipart([frames[0], pack(Regroup(2)), b""])
        with pytest.raises(MustRejoin):
            ended.result(20)


class Ended(Exception):
    """The test is over."""


def test_a_worker_is_answered_at_its_newest_connection(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a broken connection every message but a heartbeat shows where the worker is now."""
    over = threading.Event()

    def end_if_over() -> None:
        if over.is_set():
            raise Ended

    monkeypatch.setattr(rounds, "kick", end_if_over)
    config, facts = run_config(tmp_path), RunFacts(1, 100, ELEMENTS, 0)
    server = rounds.RoundsServer(config, facts, Endpoint(0, [address], SECRET, None, Folders.from_home(tmp_path)))
    context: zmq.Context[Socket] = zmq.Context()
    introduction = Agreement.from_config(config, facts).introduction(address="", host="", memory={}, copies=[])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(server.run)
        first, second = connect(context, address, SECRET), connect(context, address, SECRET)
        first.send_multipart([pack(PeerJoin(0, 7, 0, 0, 0)), introduction, b""])
        asked, _ = received(first, Regroup)
        assert isinstance(asked, Regroup)
        first.send_multipart([pack(PeerJoin(0, 7, asked.number, 0, 0)), introduction, b""])
        view, _ = received(first, PeerView)
        assert isinstance(view, PeerView)
        second.send_multipart([pack(LinkLoss(0, 7, view.number)), b""])
        received(second, Regroup)
        over.set()
        with pytest.raises(Ended):
            ended.result(20)
    close(server.context)
    context.destroy(linger=0)
