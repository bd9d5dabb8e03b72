"""Sockets: ROUTER at a server's fixed address, DEALER at everyone who talks to it; libzmq reconnects by itself.

A run's token admits peers. On loopback it goes as a password; beyond, it becomes the key pairs of CurveZMQ, so that
nothing crosses a network in the clear and nobody without the token is heard."""

from __future__ import annotations

import hashlib
import os
import re
import socket as sockets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pipeline.errors import UsageError

LOCAL = re.compile(r"ipc://.+|tcp://(127\.\d+\.\d+\.\d+|\[::1\]|localhost):\d+")
DOMAIN = "trainer"
Frame = bytes | memoryview
OVERHEAD_BYTES = 1 << 20
# Fewer, larger pieces: a sixth less CPU a megabyte. Over a network the kernel knows better what is on its way.
LOCAL_BUFFER_BYTES = 4 << 20

BAD_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
WATCHED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | BAD_HANDSHAKE | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
SAME_TOKEN = "give every host the same --token-file"
# CurveZMQ does not say why it ends a handshake: a wrong token does it every time, a server that dies once, and a proxy
# for as long as there is no server behind it.
REFUSED_AFTER, REFUSED_AFTER_S = 5, 30.0


def local_addresses(run: str, servers: int) -> list[str]:
    """Addresses that only this machine reaches: abstract sockets, which leave no file and no port; elsewhere ports."""
    if sys.platform == "linux":
        return [f"ipc://@trainer-{run}-{index}" for index in range(servers)]
    return [f"tcp://127.0.0.1:{port}" for port in _free_ports(servers)]


def _free_ports(count: int) -> list[int]:
    held = [sockets.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def check_addresses(addresses: Sequence[str], servers: int) -> None:
    """Raises UsageError."""
    if len(addresses) != servers:
        raise UsageError(f"--addresses names {len(addresses)} servers, --servers {servers}: give one address a server")
    for address in addresses:
        if not re.fullmatch(r"ipc://.+|tcp://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", address):
            raise UsageError(f"--addresses: {address!r} is not tcp://HOST:PORT")


@dataclass(frozen=True)
class Secret:
    """The run's token and what follows from it."""

    token: str

    def keys(self, side: str) -> tuple[bytes, bytes]:
        """(public, secret) key of the servers or the clients of this run, in Z85."""
        secret = z85.encode(hashlib.sha256(f"{side}:{self.token}".encode()).digest())
        return zmq.curve_public(secret), secret


class _OneClient:
    """The one client key that CurveZMQ admits."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def serve(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret, body_bytes: int) -> zmq.Socket[bytes]:
    """A bound socket that hears only who knows the token, and drops connections that send more than a slice."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    socket = _socket(context, zmq.ROUTER, address)
    socket.zap_domain = DOMAIN.encode()
    socket.maxmsgsize = body_bytes + OVERHEAD_BYTES
    if LOCAL.fullmatch(address):
        authenticator.configure_plain(domain=DOMAIN, passwords={"run": secret.token})
        socket.plain_server = True
    else:
        authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=_OneClient(secret.keys("client")[0]))
        socket.curve_publickey, socket.curve_secretkey = secret.keys("server")
        socket.curve_server = True
    try:
        socket.bind(_bindable(address))
    except zmq.ZMQError as error:
        raise UsageError(
            f"cannot listen at {address}: {os.strerror(error.errno or 0)}; choose other --addresses"
        ) from None
    return socket


def _bindable(address: str) -> str:
    """libzmq binds to numeric addresses and interfaces only."""
    found = re.fullmatch(r"tcp://([A-Za-z][\w.-]*):(\d+)", address)
    if not found:
        return address
    try:
        return f"tcp://{sockets.gethostbyname(found[1])}:{found[2]}"
    except OSError:
        raise UsageError(f"--addresses: the host {found[1]!r} is not known here") from None


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    socket = dealer(context, address, secret)
    socket.connect(address)
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    """A socket that may talk to an address, not connected yet."""
    socket = _socket(context, zmq.DEALER, address)
    if LOCAL.fullmatch(address):
        socket.plain_username, socket.plain_password = b"run", secret.token.encode()
    else:
        socket.curve_serverkey = secret.keys("server")[0]
        socket.curve_publickey, socket.curve_secretkey = secret.keys("client")
    return socket


def offer(socket: zmq.Socket[bytes], *frames: Frame, copy: bool = True) -> bool:
    """Send without ever waiting; False if the peer has refused this connection, or has not read a thousand messages."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    return True


class Watch:
    """What becomes of a connection; made before the socket connects, or the first events may be missed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.monitor = socket.get_monitor_socket(WATCHED)
        self._bad_handshakes: list[float] = []  # when, since the last good one

    def has_broken(self) -> bool:
        """Whether the connection broke since the last call. Raises UsageError if the server does not admit us."""
        broken = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._bad_handshakes.clear()
                continue
            broken = True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise UsageError(f"the servers refuse the token of this host: {SAME_TOKEN}")
            if event & BAD_HANDSHAKE:
                self._bad_handshakes.append(time.monotonic())
                if len(self._bad_handshakes) >= REFUSED_AFTER and self._lasted() >= REFUSED_AFTER_S:
                    raise UsageError(
                        f"the servers end every connection of this host, for {self._lasted():.0f} s: {SAME_TOKEN}"
                    )
        return broken

    def _lasted(self) -> float:
        return self._bad_handshakes[-1] - self._bad_handshakes[0]


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    if LOCAL.fullmatch(address):
        socket.sndbuf = socket.rcvbuf = LOCAL_BUFFER_BYTES
    socket.linger = 0
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 20_000  # a peer whose host is gone ends its connection
    return socket
