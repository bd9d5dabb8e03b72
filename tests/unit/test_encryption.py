"""The encryption of TCP connections: known answers, and somebody between the peers who reads and changes records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.campaigns.cable import LOOPBACK, Cable, Tap
from tests.campaigns.meddler import MORE, Frame, Meddle, Meddler
from trainer.transport import encryption
from trainer.transport.encryption import (
    RECORD_BYTES,
    SHORT_BYTES,
    Buffers,
    Cipher,
    Initiator,
    NotAuthenticError,
    Responder,
)
from trainer.transport.mesh import Mesh
from trainer.transport.messages import GradientPiece
from trainer.transport.sockets import Secret, Watch, close, dealer, offer, serve

SECRET = Secret("the token of these tests")
LIMIT = 8 * RECORD_BYTES
VECTOR = np.random.default_rng(0).normal(size=(3 * RECORD_BYTES + 1000) // 4).astype(np.float32)
# Keys, prologue and payloads of the published test vectors of Noise (cacophony); the messages of these inputs by
# noiseprotocol 0.3.1, another implementation.
PSK = bytes.fromhex("54686973206973206d7920417573747269616e20706572737065637469766521")
PROLOGUE = b"John Galt"
PRIVATE_KEYS = (
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
NOISE = {
    b"Ludwig von Mises": "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d60"
    "66f5f8aecc3406bbd9829f2d24a531b1",
    b"Murray Rothbard": "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0"
    "ad668e026bf5714554497b3a720461",
    b"F. A. Hayek": "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6",
    b"Carl Menger": "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0",
    b"Jean-Baptiste Say": "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd",
}


def test_handshake_and_records_are_those_of_noise() -> None:
    mine, theirs = (X25519PrivateKey.from_private_bytes(bytes.fromhex(key)) for key in PRIVATE_KEYS)
    initiator = Initiator(PSK, PROLOGUE, mine, b"Ludwig von Mises")
    reply, server = Responder(PSK, PROLOGUE, theirs).answer(initiator.message, b"Murray Rothbard")
    client = initiator.finish(reply)
    sent = [initiator.message, reply]
    for sender, receiver, text in (
        (client, server, b"F. A. Hayek"),
        (server, client, b"Carl Menger"),
        (client, server, b"Jean-Baptiste Say"),
    ):
        sent.append(sender.sending.encrypt(text))
        assert receiver.receiving.decrypt(sent[-1]) == text
    assert [each.hex() for each in sent] == list(NOISE.values())


def test_a_handshake_needs_the_same_key_on_both_sides() -> None:
    other = bytes(32)
    with pytest.raises(NotAuthenticError):
        Responder(other).answer(Initiator(PSK).message)
    initiator = Initiator(PSK)
    reply, _ = Responder(PSK).answer(initiator.message)
    with pytest.raises(NotAuthenticError):
        Initiator(PSK).finish(reply)  # of an earlier connection
    for begin in range(0, len(reply), 7):
        changed = bytearray(reply)
        changed[begin] ^= 1
        with pytest.raises(NotAuthenticError):
            Initiator.finish(initiator, changed)
        initiator = Initiator(PSK)
        reply, _ = Responder(PSK).answer(initiator.message)


def test_a_key_is_replaced_before_it_has_encrypted_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "REKEY_RECORDS", 3)
    sending, receiving, fixed = Cipher(PSK), Cipher(PSK), Cipher(PSK)
    records = [sending.encrypt(bytes([number])) for number in range(10)]
    assert [receiving.decrypt(record) for record in records] == [bytes([number]) for number in range(10)]
    monkeypatch.setattr(encryption, "REKEY_RECORDS", 100)
    same = [fixed.encrypt(bytes([number])) == records[number] for number in range(10)]
    assert same == [True] * 3 + [False] * 7


def test_memory_is_used_again_only_when_nobody_sees_it() -> None:
    buffers = Buffers()
    array = np.frombuffer(buffers.lease(1000), np.uint8)
    first = array.ctypes.data
    other = buffers.lease(1000)
    assert np.frombuffer(other, np.uint8).ctypes.data != first
    del array
    assert np.frombuffer(buffers.lease(900), np.uint8).ctypes.data == first


class Peers:
    """A server and a client that reaches it through a cable."""

    def __init__(self, cable: Callable[[int], Cable], secret: Secret = SECRET) -> None:
        self.contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
        self.server = serve(self.contexts[0], f"tcp://{LOOPBACK}:0", SECRET, LIMIT)
        self.cable = cable(int(self.server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        self.client = dealer(self.contexts[1], f"tcp://{LOOPBACK}:{self.cable.port}", secret)
        self.watch = Watch(self.client)
        self.client.connect(f"tcp://{LOOPBACK}:{self.cable.port}")
        self.identity = b""
        self.heard: list[list[bytes]] = []  # by the server
        self.answers: list[list[bytes]] = []  # heard by the client

    def move(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let both receive, for so long or until a condition holds, which is returned."""
        due = time.monotonic() + seconds
        while not (is_met := until()) and time.monotonic() < due:
            if self.server.poll(5):
                self.identity, *message = self.server.recv_multipart()
                self.heard.append(message)
            if self.client.poll(5):
                self.answers.append(self.client.recv_multipart())
        return is_met

    def ask(self, word: bytes) -> None:
        """Have a message reach the server, however often it must be sent, so that the server can answer."""
        due = time.monotonic() + 20.0
        while [word] not in self.heard and time.monotonic() < due:
            offer(self.client, word)
            self.move(0.5, lambda: [word] in self.heard)
        assert [word] in self.heard

    def close(self) -> None:
        for context in self.contexts:
            close(context)
        self.cable.close()


