"""Sockets: ROUTER at a server's fixed address, DEALER at everyone who talks to it; libzmq reconnects by itself.

A run's token admits peers, and never leaves a process as it is. It becomes the key pairs of CurveZMQ, with which both sides
prove themselves before a word is said, so that nothing crosses a network in the clear and nobody without the token is
heard. That triples the CPU time of large messages. A private address, which nobody but this run's servers can listen at,
is therefore spared it: there a password of that address is sent, and admits to nothing else."""

from __future__ import annotations

import hashlib
import os
import socket as sockets
import time
from dataclasses import dataclass

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pipeline.core.errors import UsageError
from trainer.transport.addresses import LOOPBACK, PRIVATE, is_ipv6, listening

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


@dataclass(frozen=True)
class Secret:
    """The run's token and what follows from it."""

    token: str

    def keys(self, side: str) -> tuple[bytes, bytes]:
        """(public, secret) key of the servers or the clients of this run, in Z85."""
        secret = z85.encode(hashlib.sha256(f"{side}:{self.token}".encode()).digest())
        return zmq.curve_public(secret), secret

    def password(self, address: str) -> str:
        """Of a private address; it tells nothing of the token."""
        return hashlib.sha256(f"{address}:{self.token}".encode()).hexdigest()


class _OneClient:
    """The one client key that CurveZMQ admits."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def serve(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    secret: Secret,
    body_bytes: int,
    held: sockets.socket | None = None,
) -> zmq.Socket[bytes]:
    """A socket that hears only who knows the token, and drops connections that send more than a slice. held: what
    ``addresses.hold`` gave for the address."""
    bound, ipv6 = listening(address)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    socket = _socket(context, zmq.ROUTER, address, ipv6=ipv6)
    socket.zap_domain = DOMAIN.encode()
    socket.maxmsgsize = body_bytes + OVERHEAD_BYTES
    if PRIVATE.fullmatch(address):
        authenticator.configure_plain(domain=DOMAIN, passwords={"run": secret.password(address)})
        socket.plain_server = True
    else:
        authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=_OneClient(secret.keys("client")[0]))
        socket.curve_publickey, socket.curve_secretkey = secret.keys("server")
        socket.curve_server = True
    if held:
        socket.use_fd = held.detach()
    try:
        socket.bind(bound)
    except zmq.ZMQError as error:
        raise UsageError(
            f"cannot listen at {address}: {os.strerror(error.errno or 0)}; choose other --addresses"
        ) from None
    return socket


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    socket = dealer(context, address, secret)
    socket.connect(address)
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    """A socket that may talk to an address, not connected yet."""
    socket = _socket(context, zmq.DEALER, address, ipv6=is_ipv6(address))
    if PRIVATE.fullmatch(address):
        socket.plain_username, socket.plain_password = b"run", secret.password(address).encode()
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


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, *, ipv6: bool) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.ipv6 = ipv6
    if LOOPBACK.fullmatch(address):
        socket.sndbuf = socket.rcvbuf = LOCAL_BUFFER_BYTES
    socket.linger = 0
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 20_000  # a peer whose host is gone ends its connection
    return socket
