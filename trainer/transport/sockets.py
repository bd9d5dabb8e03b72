"""Sockets: a ROUTER at the fixed address of a server, a DEALER at each of its peers; libzmq reconnects by itself.

A run's token admits peers and is never sent. A client sends a password that is derived from it, and ends up refused if
it is another one. A password is valid for a single private address, where only this run's servers can listen, or for
all TCP addresses. Over TCP that only keeps strangers away: messages are encrypted with keys that both sides have only
if they know the token (see ``encryption``), and a peer without them is not heard.

With --encryption off, whoever can read the traffic can read the messages, and with the password of such runs send
some; servers do not prove that they have the token."""

from __future__ import annotations

import hashlib
import os
import socket as sockets
import time
from dataclasses import dataclass
from typing import Any, Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from pipeline.core.errors import UsageError
from trainer.transport.addresses import LOOPBACK, PRIVATE, is_ipv6, listening
from trainer.transport.encryption import RECORD_BYTES, EncryptedDealer, EncryptedRouter

DOMAIN = "trainer"
Frame = bytes | memoryview
OVERHEAD_BYTES = 1 << 20
# Fewer, larger pieces save a sixth of the CPU time per megabyte. For a network the kernel sizes its buffers better.
LOCAL_BUFFER_BYTES = 4 << 20

BAD_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
OTHER_ENCRYPTION = 500  # a value of EVENT_HANDSHAKE_FAILED_AUTH; a wrong password has 400
WATCHED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | BAD_HANDSHAKE | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
SAME_TOKEN = "give every host the same --token-file"
IN_CLEAR = (
    "warning: --encryption off: gradients, parameters and a password cross networks in clear text, and whoever reads the"
    " password can join the run; use it only on networks that you trust"
)
# After a server's death a single handshake fails; with a proxy all do until there is a server behind it.
REFUSED_AFTER = 5
REFUSED_AFTER_S = 30.0


_AUTHENTICATORS: dict[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator] = {}  # of the contexts that listen


@dataclass(frozen=True)
class Secret:
    """The token of a run, and the keys and passwords that are derived from it.

    encryption: whether TCP connections are encrypted; private ones never are."""

    token: str
    encryption: Literal["on", "off"] = "on"

    def encrypts(self, address: str) -> bool:
        """Return whether the messages of an address are encrypted."""
        return self.encryption == "on" and not PRIVATE.fullmatch(address)

    def pre_shared_key(self) -> bytes:
        """Return the 32 bytes with which both ends of an encrypted connection prove that they have the token."""
        return hashlib.sha256(f"pre-shared key:{self.token}".encode()).digest()

    def user(self, address: str) -> str:
        """Return the user name that clients of an address send, by which a server tells another --encryption."""
        return "encrypted" if self.encrypts(address) else "run"

    def password(self, address: str) -> str:
        """Return the password of a private address, or that of all TCP addresses. It does not reveal the token."""
        # Not of a single TCP address, because hosts may know a server by different names.
        place = address if PRIVATE.fullmatch(address) else "encrypted tcp" if self.encrypts(address) else "tcp"
        return hashlib.sha256(f"{place}:{self.token}".encode()).hexdigest()


class _Authenticator(ThreadAuthenticator):
    """Admits peers by their password, and tells those with another user name why they are refused."""

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        code = str(OTHER_ENCRYPTION).encode() if status_text == b"Invalid username" else status_code
        super()._send_zap_reply(request_id, code, status_text, user_id)


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
    authenticator = _AUTHENTICATORS[context] = _Authenticator(context)
    authenticator.start()
    authenticator.configure_plain(domain=DOMAIN, passwords={secret.user(address): secret.password(address)})
    socket = _socket(context, zmq.ROUTER, address, secret, ipv6=ipv6, limit_bytes=body_bytes + OVERHEAD_BYTES)
    socket.zap_domain = DOMAIN.encode()
    # Of what strangers could send; an encrypted socket checks the lengths of messages once it knows who sends them.
    socket.maxmsgsize = OVERHEAD_BYTES + (RECORD_BYTES if secret.encrypts(address) else body_bytes)
    socket.plain_server = True
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
    """Return a connected DEALER socket, whose connection nobody watches."""
    socket = dealer(context, address, secret)
    if secret.encrypts(address):
        Watch(socket)  # which the socket holds, because every connection begins with a handshake
    socket.connect(address)
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, secret: Secret) -> zmq.Socket[bytes]:
    """Return a DEALER socket with the credentials for an address, not connected yet. Needs a Watch before it is."""
    socket = _socket(context, zmq.DEALER, address, secret, ipv6=is_ipv6(address))
    socket.plain_username = secret.user(address).encode()
    socket.plain_password = secret.password(address).encode()
    return socket


