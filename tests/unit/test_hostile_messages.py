"""Hostile bytes against real server processes, from peers that the token admits."""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth

from tests.support.server_processes import INTRODUCTION, NUMBERS, SECRET, WORKERS, Served, Worker, agreement
from tests.support.trainer_runs import until
from tests.support.wire import REPORT, WIRE, raw
from trainer.coordination.orders import StepMeasurements
from trainer.transport.addresses import local_addresses
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.messages.heads import unpack
from trainer.transport.messages.servers import (
    Execute,
    GiveUp,
    GradientReceipt,
    Heartbeat,
    Hello,
    Join,
    JoinReceipt,
    Load,
    LoadReceipt,
    Parameters,
    Push,
    Rejoin,
    Stop,
    WriteReceipt,
)
from trainer.transport.messages.supervisors import AskStatus, End, WorkerLoss
from trainer.transport.sockets import connect

EXTREMES = [0, 1, 2, -1, 7, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)]


def losses_of(rows: int) -> bytes:
    """The numbers of a report with the losses of some rows."""
    return REPORT[:-12] + struct.pack("<iii", rows, -1, 0)


def join(body: bytes) -> list[bytes]:
    """A request of worker 1, from a session later than any test's: a server does not look into one of an earlier session."""
    return [raw(Join, 1, 2**62), body]


def handle(**values: Any) -> bytes:
    return agreement().introduction(**{"pid": os.getpid(), "descriptor": 0, "nonce": "0" * 64} | values)


def huge(number: str) -> bytes:
    return INTRODUCTION[:-1] + b',"pid":' + number.encode() + b',"descriptor":1,"nonce":""}'


