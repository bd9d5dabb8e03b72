"""Sockets: a ROUTER at the fixed address of a server, a DEALER at each of its peers; libzmq reconnects by itself.

A run's token admits peers and is never sent. CurveZMQ's key pairs are derived from it; both sides authenticate with
them before any message, so that nothing crosses a network unencrypted and messages of peers without the token are
dropped. That triples the CPU time of large messages. It is therefore not used at a private address, where only this
run's servers can listen: there the client sends a password that is valid only for that address.

With --encryption off, TCP clients send a password too. Peers without the token are still refused, but whoever can read
the traffic can read the password, and servers do not prove that they have the token."""

from __future__ import annotations

import hashlib
import os
import socket as sockets
import time
from dataclasses import dataclass
from typing import Literal

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
# Fewer, larger pieces save a sixth of the CPU time per megabyte. For a network the kernel sizes its buffers better.
LOCAL_BUFFER_BYTES = 4 << 20

BAD_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
OTHER_MECHANISM = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH  # a value of EVENT_HANDSHAKE_FAILED_PROTOCOL
WATCHED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | BAD_HANDSHAKE | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
SAME_TOKEN = "give every host the same --token-file"
IN_CLEAR = (
    "warning: --encryption off: gradients, parameters and a password cross networks in clear text, and whoever reads the"
    " password can join the run; use it only on networks that you trust"
)
# CurveZMQ does not say why a handshake failed: with a wrong token each one does, after a server's death a single one,
# and with a proxy all until there is a server behind it.
REFUSED_AFTER = 5
REFUSED_AFTER_S = 30.0


_AUTHENTICATORS: dict[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator] = {}  # of the contexts that listen


@dataclass(frozen=True)
class Secret:
    """The token of a run, and the keys and passwords that are derived from it.

    encryption: whether TCP connections are encrypted; private ones never are."""

    token: str
    encryption: Literal["on", "off"] = "on"

    def sends_password(self, address: str) -> bool:
        """Return whether the clients of an address send a password, without encryption, instead of using keys."""
        return self.encryption == "off" or PRIVATE.fullmatch(address) is not None

    def keys(self, side: str) -> tuple[bytes, bytes]:
        """Return the (public, secret) keys of this run's servers or clients, in Z85."""
        secret = z85.encode(hashlib.sha256(f"{side}:{self.token}".encode()).digest())
        return zmq.curve_public(secret), secret

    def password(self, address: str) -> str:
        """Return the password of a private address, or the one of all TCP addresses. It does not reveal the token."""
        # Not of a single TCP address, because hosts may know a server by different names.
        place = address if PRIVATE.fullmatch(address) else "tcp"
        return hashlib.sha256(f"{place}:{self.token}".encode()).hexdigest()


class _OneClient:
    """A credentials provider for CurveZMQ that admits a single client key."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def serve(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    secret: Secret,
    body_bytes: int,
    listener: sockets.socket | None = None,
) -> zmq.Socket[bytes]:
    """Return a listening ROUTER socket for peers with the token. Raises UsageError if it cannot listen.

    Args:
        context: the context of the socket.
        address: a private or tcp:// address.
        secret: the token of the run.
        body_bytes: size of the largest body; peers that send much more are disconnected.
        listener: a socket that already listens at the address (see ``addresses.hold``); None to bind the address here.
    """
    bound, ipv6 = listening(address)
    authenticator = _AUTHENTICATORS[context] = ThreadAuthenticator(context)
    authenticator.start()
    socket = _socket(context, zmq.ROUTER, address, ipv6=ipv6)
    socket.zap_domain = DOMAIN.encode()
    socket.maxmsgsize = body_bytes + OVERHEAD_BYTES
    if secret.sends_password(address):
        authenticator.configure_plain(domain=DOMAIN, passwords={"run": secret.password(address)})
        socket.plain_server = True
    else:
        authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=_OneClient(secret.keys("client")[0]))
        socket.curve_publickey, socket.curve_secretkey = secret.keys("server")
        socket.curve_server = True
    if listener:
        socket.use_fd = listener.detach()  # libzmq owns the descriptor from here on
    try:
        socket.bind(bound)
    except zmq.ZMQError as error:
        close(context)  # the caller may try again
        raise UsageError(
            f"cannot listen at {address}: {os.strerror(error.errno or 0)}; choose other --addresses"
        ) from None
    return socket


def close(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close all sockets of a context, at once, and end the thread that admits their peers."""
    if authenticator := _AUTHENTICATORS.pop(context, None):
        authenticator.stop()
    context.destroy(linger=0)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    socket = dealer(context, address, secret)
    socket.connect(address)
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    """Return a DEALER socket with the credentials for an address, not connected yet."""
    socket = _socket(context, zmq.DEALER, address, ipv6=is_ipv6(address))
    if secret.sends_password(address):
        socket.plain_username = b"run"
        socket.plain_password = secret.password(address).encode()
    else:
        socket.curve_serverkey = secret.keys("server")[0]
        socket.curve_publickey, socket.curve_secretkey = secret.keys("client")
    return socket


