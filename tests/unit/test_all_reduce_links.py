"""A worker's and server 0's connections in all-reduce, each against a peer that a test plays message by message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.configs import make_config
from tests.support.trainer_runs import until
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.home.folders import Folders
from trainer.server import rounds
from trainer.server.endpoint import Endpoint
from trainer.transport.addresses import local_addresses
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.mesh import Mesh
from trainer.transport.messages.all_reduce import PeerView
from trainer.transport.messages.heads import Message, pack, unpack
from trainer.transport.messages.peers import LinkLoss, ModelCopy, PeerBeat, PeerJoin, Regroup
from trainer.transport.sockets import Secret, close, connect, serve
from trainer.worker.clients import all_reduce, leader_link
from trainer.worker.clients.all_reduce import AllReduceClient
from trainer.worker.clients.base import MustRejoin, Turn

SECRET = Secret("the token of these tests")
ELEMENTS = 8
REPORT = StepMeasurements(1, 0.5, 1, 0.01)
Socket = zmq.Socket[bytes]


@pytest.fixture
def address() -> str:
    return local_addresses(f"links-{time.time_ns()}", 1)[0]


def run_config(folder: Path, **values: Any) -> Config:
    """All-reduce of many steps, from a first checkpoint in its folder."""
    common: dict[str, Any] = {"exchange": "all-reduce", "same_host": "socket", "steps": 10**6, "model": "logistic"}
    config = make_config("", folder, **common | values)
    root = folder_of(folder / "checkpoints", 0)
    zeros = np.zeros(ELEMENTS, np.float32)
    write_model(root, 0, zeros, zeros)
    write_state(root, RunState(0, 0, 0, 0, 0.0, None, False, {0: 0}, 0.0, 1, ELEMENTS, 0, config.identity()))
    return config


def received(socket: Socket, kind: type[Message]) -> tuple[Message, list[bytes]]:
    """The next message of a kind, with the frames around it; others are passed over."""
    deadline = time.monotonic() + 20  # heartbeats never stop
    while time.monotonic() < deadline and socket.poll(20_000):
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
        self.identity = b""  # the worker's connection
        self.context: zmq.Context[Socket] = zmq.Context()
        self.socket = serve(self.context, address, SECRET, 1 << 20)

    def admit(self) -> None:
        """Let the worker that asks join a view with others that nobody plays."""
        request, frames = received(self.socket, PeerJoin)
        assert isinstance(request, PeerJoin)
        other = {"process": 1, "address": "ipc://@links-nobody", "host": "", "memory": {}}
        members = [other | {"process": request.process}, *[other] * (self.workers - 1)]
        progress = {"accepted": 0, "examples": 0, "until": None, "clocks": [0] * self.workers}
        view = pack_json({"members": members, "source": None, "copies": [], **progress})
        self.identity = frames[0]
        self.tell(PeerView(1, 0, 0), view)

    def tell(self, message: Message, body: bytes = b"") -> None:
        self.socket.send_multipart([self.identity, pack(message), body])

    def restart(self) -> None:
        """Close all connections and listen again, as a network does that fails for a moment."""
        close(self.context)
        self.context = zmq.Context()
        self.socket = serve(self.context, self.address, SECRET, 1 << 20)


Start = Callable[[int], tuple[AllReduceClient, Leader, Turn]]


class Ended(Exception):
    """The test is over."""


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes the connections of a test after its threads have ended."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pool(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """A thread for the side that is tested. It ends with the test, whatever it waits for."""
    over = threading.Event()

    def end_if_over() -> None:
        if over.is_set():
            raise Ended

    for module in (rounds, all_reduce):
        monkeypatch.setattr(module, "kick", end_if_over)
    with ThreadPoolExecutor(1) as threads:
        yield threads
        over.set()


@pytest.fixture
def start(tmp_path: Path, address: str, closing: ExitStack, pool: ThreadPoolExecutor) -> Start:
    """Let worker 0 join a run of so many workers; its client, the leader, and its first turn."""

    def begin(workers: int) -> tuple[AllReduceClient, Leader, Turn]:
        leader = Leader(address, workers)
        facts = RunFacts(workers, 10**9, ELEMENTS, 0)
        client = AllReduceClient(run_config(tmp_path), facts, 0, address, SECRET, tmp_path / "checkpoints")
        closing.callback(lambda: close(leader.context))
        closing.callback(client.close)
        turn = pool.submit(client.join)
        leader.admit()
        first = turn.result(20)
        assert first
        return client, leader, first

    return begin


def test_a_single_worker_hears_server_0_between_its_steps(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds are complete without any message, so that it waits for none."""
    monkeypatch.setattr(all_reduce, "WATCH_S", 0.0)
    client, leader, turn = start(1)
    rounds: list[int] = []
    monkeypatch.setattr(client.mesh, "note_round", lambda: rounds.append(client.replica.version))
    turn = client.exchange(turn, REPORT) or turn
    assert rounds == [1]  # connections that broke before it no longer count
    leader.tell(Regroup(2))

    def has_left() -> bool:
        """Do a step; True if the worker has heard that it must leave."""
        nonlocal turn
        try:
            turn = client.exchange(turn, REPORT) or turn
        except MustRejoin:
            return True
        return False

    until(has_left, "the worker leaves", seconds=10)