HEAD = raw(AskStatus)
MALFORMED: dict[str, list[bytes]] = {
    "nothing": [b""],
    "one frame": [HEAD],
    "three frames": [HEAD, b"", b""],
    "a push without a report": [raw(Push), bytes(4 * NUMBERS)],
    "fifty frames": [b"x"] * 50,
    "fifty frames behind a head": [HEAD] + [b"x"] * 49,
    "an empty head": [b"", b""],
    "a head of magic alone": [b"PS2", b""],
    "a short head": [raw(Join)[:-1], INTRODUCTION],
    "a long head": [HEAD + b"x", b""],
    "a head of another kind's size": [raw(Join) + bytes(8), INTRODUCTION],
    "another version's magic": [raw(AskStatus, magic=b"PS0"), b""],
    "a kind that does not exist": [raw(AskStatus, code=len(WIRE)), b""],
    "a megabyte of noise": [random.Random(0).randbytes(10**6), b""],
    "an order from a worker": [raw(Execute), pack_json({"sequence": 1, "version": 9, "accepted": [[0, 1.0]]})],
    "a load from a worker": [raw(Load, 2**62), b""],
    "an answer": [raw(Parameters), bytes(4 * NUMBERS)],
    "a stop": [raw(Stop), b""],
    "a hello of server 0": [raw(Hello, 0), INTRODUCTION],
    "a hello of a server too many": [raw(Hello, 1), INTRODUCTION],
    "a hello of server -1": [raw(Hello, -1), INTRODUCTION],
    "a loaded of a server too many": [raw(LoadReceipt, 1), b""],
    "a join held of a server too many": [raw(JoinReceipt, 1, 0, 1, 1), b""],
    "a gradient held of a server too many": [raw(GradientReceipt, 1, 0, 1, 1, 1), b""],
    "an outcome that does not exist": [raw(WriteReceipt, 1, 0, 1, 99), b""],
    "a loss of worker -1": [raw(WorkerLoss, -1), INTRODUCTION],
    "a heartbeat of worker 2": [raw(Heartbeat, WORKERS), b""],
    "a join of worker 2": [raw(Join, WORKERS, 1), INTRODUCTION],
    "a join of worker -1": [raw(Join, -1, 1), INTRODUCTION],
    "a join of a session that no clock has": [raw(Join, 1, -1), INTRODUCTION],
    "a push of a generation that no clock has": [raw(Push, 0, 1, -(2**63)), REPORT, bytes(4 * NUMBERS)],
    "a push of step -1": [raw(Push, 0, 1, 1, -1), REPORT, bytes(4 * NUMBERS)],
    "a push of worker -1": [raw(Push, -(2**31), 1, 1, 1), REPORT, bytes(4 * NUMBERS)],
    "a push with half a report": [raw(Push), REPORT[:-1], bytes(4 * NUMBERS)],
    "a push with losses of fewer rows": [raw(Push), losses_of(1) + bytes(12), bytes(4 * NUMBERS)],
    "a push with losses of other rows": [raw(Push), losses_of(2) + bytes(26), bytes(4 * NUMBERS)],
    "a push with losses of -2 rows": [raw(Push), losses_of(-2), bytes(4 * NUMBERS)],
    "a step given up without a report": [raw(GiveUp), b""],
    "a join without JSON": join(b"no"),
    "a join with nothing": join(b""),
    "a join with a list": join(b"[1]"),
    "a join with half a handle": join(agreement().introduction(pid=1)),
    "a join without an introduction": join(b"{}"),
    "a join with a number for an introduction": join(b'{"run": 1}'),
    "a status without an introduction": [raw(AskStatus), b""],
    "a loss without an introduction": [raw(WorkerLoss, 1), b"{}"],
    "a join with a path": join(handle(pid="../../../etc", descriptor="passwd")),
    "a join with endless numbers": join(huge("1e999")),
    "a join with no number": join(huge("NaN")),
    "a join with ten thousand digits": join(huge("9" * 10_000)),
    "a join with half a character": join(huge("1").replace(b'""', b'"\\ud800"')),
    "a join a hundred thousand deep": join(b'{"a":' * 100_000),
    "a join of lists in lists": join(b"[" * 500_000),
    "a join of a megabyte": join(b'{"a":"' + b"x" * (1 << 20) + b'"}'),
    "a join in bytes that are no text": join(b"\xff\xfe\x00\xd8{}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MALFORMED)
def test_what_no_peer_of_this_version_sends_is_counted_and_dropped(alone: Served, honest: Worker, kind: str) -> None:
    before = alone.status()["malformed"]
    peer = alone.peer()
    peer.send_multipart(MALFORMED[kind])
    alone.wait_for_malformed(before + 1)
    assert not peer.poll(0), "it is not answered"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [{"pid": 1}, {"pid": 2**22 + 1}, {"pid": -1}, {"descriptor": 10**300}, {"pid": 0}, {"nonce": "x" * 10**5}],
    ids=lambda values: str(values)[:30],
)
def test_foreign_memory_is_declined_and_the_socket_used(alone: Served, honest: Worker, values: dict[str, Any]) -> None:
    peer = alone.peer()
    peer.send_multipart([raw(Join, 1, time.time_ns()), handle(**values)])
    assert peer.poll(60_000)
    head, body = peer.recv_multipart()
    answer = unpack(head)
    assert isinstance(answer, Parameters)
    assert not answer.in_memory
    assert len(body) == 4 * NUMBERS


def joined(alone: Served, peer: zmq.Socket[bytes]) -> tuple[int, int, int, int]:
    """Take worker 1's place by hand; (worker, session, generation, clock) of the answer."""
    peer.send_multipart([raw(Join, 1, time.time_ns()), INTRODUCTION])
    assert peer.poll(60_000)
    answer = unpack(peer.recv_multipart()[0])
    assert isinstance(answer, Parameters)
    return answer[:4]


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 4 * NUMBERS - 4, 4 * NUMBERS + 4, 4 * NUMBERS * 10])
def test_a_gradient_of_another_size_is_not_taken(alone: Served, honest: Worker, size: int) -> None:
    peer, before = alone.peer(), alone.status()
    peer.send_multipart([raw(Push, *joined(alone, peer)), REPORT, bytes(size)])
    alone.wait_for_malformed(before["malformed"] + 1)
    assert alone.status()["version"] == before["version"]


@pytest.mark.slow
def test_a_gradient_in_memory_that_was_never_opened_is_not_taken(alone: Served, honest: Worker) -> None:
    peer, before = alone.peer(), alone.status()["malformed"]
    peer.send_multipart([raw(Push, *joined(alone, peer), True), REPORT, b""])
    alone.wait_for_malformed(before + 1)


