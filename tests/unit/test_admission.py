"""Whom real server processes admit: peers with the token of the run and the same configuration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from pipeline.core.errors import UsageError
from tests.campaigns.cable import LOOPBACK, Tap
from tests.support.configs import change, make_config
from tests.support.server_processes import FACTS, NUMBERS, RUN, SECRET, Served, Worker, agreement
from tests.support.trainer_runs import until
from trainer.coordination.orders import StepMeasurements
from trainer.launch.control import Control
from trainer.transport import sockets as transport
from trainer.transport.agreement import Agreement
from trainer.transport.messages.supervisors import WorkerLoss
from trainer.transport.sockets import Secret


def refused(peer: zmq.Socket[bytes], address: str) -> None:
    """Connect, and wait until the server has ended the connection before hearing a word."""
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | HANDSHAKE_FAILED)
    peer.linger = 0
    peer.connect(address)
    with suppress(zmq.Again):  # the connection may have ended already
        peer.send_multipart([b"malformed, if it were heard"], zmq.NOBLOCK)
    assert monitor.poll(60_000)
    recv_monitor_message(monitor)
    assert not peer.poll(0)
    peer.disable_monitor()
    peer.close()


HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def strangers(context: zmq.Context[zmq.Socket[bytes]]) -> Sequence[zmq.Socket[bytes]]:
    """Peers without the token, by every mechanism of ZeroMQ."""
    public, secret = zmq.curve_keypair()
    nobody, unnamed, wrong, other, known = (context.socket(zmq.DEALER) for _ in range(5))
    unnamed.plain_username, unnamed.plain_password = b"someone", b"?"
    wrong.plain_username, wrong.plain_password = b"run", SECRET.password("ipc://@another-run").encode()
    other.curve_serverkey, other.curve_publickey, other.curve_secretkey = zmq.curve_keypair()[0], public, secret
    known.curve_serverkey = SECRET.keys("server")[0]  # a public key may leak; it admits nobody
    known.curve_publickey, known.curve_secretkey = public, secret
    return nobody, unnamed, wrong, other, known


@pytest.mark.slow
def test_on_this_host_nobody_without_the_token_is_heard(alone: Served, honest: Worker) -> None:
    before = alone.status()["malformed"]
    for stranger in strangers(alone.context):
        refused(stranger, alone.addresses[0])
    assert alone.status()["malformed"] == before


@pytest.mark.slow
def test_over_a_network_nobody_without_the_token_is_heard(networked: Served) -> None:
    worker = networked.worker(use_memory=False)
    for stranger in strangers(networked.context):
        refused(stranger, networked.addresses[0])
    assert networked.status()["malformed"] == 0
    worker.check()
    worker.client.close()


@pytest.mark.slow
def test_gradients_are_read_on_the_way_only_with_encryption_off(networked: Served) -> None:
    """A peer between worker and server reads gradients, parameters and a password, and never the token."""
    tap = Tap(int(networked.addresses[0].rpartition(":")[2]))
    client = networked.client(use_memory=False, addresses=[f"tcp://{LOOPBACK}:{tap.port}"])
    turn = client.join()
    assert turn
    client.pushed[:] = np.random.default_rng(0).normal(size=NUMBERS)
    assert client.exchange(turn, StepMeasurements(1, 0.5, 1, 0.01))
    clear = networked.secret.encryption == "off"
    for vector in (client.pushed, client.pulled):
        assert vector.any()
        assert tap.carried(vector.tobytes()) == clear
    assert tap.carried(networked.secret.password(networked.addresses[0]).encode()) == clear
    assert not tap.carried(SECRET.token.encode())
    client.close()
    tap.close()


@pytest.mark.slow
def test_what_is_read_with_encryption_off_admits_to_no_other_address(networked: Served) -> None:
    """The password of TCP addresses opens neither the private ones nor servers whose encryption is on."""
    read = networked.secret.password(networked.addresses[0])
    assert read != networked.secret.password("ipc://@trainer-run-0")
    assert read == networked.secret.password("tcp://another-name:7000")
    peer = networked.context.socket(zmq.DEALER)
    peer.plain_username, peer.plain_password = b"run", read.encode()
    if networked.secret.encryption == "on":
        refused(peer, networked.addresses[0])
    else:
        peer.close()


@pytest.mark.slow
def test_a_host_with_another_encryption_is_told_so(networked: Served) -> None:
    other = Secret(SECRET.token, "off" if networked.secret.encryption == "on" else "on")
    client = networked.client(1, other)
    with pytest.raises(UsageError) as refused:
        client.join()
    assert str(refused.value) == "the servers have another --encryption than this host: give every host the same"
    client.close()


@pytest.mark.slow
def test_a_worker_with_another_token_is_told_so_on_this_host(alone: Served) -> None:
    client = alone.client(1, Secret("another token, of another run"))
    time.sleep(0.5)  # the answer may be there before it has asked: then no message will ever leave it
    with pytest.raises(UsageError, match="token"):
        client.join()
    client.close()


@pytest.mark.slow
def test_a_supervisor_with_another_token_is_told_so_on_this_host(alone: Served) -> None:
    control = Control(alone.addresses[0], Secret("another token, of another run"), alone.agreement)
    with pytest.raises(UsageError, match="token"):
        until(control.ask, "an answer", seconds=20)
    control.close()


@pytest.mark.slow
@pytest.mark.full
def test_a_worker_with_another_token_is_told_so_over_a_network(
    networked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "REFUSED_AFTER_S", 1.0)
    client = networked.client(1, Secret("another token, of another run", networked.secret.encryption))
    with pytest.raises(UsageError, match="token"):
        client.join()
    client.close()


@pytest.mark.slow
def test_a_worker_of_another_configuration_learns_the_difference(alone: Served, honest: Worker) -> None:
    client = alone.client(0, of=agreement(batch_size=64))  # it takes the place of one that is there
    with pytest.raises(UsageError) as refused:
        client.join()
    assert str(refused.value) == (
        "--batch-size is 64 here and 128 on the host of server 0: give every host the same command"
    )
    client.close()
    turn = honest.turn
    honest.step()
    assert turn
    assert honest.turn
    assert (honest.turn.generation, honest.turn.clock) == (turn.generation, turn.clock + 1)


@pytest.mark.slow
def test_a_supervisor_of_another_configuration_changes_nothing(alone: Served, honest: Worker) -> None:
    before = alone.status()["alive"]
    control = Control(alone.addresses[0], SECRET, agreement(servers=2))
    control.tell(WorkerLoss(0))
    with pytest.raises(UsageError, match=r"^--servers is 2 here and 1 on the host of server 0: .* same command$"):
        until(control.ask, "an answer")
    control.close()
    assert alone.status()["alive"] == before


@pytest.mark.slow
@pytest.mark.full
def test_a_server_of_another_configuration_ends_with_a_line(pair: Served, tmp_path: Path) -> None:
    worker = pair.worker()
    worker.step()
    pair.processes[1].kill()
    pair.processes[1].wait()
    right, pair.config = pair.config, change(pair.config, momentum=0.5)
    wrong = pair._start(1)
    wrong.wait(60)
    assert "--momentum is 0.5 here and 0.0 on the host of server 0" in (tmp_path / "server-1.txt").read_text()
    pair.config = right
    pair.processes[1] = pair._start(1)
    worker.check()
    worker.client.close()


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ({"seed": 1}, "--seed is 0 here and 1 on the host of server 0: give every host the same command"),
        (
            {"protocol": "bsp"},
            "--protocol is asp here and bsp on the host of server 0: give every host the same command",
        ),
        ({"model": "cnn", "norm": "group"}, "--model is resnet20 here and cnn on the host of server 0: give every"),
        ({"protocol": "ssp"}, "--protocol is asp here"),
        ({"device": "cpu", "threads": 3, "checkpoint_every_s": 5.0, "start_wait_s": 1.0}, None),
    ],
)
def test_hosts_agree_on_what_decides_the_result_and_on_nothing_else(theirs: dict[str, Any], line: str | None) -> None:
    mine, other = agreement(), agreement(**theirs)
    assert (mine.digest == other.digest) == (line is None)
    if line:
        assert str(mine.refused(other.refusal())).startswith(line)


def test_hosts_of_other_shards_do_not_agree() -> None:
    config = make_config("", "o", **RUN)
    mine, other = (Agreement.from_config(config, replace(FACTS, shards=digest)) for digest in ("f00d", "beef"))
    assert mine.digest != other.digest
    assert str(mine.refused(other.refusal())) == (
        "shard digest is f00d here and beef on the host of server 0: give every host the same shards"
    )