def test_a_worker_tells_that_its_connection_to_server_0_broke(start: Start, pool: ThreadPoolExecutor) -> None:
    """Messages may be lost, and the next connection is one that server 0 does not know."""
    client, leader, turn = start(2)
    ended = pool.submit(client.exchange, turn, REPORT)
    leader.restart()
    loss, frames = received(leader.socket, LinkLoss)
    assert loss == LinkLoss(0, client.process, 1)
    leader.identity = frames[0]
    leader.tell(Regroup(2))
    with pytest.raises(MustRejoin):
        ended.result(20)


def test_a_malformed_answer_is_logged_and_heartbeats_go_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without heartbeats would be lost, and nobody would know why."""
    monkeypatch.setattr(leader_link, "HEARTBEAT_S", 0.02)
    leader = start(1)[1]
    _, frames = received(leader.socket, PeerBeat)
    leader.socket.send_multipart([frames[0], b"a head of no message", b""])
    for _ in range(5):
        received(leader.socket, PeerBeat)
    assert "dropped a malformed message" in caplog.text


def test_a_worker_is_answered_at_its_newest_connection(
    tmp_path: Path, address: str, closing: ExitStack, pool: ThreadPoolExecutor
) -> None:
    """After a broken connection every message but a heartbeat shows where the worker is now."""
    config, facts = run_config(tmp_path), RunFacts(1, 10**9, ELEMENTS, 0)
    server = rounds.RoundsServer(config, facts, Endpoint(0, [address], SECRET, None, Folders.from_home(tmp_path)))
    context: zmq.Context[Socket] = zmq.Context()
    closing.callback(lambda: close(server.context))
    closing.callback(lambda: context.destroy(linger=0))
    introduction = Agreement.from_config(config, facts).introduction(address="", host="", memory={}, copies=[])
    pool.submit(server.run)
    first, second = connect(context, address, SECRET), connect(context, address, SECRET)
    first.send_multipart([pack(PeerJoin(0, 7, 0, 0, 0)), introduction, b""])
    asked, _ = received(first, Regroup)
    assert isinstance(asked, Regroup)
    first.send_multipart([pack(PeerJoin(0, 7, asked.number, 0, 0)), introduction, b""])
    view, _ = received(first, PeerView)
    assert isinstance(view, PeerView)
    second.send_multipart([pack(LinkLoss(0, 7, view.number)), b""])
    received(second, Regroup)


def test_a_copy_with_two_arrays_of_state_arrives(tmp_path: Path, address: str, closing: ExitStack) -> None:
    """The state of adam is twice as long as its model. Otherwise a worker that returns would never get its copy."""
    parameters = 400_000
    config, facts = run_config(tmp_path, optimiser="adam"), RunFacts(2, 10**9, parameters, 0)
    client = AllReduceClient(config, facts, 0, address, SECRET, tmp_path / "checkpoints")
    closing.callback(client.close)
    context: zmq.Context[Socket] = zmq.Context()
    closing.callback(lambda: close(context))
    source = Mesh(context, 1, address, SECRET, parameters, use_memory=False)
    source.connect([{"process": client.process, **client.mesh.introduction()}, None])
    source.send(0, ModelCopy(1, 5), bytes(4 * parameters), bytes(8 * parameters))
    assert client.mesh.inbox.poll(5_000), "the copy was refused"
    [(message, (_, momentum))] = client.mesh.receive()
    assert (message, len(momentum)) == (ModelCopy(1, 5), 8 * parameters)