@pytest.mark.slow
def test_a_gradient_of_another_generation_makes_its_worker_rejoin(alone: Served, honest: Worker) -> None:
    peer, before = alone.peer(), alone.status()
    worker, session, generation, clock = joined(alone, peer)
    for head in (
        raw(Push, worker, session - 1, generation, clock),
        raw(Push, worker, session, generation - 1, clock),
        raw(Push, worker, session, generation, clock + 1),
        raw(Push, worker, session, generation, 2**63 - 1),
        raw(Push, 2**31 - 1, session, generation, clock),
        raw(Push, 2**63 - 1, session, generation, clock),
    ):
        peer.send_multipart([head, REPORT, np.full(NUMBERS, 99, np.float32).tobytes()])
        assert peer.poll(60_000)
        assert isinstance(unpack(peer.recv_multipart()[0]), Rejoin)
    assert alone.status()["version"] == before["version"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_messages_from_an_admitted_peer_change_nothing(alone: Served, honest: Worker, seed: int) -> None:
    """Fields at their limits in a valid head, then random bodies; every kind is among them."""
    rng, peer = random.Random(seed), alone.peer()
    for kind in [*WIRE] * 20:
        least = rng.choice([0, -(2**63)])  # a negative field makes the whole message malformed
        limits = [value for value in EXTREMES if value >= least]
        values = [rng.choice([*limits, rng.getrandbits(31)]) for _ in WIRE[kind][1]]
        if kind is Join:  # a worker's place is taken by who joins last: not by a time that no honest worker reaches
            values[1] = rng.getrandbits(40)
        ints = [rng.choice([0, 1, -1, 2**31 - 1, -(2**31)]) for _ in range(3)]
        floats = [rng.choice([0.0, -1.0, float("inf"), float("nan"), 1e308]) for _ in range(3)]
        report = struct.pack("<iidddQQi", *ints[:2], *floats, rng.getrandbits(64), rng.getrandbits(64), ints[2])
        body = rng.choice([b"", b"{}", INTRODUCTION, rng.randbytes(30), bytes(4 * NUMBERS), b"[[" * 50, handle()])
        bodies = [report, body] if kind is Push else [rng.choice([report, body])]
        peer.send_multipart([raw(kind, *values), *bodies])
    sizes = [0, 1, *{len(raw(kind)) + more for kind in WIRE for more in (-1, 0, 1)}]
    for _ in range(200):
        peer.send_multipart([rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, 5))])
    before = alone.status()["malformed"]
    peer.send_multipart([b"the last"])
    until(lambda: alone.status()["malformed"] > before, "all of it has been read")
    honest.check()


@pytest.mark.slow
def test_a_message_beyond_any_slice_ends_its_connection_and_no_other(alone: Served, honest: Worker) -> None:
    peer = alone.peer()
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.send_multipart([raw(Push), REPORT, bytes(50 << 20)])
    assert monitor.poll(60_000)
    peer.disable_monitor()


@pytest.mark.slow
@pytest.mark.full
def test_a_follower_takes_orders_from_nobody_but_server_0(pair: Served) -> None:
    worker, peer = pair.worker(), pair.peer(server=1)
    worker.step()
    order = {
        "sequence": 3,
        "version": 9,
        "rate": 1.0,
        "accepted": [[0, 1.0]],
        "unblocked": [],
        "stop": [],
        "snapshot": False,
    }
    to_others = (Execute, Load, Hello, JoinReceipt, GradientReceipt, LoadReceipt, AskStatus, WorkerLoss, End, Heartbeat)
    for kind in to_others:
        peer.send_multipart([raw(kind, *[1, 2**62][: len(WIRE[kind][1])]), pack_json(order)])
    until(lambda: pair.said().count("malformed") == len(to_others), "all of them are dropped")
    worker.check()
    worker.client.close()


@pytest.mark.slow
def test_messages_about_unknown_workers_change_nothing(pair: Served) -> None:
    worker, peer = pair.worker(), pair.peer()
    worker.step()
    assert worker.turn
    generation = worker.turn.generation
    for server, number in itertools.product((0, 2, -1, 2**31 - 1), (0, 1, 2, -1)):
        peer.send_multipart([raw(JoinReceipt, server, 7, number, 7), b""])
        peer.send_multipart([raw(GradientReceipt, server, 7, number, 7), b""])
        peer.send_multipart([raw(LoadReceipt, server, 7), b""])
        peer.send_multipart([raw(Hello, server, 7), b""])
    for number in (-1, 0, 1, 2):
        peer.send_multipart([raw(GradientReceipt, 1, generation, number, 7), b""])
    peer.send_multipart([raw(LoadReceipt, 1, 2**62), b""])
    worker.check()
    assert worker.turn.generation == generation, "no roll-back"
    worker.client.close()


@pytest.mark.slow
def test_a_starting_server_ignores_late_checkpoint_messages(tmp_path: Path) -> None:
    """A follower that outlived server 0 may tell the next one that it has loaded what the last one wanted."""
    addresses = local_addresses(f"wire-{time.time_ns()}", 2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    early = connect(context, addresses[0], SECRET)
    for generation in (0, 1, 2**62):
        early.send_multipart([raw(LoadReceipt, 1, generation), b""])
    served = Served(tmp_path, 2, addresses)
    worker = served.worker()
    worker.check()
    worker.client.close()
    served.end()
    context.destroy(linger=0)


@pytest.mark.slow
def test_a_heartbeat_that_overtakes_the_join_request_does_not_undo_it(
    alone: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.worker.clients.servers.HEARTBEAT_S", 0.01)
    client = alone.client(use_memory=False)
    send_join = client._send_join

    def late() -> None:
        time.sleep(0.2)  # beats of this session come first, and are answered
        send_join()

    monkeypatch.setattr(client, "_send_join", late)
    turn = client.join()
    for _ in range(5):
        assert turn
        time.sleep(0.03)
        client.pushed[:] = 1.0
        turn = client.exchange(turn, StepMeasurements(1, 0.5, 1, 0.01))
    client.close()