Meet = Callable[..., Peers]


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Makes peers, and ends them after the test."""
    all_peers: list[Peers] = []

    def make(cable: Callable[[int], Cable] = Tap, secret: Secret = SECRET) -> Peers:
        all_peers.append(Peers(cable, secret))
        return all_peers[-1]

    yield make
    for peers in all_peers:
        peers.close()


def test_messages_arrive_as_they_were_sent(meet: Meet) -> None:
    """In both directions, with frames on both sides of every limit; what crosses the network has none of their bytes."""
    peers = meet()
    peers.ask(b"the first words of the client")
    lengths = (0, 1, SHORT_BYTES - 1, SHORT_BYTES, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES + 5)
    frames = [np.random.default_rng(length).bytes(length) for length in lengths]
    peers.heard.clear()
    for _ in range(3):
        assert offer(peers.client, *frames, VECTOR.data)
        peers.server.send_multipart([peers.identity, *frames, VECTOR.data], copy=False)
    assert peers.move(20.0, lambda: len(peers.heard) == len(peers.answers) == 3)
    assert peers.heard == peers.answers == [[*frames, VECTOR.tobytes()]] * 3
    tap = peers.cable
    assert isinstance(tap, Tap)
    for secret in (
        SECRET.token.encode(),
        SECRET.pre_shared_key(),
        b"the first words",
        VECTOR.tobytes()[:64],
        *frames[2:],
    ):
        assert not tap.carried(secret[:64])
    assert not peers.watch.has_broken()


def changes(what: str) -> Meddle:
    """Return a function that lets 12 frames of a direction pass, changes one as ``what`` says, and lets the rest pass."""
    counts = {True: 0, False: 0}
    earlier: dict[bool, list[Frame]] = {True: [], False: []}
    is_over = False

    def meddle(frame: Frame) -> list[Frame]:
        nonlocal is_over
        forward = frame.forward == what.startswith("forward")
        is_record = not frame.flags & MORE and len(frame.body) > 100
        counts[frame.forward] += 1
        earlier[frame.forward].append(frame)
        if is_over or not forward or not is_record or counts[frame.forward] < 12:
            return [frame]
        is_over = True
        flipped = bytearray(frame.body)
        flipped[len(flipped) // 2] ^= 4
        match what.partition(" ")[2]:
            case "flip":
                return [frame._replace(body=bytes(flipped))]
            case "cut":
                return [frame._replace(body=frame.body[:-1])]
            case "drop":
                return []
            case "repeat":
                return [frame, frame]
            case "replay":
                return [*[each for each in earlier[frame.forward] if not each.flags & MORE][-6:-1], frame]
            case "join":
                return [frame._replace(flags=MORE), frame]
            case "reflect":  # back to where it comes from would be another direction
                return [each for each in earlier[not frame.forward] if not each.flags & MORE][-1:]
        raise ValueError(what)

    return meddle


WAYS = ("flip", "cut", "drop", "repeat", "replay", "join", "reflect")


@pytest.mark.parametrize("what", [f"{way} {change}" for way in ("forward", "backward") for change in WAYS])
def test_changed_records_end_in_one_line_and_no_message(
    meet: Meet, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level(logging.WARNING)
    peers = meet(lambda to: Meddler(to, changes(what)))
    peers.ask(b"here")
    sent = [[b"number", bytes([number]) * 200, (VECTOR * number).tobytes()] for number in range(6)]
    for message in sent:
        offer(peers.client, *message)
        peers.server.send_multipart([peers.identity, *message])
    broken = []

    def is_known() -> bool:
        broken.append(peers.watch.has_broken())
        return any(broken)

    assert peers.move(20.0, is_known), "the client learns that messages may be lost"
    peers.ask(b"again")
    received = [each for each in peers.heard if each not in ([b"here"], [b"again"])]
    for arrived in (received, peers.answers):
        assert arrived == sent[: len(arrived)], "what arrives is what was sent, in order and once"
    assert len(peers.answers if what.startswith("backward") else received) < len(sent)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, lines
    assert "with the run's token has sent in this place of its connection" in lines[0]


@pytest.mark.parametrize("forward", [True, False])
def test_a_changed_handshake_is_tried_again(meet: Meet, caplog: pytest.LogCaptureFixture, forward: bool) -> None:
    changed: list[Frame] = []

    def meddle(frame: Frame) -> list[Frame]:
        if frame.forward is forward and len(frame.body) == 48 and not changed:
            changed.append(frame)
            return [frame._replace(body=frame.body[:-1] + bytes([frame.body[-1] ^ 1]))]
        return [frame]

    peers = meet(lambda to: Meddler(to, meddle))
    peers.ask(b"here")
    assert changed
    assert ["a handshake" in record.getMessage() for record in caplog.records] == [True]


def test_a_connection_that_is_cut_begins_with_new_keys(meet: Meet) -> None:
    """A message of a client that knows of the cut arrives; the recorded bytes of the first connection serve nobody."""
    peers = meet()
    peers.ask(b"here")
    for word in (b"once more", b"and again"):
        peers.cable.cut()
        assert peers.move(20.0, peers.watch.has_broken)
        assert offer(peers.client, word)
        assert peers.move(20.0, lambda word=word: [word] in peers.heard)  # type: ignore[misc]


def test_the_password_alone_neither_reads_nor_sends(meet: Meet, caplog: pytest.LogCaptureFixture) -> None:
    """Of somebody who has read it, and replays all that he has recorded on a connection of his own."""
    records: list[list[bytes]] = [[]]

    def record(frame: Frame) -> list[Frame]:
        if frame.forward:
            records[-1].append(frame.body)
            if not frame.flags & MORE:
                records.append([])
        return [frame]

    peers = meet(lambda to: Meddler(to, record))
    peers.ask(b"here")
    offer(peers.client, b"number", VECTOR.data)
    assert peers.move(20.0, lambda: len(peers.heard) == 2)
    peers.heard.clear()
    stranger = peers.contexts[1].socket(zmq.DEALER)
    address = f"tcp://{LOOPBACK}:{peers.cable.to}"
    stranger.plain_username, stranger.plain_password = b"encrypted", SECRET.password(address).encode()
    stranger.connect(address)
    # The first message of a handshake is answered, because it is the client's: with a new key of the server.
    for message in (
        [b"in clear", b"text"],
        *records[:-1],
        [b"one frame"],
        [b"1", bytes(48)],
        [b"2", b""],
        [b"R", b"D"],
    ):
        stranger.send_multipart(message)
    peers.move(1.0)
    assert peers.heard == []
    replies = []
    while stranger.poll(0):
        replies.append(stranger.recv_multipart())
    assert {reply[0][:1] for reply in replies} <= {b"2", b"R"}
    peers.ask(b"still here")
    assert any("a handshake" in each.getMessage() for each in caplog.records)


def test_a_message_longer_than_the_servers_limit_is_dropped(meet: Meet, caplog: pytest.LogCaptureFixture) -> None:
    peers = meet()
    peers.ask(b"here")
    offer(peers.client, bytes(2 * LIMIT))
    assert peers.move(20.0, peers.watch.has_broken)
    peers.ask(b"again")
    assert peers.heard == [[b"here"], [b"again"]]
    assert ["an opening record" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize("what", ["", "forward flip", "forward replay", "forward drop"])
def test_messages_among_workers_cannot_be_read_or_changed(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Over the connections of all-reduce, d-psgd and gossip."""
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = [zmq.Context(), zmq.Context()]
    meshes = [Mesh(context, worker, f"tcp://{LOOPBACK}:9", SECRET, len(VECTOR), use_memory=False)
              for worker, context in enumerate(contexts)]  # fmt: skip
    port = int(meshes[1].address.rpartition(":")[2])
    cable = Meddler(port, changes(what)) if what else Tap(port)
    about: dict[str, Any] = {"address": f"tcp://{LOOPBACK}:{cable.port}", "host": "", "memory": {}}
    meshes[0].connect(1, [None, about | {"process": 1}])
    heard: list[bytes] = []
    is_broken = False
    due = time.monotonic() + 20.0
    for number in range(6):
        meshes[0].send(
            1, GradientPiece(1, number, 0, in_memory=False), b"report", (VECTOR * (number + 1)).data.cast("B")
        )
    while len(heard) < 6 and not is_broken and time.monotonic() < due:
        list(meshes[0].receive())
        heard += [bytes(bodies[1]) for _, bodies in meshes[1].receive()]
        is_broken = meshes[0].has_broken()
        time.sleep(0.01)
    assert heard == [(VECTOR * (number + 1)).tobytes() for number in range(len(heard))]
    assert is_broken == bool(what)
    assert len(caplog.records) == bool(what)
    if isinstance(cable, Tap):
        assert len(heard) == 6
        assert not cable.carried(VECTOR.tobytes()[:64])
        assert not cable.carried(SECRET.token.encode())
    for context in contexts:
        close(context)
    cable.close()