def progress(socket: zmq.Socket[bytes]) -> None:
    """Go on with the handshake of a socket from which nothing is received."""
    if isinstance(socket, EncryptedDealer):
        socket.progress()


def offer(socket: zmq.Socket[bytes], *frames: Frame, copy: bool = True) -> bool:
    """Send without blocking. Returns False if the peer has refused the connection, or has 1000 unread messages."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return False
    return True


class Watch:
    """A monitor of a socket's connection. Create it before the socket connects, or the first events may be missed.

    down_since: since when there is no connection (monotonic seconds), as of the last ``has_broken``; None if there is
    one."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.monitor = socket.get_monitor_socket(WATCHED)
        self.down_since: float | None = time.monotonic()
        self._bad_handshakes: list[float] = []  # times of failed handshakes since the last good one (monotonic seconds)
        self._is_broken = False
        self._problem: UsageError | None = None
        self._encrypted = socket if isinstance(socket, EncryptedDealer) else None
        if self._encrypted:
            self._encrypted.look_at_events = self.look

    def has_broken(self) -> bool:
        """Return whether the connection broke since the last call. Raises UsageError if the server rejects us."""
        self.look()
        if self._problem:
            raise self._problem
        is_broken = self._is_broken
        self._is_broken = False
        if self._encrypted:
            self._encrypted.progress()
            is_broken |= self._encrypted.is_reset
            self._encrypted.is_reset = False
        return is_broken

    def look(self) -> None:
        """Read the events that have occurred. An encrypted socket calls it too, as a new connection needs new keys."""
        while self.monitor.poll(0):
            notice = recv_monitor_message(self.monitor)
            event = notice["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._bad_handshakes.clear()
                self.down_since = None
                continue
            # All other WATCHED events are failures. Before a handshake nothing was sent that must be repeated.
            self._is_broken = True
            if self._encrypted and self.down_since is None:
                self._encrypted.restart()
            self.down_since = time.monotonic() if self.down_since is None else self.down_since
            # Raised at once, because libzmq does not reconnect after such an answer.
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = UsageError(
                    "the servers have another --encryption than this host: give every host the same"
                    if notice["value"] == OTHER_ENCRYPTION
                    else f"the servers refuse the token of this host: {SAME_TOKEN}"
                )
            if event & BAD_HANDSHAKE:  # only a long series of them shows that no server of the run is there
                self._bad_handshakes.append(time.monotonic())
                if len(self._bad_handshakes) >= REFUSED_AFTER and self._lasted() >= REFUSED_AFTER_S:
                    self._problem = UsageError(
                        f"the servers end every connection of this host, for {self._lasted():.0f} s: {SAME_TOKEN}"
                    )

    def _lasted(self) -> float:
        return self._bad_handshakes[-1] - self._bad_handshakes[0]


def _socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: str,
    secret: Secret,
    *,
    ipv6: bool,
    limit_bytes: int = 0,
) -> zmq.Socket[bytes]:
    """Return an unconnected socket with the buffers, timeouts and heartbeats that all sockets of a run have.

    limit_bytes: length of the longest message that an encrypted socket accepts; 0 for any."""
    if secret.encrypts(address):
        kind_class = EncryptedRouter if kind == zmq.ROUTER else EncryptedDealer
        encrypted: Any = context.socket(kind, socket_class=kind_class)
        encrypted.prepare(secret.pre_shared_key(), limit_bytes)
        socket: zmq.Socket[bytes] = encrypted
    else:
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
