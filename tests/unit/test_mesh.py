"""The connections among workers: messages, the memory that they share, and a worker that cannot be reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from pipeline.core.errors import JobError, UsageError
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.mesh import Mesh
from trainer.transport.messages.all_reduce import GradientPiece
from trainer.transport.messages.heads import Body, Message, pack
from trainer.transport.sockets import Secret, close, connect, serve

ELEMENTS = 7
LOOPBACK = "tcp://127.0.0.1:9"
PRIVATE = "ipc://@a-test"


Make = Callable[..., Mesh]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a worker's connections, each with a context of its own, as in a process."""
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = []

    def mesh(worker: int, leader: str = PRIVATE, *, use_memory: bool = False) -> Mesh:
        contexts.append(zmq.Context())
        return Mesh(contexts[-1], worker, leader, Secret("token"), ELEMENTS, use_memory=use_memory)

    yield mesh
    for context in contexts:
        close(context)


def pair(make: Make, leader: str = PRIVATE, *, use_memory: bool = False) -> list[Mesh]:
    """Two workers that are connected."""
    meshes = [make(worker, leader, use_memory=use_memory) for worker in range(2)]
    for mesh in meshes:
        mesh.connect(members(meshes))
    return meshes


def members(meshes: list[Mesh]) -> list[dict[str, Any]]:
    return [{"process": 10 + index, **mesh.introduction()} for index, mesh in enumerate(meshes)]


def first_message(mesh: Mesh) -> tuple[Message, tuple[Body, ...]]:
    assert mesh.inbox.poll(10_000)
    return next(mesh.receive())


@pytest.mark.parametrize("leader", [LOOPBACK, PRIVATE])
def test_a_message_arrives_with_its_bodies(leader: str, make: Make) -> None:
    one, two = pair(make, leader)
    vector = np.arange(ELEMENTS, dtype=np.float32)
    one.send(1, GradientPiece(1, 5, 0, in_memory=False), b"report", vector.data.cast("B"))
    message, (report, floats) = first_message(two)
    assert message == GradientPiece(1, 5, 0, in_memory=False)
    assert bytes(report) == b"report"
    np.testing.assert_array_equal(np.frombuffer(floats, np.float32), vector)
    assert not one.shares_memory(1)


def test_memory_is_read_only_while_its_mark_holds(make: Make) -> None:
    one, two = pair(make, use_memory=True)
    assert one.shares_memory(1)
    assert one.memory
    one.memory.gradient[:] = range(ELEMENTS)
    one.memory.range_sums[:] = 3
    one.offer_piece(1, 5)
    one.offer_sum(1, 6)
    other = two.memory_of(0)
    np.testing.assert_array_equal(other.piece(1, 5, 2, 4), [2, 3])
    np.testing.assert_array_equal(other.range_sum(1, 6, 0, 2), [3, 3])
    assert other.piece(1, 6, 2, 4) is None
    assert other.range_sum(2, 6, 0, 2) is None
    one.offer_piece(0, 0)
    assert other.piece(1, 5, 2, 4) is None


def test_a_later_process_replaces_the_connection(make: Make) -> None:
    one, two = pair(make, use_memory=True)
    later = make(1, use_memory=True)
    now = members([one, later])
    now[1]["process"] = 99
    one.connect(now)
    one.send(1, GradientPiece(2, 5, 0, in_memory=True), b"", b"")
    assert first_message(later)[0] == GradientPiece(2, 5, 0, in_memory=True)
    assert not two.inbox.poll(100)


def test_a_worker_that_cannot_be_reached_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair(make, LOOPBACK)
    one.send(1, GradientPiece(1, 5, 0, in_memory=False), b"", b"")
    first_message(two)
    one.has_broken()
    monkeypatch.setattr("trainer.transport.mesh.UNREACHABLE_S", 0.0)
    one.check_reachable()
    gone = members([one, two])
    gone[1] |= {"process": 99, "address": "tcp://127.0.0.1:1"}
    one.connect(gone)
    time.sleep(0.01)
    one.has_broken()
    with pytest.raises(JobError, match=r"worker 1 at tcp://127\.0\.0\.1:1"):
        one.check_reachable()
    monkeypatch.setattr("trainer.transport.mesh.UNREACHABLE_S", 60.0)
    one.check_reachable()