def offer(socket: zmq.Socket[bytes], *frames: Frame, copy: bool = True) -> bool:
    """Send without blocking. Returns False if the peer has refused the connection, or has 1000 unread messages."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    return True


class Watch:
    """A monitor of a socket's connection. Create it before the socket connects, or the first events may be missed.

    Close it before the socket, unless the whole context ends: libzmq's thread, which serves all sockets of the context,
    would wait for ever to report an event to a monitor whose receiver is closed.

    Attributes:
        down_since: since when there is no connection (monotonic seconds), as of the last ``has_broken``; None if there is
            one.
        losses: the number of connections that broke after their handshake, since the owner last set it to 0.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.monitor = socket.get_monitor_socket(WATCHED)
        self.down_since: float | None = time.monotonic()
        self.losses = 0
        self._bad_handshakes: list[float] = []  # times of failed handshakes since the last good one (monotonic seconds)

    def close(self) -> None:
        """Stop watching. The socket must still be open."""
        self._socket.disable_monitor()  # first, so that libzmq's thread reports nothing more
        self.monitor.close(linger=0)

    def has_broken(self) -> bool:
        """Return whether the connection broke since the last call. Raises UsageError if the server rejects us."""
        is_broken = False
        while self.monitor.poll(0):
            notice = recv_monitor_message(self.monitor)
            event = notice["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._bad_handshakes.clear()
                self.down_since = None
                continue
            # All other WATCHED events are failures.
            is_broken = True
            if self.down_since is None:
                self.down_since = time.monotonic()
                self.losses += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise UsageError(f"the servers refuse the token of this host: {SAME_TOKEN}")
            # Raised at once, because libzmq does not reconnect after such an answer.
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and notice["value"] == OTHER_MECHANISM:
                raise UsageError("the servers have another --encryption than this host: give every host the same")
            if event & BAD_HANDSHAKE:  # only a long series of them shows a wrong token (see REFUSED_AFTER)
                self._bad_handshakes.append(time.monotonic())
                if len(self._bad_handshakes) >= REFUSED_AFTER and self._lasted() >= REFUSED_AFTER_S:
                    raise UsageError(
                        f"the servers end every connection of this host, for {self._lasted():.0f} s: {SAME_TOKEN}"
                    )
        return is_broken

    def _lasted(self) -> float:
        return self._bad_handshakes[-1] - self._bad_handshakes[0]


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, *, ipv6: bool) -> zmq.Socket[bytes]:
    """Return an unconnected socket with the buffers, timeouts and heartbeats that all sockets of a run have."""
    socket = context.socket(kind)
    socket.ipv6 = ipv6
    if LOOPBACK.fullmatch(address):
        socket.sndbuf = socket.rcvbuf = LOCAL_BUFFER_BYTES
    socket.linger = 0
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    # ends the connection of a peer whose host is gone
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 20_000
    return socket
