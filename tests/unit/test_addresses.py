"""Where servers are found: names and numbers of hosts of both kinds, on real sockets."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from pipeline.core.errors import UsageError
from pipeline.spark.shipping import PACKAGE
from tests.clusters.machine import free_ports
from tests.support.trainer_sets import own_address
from trainer.transport.addresses import all_interfaces, check_addresses, interface, interface_towards, listening
from trainer.transport.sockets import Secret, connect, offer, serve

ECHO = """
import os, sys, zmq
from trainer.transport.sockets import Secret, connect, offer, serve
context, secret = zmq.Context(), Secret("the token of these tests")
server = serve(context, sys.argv[1], secret, 100)
peer = connect(context, sys.argv[2], secret)
peer.send(b"here")
assert server.poll(20_000), "nothing arrives"
server.send_multipart(server.recv_multipart())
assert peer.poll(20_000), "nothing comes back"
print(peer.recv().decode(), flush=True)
os._exit(0)
"""


def free_port(host: str) -> int:
    """Return a port of an address of this machine; skip the test where the machine has no such address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        pytest.skip(f"this machine has no address {host}: {error}")
    return free_ports(1, host)[0]


def echoed(listened: str, connected: str, *inside: str) -> None:
    """What is sent to one address comes back from a server that listens at another. inside: a command that runs another,
    where the machine has other names."""
    command = [*inside, sys.executable, "-c", ECHO, listened, connected]
    run = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    if "unshare:" in run.stderr or "mount:" in run.stderr:
        pytest.skip(f"this machine cannot have other names: {run.stderr.strip()}")
    assert run.stdout == "here\n", run.stderr


def names(hosts: Path, text: str) -> list[str]:
    """A command that runs another where /etc/hosts holds some text."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("other names of this machine need root and the command unshare")
    hosts.write_text(f"127.0.0.1 localhost\n{text}\n")
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]


@pytest.mark.slow
def test_a_server_is_found_at_a_numeric_ipv6_address() -> None:
    address = f"tcp://[::1]:{free_port('::1')}"
    echoed(address, address)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["::1", "own address"])
def test_a_server_is_found_by_a_name_that_has_an_ipv6_address_only(at: str, tmp_path: Path) -> None:
    host = at if at == "::1" else own_address(socket.AF_INET6)
    if not host:
        pytest.skip("this machine has no IPv6 address but loopback")
    address = f"tcp://six-only:{free_port(host)}"
    echoed(address, address, *names(tmp_path / "hosts", f"{host} six-only"))


@pytest.mark.slow
def test_a_host_whose_own_name_is_loopback_is_reached_by_others(tmp_path: Path) -> None:
    """Debian writes such a line into /etc/hosts."""
    host = own_address()
    if not host:
        pytest.skip("this machine has no address but loopback")
    port = free_port("0.0.0.0")
    inside = names(tmp_path / "hosts", "127.0.1.1 this-host")
    for connected in (host, "this-host"):
        echoed(f"tcp://this-host:{port}", f"tcp://{connected}:{port}", *inside)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_a_server_on_loopback_is_not_reached_from_elsewhere(host: str) -> None:
    own = own_address()
    if not own:
        pytest.skip("this machine has no address but loopback")
    bound, ipv6 = listening(f"tcp://{host}:7000")
    assert (bound.startswith("tcp://127."), ipv6) == (True, False)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (["10.0.0.7"], "10.0.0.7"),
        (["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        (["fd00::2", "10.0.0.7"], "10.0.0.7"),
        (["127.0.1.1"], "0.0.0.0"),
        (["127.0.1.1", "fd00::2"], "0.0.0.0"),
        (["::1"], "[::]"),
        (["::1", "fd00::2"], "[fd00::2]"),
    ],
)
def test_a_server_listens_where_its_name_leads_others_or_everywhere(found: list[str], chosen: str) -> None:
    assert interface(found) == chosen


def test_a_loopback_name_without_a_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell at which address other hosts reach this one."""
    loopback = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 7000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    monkeypatch.setattr("trainer.transport.addresses.ELSEWHERE", ("255.255.255.255", 9))  # no socket may connect to it
    with pytest.raises(UsageError, match=r"node7 is a loopback address on this host, .*: give its IP address"):
        interface_towards("tcp://node7:7000")


@pytest.mark.parametrize(
    "address",
    ["tcp://a:70000", "tcp://a:0", "tcp://a", "tcp://[::1:7000", "tcp://[10.0.0.7]:7000", "ipc:///tmp/a", "a:1"],
)
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not tcp://HOST:PORT"):
        check_addresses([address], 1)


@pytest.mark.full
@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
def test_a_false_server_learns_no_token_and_no_password(
    mechanism: bytes,
) -> None:
    """A server that says which way of proving oneself it wants, and hears what comes of it."""
    secret = Secret("the token of these tests")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = connect(context, f"tcp://127.0.0.1:{listener.getsockname()[1]}", secret)
        peer.send(b"what only servers may hear")
        impostor = listener.accept()[0]
        impostor.settimeout(30.0)
        heard = impostor.recv(1 << 16)  # it speaks first; who is answered before that hangs up without a word
        impostor.settimeout(1.0)
        impostor.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + mechanism.ljust(20, b"\0") + b"\1" + bytes(31))
        try:
            while data := impostor.recv(1 << 16):
                heard += data
        except (TimeoutError, ConnectionError):
            pass
        impostor.close()
    context.destroy(linger=0)
    assert heard.startswith(b"\xff"), "it speaks ZeroMQ"
    for word in (secret.token, "what only servers"):
        assert word.encode() not in heard
    assert all(key not in heard for side in ("server", "client") for key in secret.keys(side))


@pytest.mark.parametrize(
    ("host", "at"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("192.0.2.7", "0.0.0.0"),
        ("2001:db8::7", "[::]"),
        ("a-name.nobody.has", "0.0.0.0"),
    ],
)
def test_a_server_named_by_number_listens_there_alone(host: str, at: str) -> None:
    assert all_interfaces(host) == at


def test_an_address_that_is_taken_leaves_no_context_open() -> None:
    """A worker or a stage tries again with another context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen at {address}: .*; choose other --addresses"):
            serve(context, address, Secret("the token of these tests"), 100)
    assert context.closed


def test_a_message_that_nobody_reads_is_dropped_without_waiting() -> None:
    """A server that refuses this host, or is frozen, must not stop the thread that watches the connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sent: list[bool] = []

    def fill() -> None:
        peer = connect(context, "ipc://@a-server-that-is-not-there", Secret("the token of these tests"))
        while not sent or sent[-1]:
            sent.append(offer(peer, b"here"))
        peer.close()

    sender = threading.Thread(target=fill, daemon=True)
    sender.start()
    sender.join(20)
    assert not sender.is_alive(), f"message {len(sent)} waits"
    assert len(sent) > 1
    context.term()