def break_connection(mesh: Mesh, peer: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Context[zmq.Socket[bytes]]:
    """Close the sockets of worker 1 and listen at its address again, until it has a message. Returns the new context."""
    close(peer)
    again: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = serve(again, address, Secret("token"), 1 << 20)
    for _ in range(500):
        mesh.send(1, GradientPiece(1, 5, 0, in_memory=False), b"", b"")
        if inbox.poll(20):
            break
    assert mesh.has_broken()
    return again


def test_a_connection_that_breaks_without_end_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made anew each time, so the worker is never unreachable for long, and no round is ever complete."""
    monkeypatch.setattr("trainer.transport.mesh.MANY_LOSSES", 1)
    monkeypatch.setattr("trainer.transport.mesh.MOST_LOSSES", 2)
    one, two = pair(make, LOOPBACK)
    one.send(1, GradientPiece(1, 5, 0, in_memory=False), b"", b"")
    first_message(two)
    one.has_broken()
    peer = break_connection(one, two.context, two.address)
    one.check_reachable()
    assert f"from worker 0 to worker 1 at {two.address} broke 1 times" in caplog.text
    one.note_round()
    for _ in range(2):
        one.check_reachable()
        peer = break_connection(one, peer, two.address)
    with pytest.raises(JobError, match=r"from worker 0 to worker 1 .* broke 2 times .* the same MTU"):
        one.check_reachable()
    close(peer)


def test_memory_that_cannot_be_opened_ends_with_a_remedy(make: Make) -> None:
    one, two = pair(make, use_memory=True)
    wrong = members([one, two])
    wrong[1] |= {"process": 99, "memory": wrong[1]["memory"] | {"nonce": "0" * 64}}
    one.connect(wrong)
    assert one.has_broken()  # its worker may have died
    with pytest.raises(UsageError, match="memory of worker 1 cannot be opened on this host: give --same-host socket"):
        one.memory_of(1)


@pytest.mark.parametrize("frames", [[b""], [pack(GradientPiece(1, 1, 1, in_memory=False)), b""]])
def test_a_malformed_message_is_refused(frames: list[bytes], make: Make) -> None:
    mesh = make(0)
    sender = connect(make(1).context, mesh.address, Secret("token"))
    sender.send_multipart(frames)
    assert mesh.inbox.poll(10_000)
    with pytest.raises(MalformedMessageError):
        list(mesh.receive())


@pytest.mark.slow
def test_another_token_is_not_admitted(make: Make) -> None:
    mesh = make(0, LOOPBACK)
    sender = connect(make(1).context, mesh.address, Secret("another"))
    sender.send_multipart([b"x", b"y"])
    assert not mesh.inbox.poll(500)


def end_peer_at_close(peer: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a peer end just before a DEALER socket is closed, as when a frozen worker is killed and dropped at once."""
    close_socket = zmq.Socket.close

    def closing(socket: zmq.Socket[bytes], linger: int | None = None) -> None:
        if socket.type == zmq.DEALER and not peer.closed:
            close(peer)
            time.sleep(0.2)  # until libzmq has noticed
        close_socket(socket, linger)

    monkeypatch.setattr(zmq.Socket, "close", closing)


def test_a_peer_that_ends_as_it_is_dropped_stops_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq's thread would wait for ever to report the end, and the worker could neither send nor receive again."""
    meshes = [make(worker) for worker in range(3)]
    everyone = members(meshes)
    meshes[0].connect(everyone)
    for other in (1, 2):
        meshes[0].send(other, GradientPiece(1, 5, 0, in_memory=True), b"", b"")
        first_message(meshes[other])
    end_peer_at_close(meshes[1].context, monkeypatch)
    meshes[0].connect([everyone[0], None, everyone[2]])
    meshes[0].send(2, GradientPiece(2, 6, 0, in_memory=True), b"", b"")
    assert first_message(meshes[2])[0] == GradientPiece(2, 6, 0, in_memory=True)
