"""The encryption of messages over TCP: a Noise handshake on every connection, then AES-256-GCM.

The handshake is Noise_NNpsk0_25519_AESGCM_SHA256 (https://noiseprotocol.org/noise.html, revision 34): both sides prove
that they have the run's token, of which the pre-shared key is a hash, and agree on keys by X25519 with key pairs that
exist for this connection only. It gives each direction a key of its own. The number of a record is its nonce, so that
no pair of key and nonce is ever used twice: not in another connection, process or direction, and not in a run that is
resumed with the same token.

On a connection, a record is a message of ZeroMQ. A message of the trainer is an opening record, which has the lengths of
all frames and the bytes of short ones, and then a record for each MiB of every longer frame. A receiver knows from the
records before which one comes next, so a record that is changed, repeated, left out, moved, cut or from another
connection or direction fails: the receiver logs a line, drops it with the keys of the connection, and both sides begin
with a handshake again. To the peers that is a broken connection, after which they send again what may be lost. The
key of a direction is replaced after REKEY_RECORDS records, far below the limit of AES-GCM.

Protects against whoever reads or changes the traffic of hosts but has no token: he can neither read a message nor have
one accepted. Who learns the token later cannot read what he recorded before. Does not protect against peers with the
token, nor hide when messages are sent and how long they are. Whoever can read the traffic also reads the password that
admits connections (see ``sockets``): with it he can connect, and cost the receiver the time to drop what he sends."""

from __future__ import annotations

import ctypes
import hmac
import logging
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

PROTOCOL = b"Noise_NNpsk0_25519_AESGCM_SHA256"
PROLOGUE = b"trainer records 1"
KEY_BYTES = 32
TAG_BYTES = 16
# Records of a MiB are decrypted while they are in the processor's cache, and while the next ones are on their way.
RECORD_BYTES = 1 << 20
SHORT_BYTES = 1 << 15  # frames below are sent in the opening record
REKEY_RECORDS = 1 << 16  # at most 2^32 blocks of AES per key
MOST_WAITING = 1000  # messages that wait for a handshake
MOST_SESSIONS = 1 << 16  # of a socket that listens; ZeroMQ does not tell it which connections have ended
MOST_RECORDS = 64  # that one call reads without a complete message, so that its caller can do other work
RETRY_S = 0.1  # after a failure

# The first frame of the messages of two frames; records have one frame.
HANDSHAKE_1 = b"1"
HANDSHAKE_2 = b"2"
RESET = b"R"  # the sender has no keys for what it received: the second frame says if that was a record or a handshake
RECORD = b"D"

Frame = bytes | bytearray | memoryview


class NotAuthenticError(ValueError):
    """Bytes that the other end of the connection has not sent in this place."""


# --- Noise ------------------------------------------------------------------------------------------------------------


def expand(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    """Return 32-byte keys by HKDF with HMAC-SHA256, as Noise defines it."""
    secret = hmac.digest(chaining_key, material, "sha256")
    keys = [b""]
    for number in range(1, outputs + 1):
        keys.append(hmac.digest(secret, keys[-1] + bytes([number]), "sha256"))
    return keys[1:]


def mark_of(message: Frame) -> bytes:
    """Return the part of an initiator's message by which it recognises the reply among those to earlier messages."""
    return bytes(message[:16])


def nonce_of(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "big")


class Cipher:
    """The key of one direction of a connection, with the number of the next record. A failure leaves it as it is."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    def encrypt(self, data: Frame) -> bytes:
        encrypted = self._aead.encrypt(nonce_of(self._number), data, None)
        self._advance()
        return encrypted

    def encrypt_into(self, data: Frame, target: memoryview) -> None:
        """Encrypt into ``target``, which is TAG_BYTES longer."""
        self._aead.encrypt_into(nonce_of(self._number), data, None, target)
        self._advance()

    def decrypt(self, record: Frame) -> bytes:
        """Raises NotAuthenticError."""
        try:
            data = self._aead.decrypt(nonce_of(self._number), record, None)
        except (InvalidTag, ValueError):
            raise NotAuthenticError("a record") from None
        self._advance()
        return data

    def decrypt_into(self, record: Frame, target: memoryview) -> None:
        """Decrypt into ``target``, whose content is undefined after a failure. Raises NotAuthenticError."""
        try:
            self._aead.decrypt_into(nonce_of(self._number), record, None, target)
        except (InvalidTag, ValueError):  # the latter for another length
            raise NotAuthenticError("a record") from None
        self._advance()

    def _advance(self) -> None:
        self._number += 1
        if self._number % REKEY_RECORDS == 0:
            self._aead = AESGCM(self._aead.encrypt(nonce_of((1 << 64) - 1), bytes(KEY_BYTES), None)[:KEY_BYTES])


class Session(NamedTuple):
    """The keys of a connection at one of its ends."""

    sending: Cipher
    receiving: Cipher


class _Handshake:
    """The state that both sides of a handshake compute: a chaining key, and a hash of all that was sent."""

    def __init__(self, psk: bytes, prologue: bytes, private: X25519PrivateKey | None) -> None:
        self._private = private or X25519PrivateKey.generate()
        self._chain = PROTOCOL
        self._hash = sha256(PROTOCOL + prologue).digest()
        self._chain, hashed, self._key = expand(self._chain, psk, 3)
        self._mix_hash(hashed)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = sha256(self._hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chain, self._key = expand(self._chain, material, 2)

    def _mix_public(self, public: bytes) -> None:
        self._mix_hash(public)
        self._mix_key(public)

    def _mix_shared(self, public: bytes) -> None:
        try:
            self._mix_key(self._private.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError:  # a point of small order
            raise NotAuthenticError("a handshake") from None

    def _write(self, payload: bytes, *, shared_with: bytes | None = None) -> bytes:
        public = self._private.public_key().public_bytes_raw()
        self._mix_public(public)
        if shared_with is not None:
            self._mix_shared(shared_with)
        # A key encrypts one payload, so that its nonce is 0.
        encrypted = AESGCM(self._key).encrypt(nonce_of(0), payload, self._hash)
        self._mix_hash(encrypted)
        return public + encrypted

    def _read(self, message: Frame, *, shares: bool) -> tuple[bytes, bytes]:
        """Return the public key and the payload of a message. Raises NotAuthenticError."""
        public, encrypted = bytes(message[:KEY_BYTES]), bytes(message[KEY_BYTES:])
        if len(encrypted) < TAG_BYTES:
            raise NotAuthenticError("a handshake")
        self._mix_public(public)
        if shares:
            self._mix_shared(public)
        try:
            payload = AESGCM(self._key).decrypt(nonce_of(0), encrypted, self._hash)
        except InvalidTag:
            raise NotAuthenticError("a handshake") from None
        self._mix_hash(encrypted)
        return public, payload

    def _split(self) -> tuple[Cipher, Cipher]:
        first, second = expand(self._chain, b"", 2)
        return Cipher(first), Cipher(second)


class Initiator(_Handshake):
    """The side that connects.

    Args:
        psk: the pre-shared key, 32 bytes.
        prologue: bytes on which both sides must agree.
        private: its key pair; None for a new one, which everything but a test must use.

    Attributes:
        message: the first message of the handshake.
    """

    def __init__(
        self, psk: bytes, prologue: bytes = PROLOGUE, private: X25519PrivateKey | None = None, payload: bytes = b""
    ) -> None:
        super().__init__(psk, prologue, private)
        self.message = self._write(payload)

    def finish(self, reply: Frame) -> Session:
        """Return the session, given the other side's message. Raises NotAuthenticError."""
        self._read(reply, shares=True)
        sending, receiving = self._split()
        return Session(sending, receiving)


class Responder(_Handshake):
    """The side that listens; arguments as of Initiator."""

    def __init__(self, psk: bytes, prologue: bytes = PROLOGUE, private: X25519PrivateKey | None = None) -> None:
        super().__init__(psk, prologue, private)

    def answer(self, message: Frame, payload: bytes = b"") -> tuple[bytes, Session]:
        """Return the reply to the first message, and the session. Raises NotAuthenticError."""
        public, _ = self._read(message, shares=False)
        reply = self._write(payload, shared_with=public)
        receiving, sending = self._split()
        return reply, Session(sending, receiving)


# --- messages ---------------------------------------------------------------------------------------------------------


class Buffers:
    """Memory for long frames, used again once nobody has a view of it: new pages cost more than the decryption."""

    def __init__(self) -> None:
        self._spare: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def lease(self, length: int) -> memoryview:
        """Return a view of so many bytes with undefined content."""
        fitting = [place for place, whole in enumerate(self._spare) if length <= len(whole) <= 2 * length]
        whole = self._spare.pop(fitting[-1]) if fitting else np.empty(length, np.uint8)
        view = whole[:length]
        # ``view`` lives as long as a memoryview or an array on it.
        weakref.finalize(view, self._spare.append, whole).atexit = False
        return view.data


def opening(frames: Sequence[Frame]) -> bytes:
    """Return the content of the record with which a message opens."""
    lengths = [len(frame) for frame in frames]
    short = [bytes(frame) for frame in frames if len(frame) < SHORT_BYTES]
    return struct.pack(f"<H{len(frames)}Q", len(frames), *lengths) + b"".join(short)


class Assembly:
    """The message that a connection is receiving.

    limit_bytes: length of the longest message; 0 for none."""

    def __init__(self, buffers: Buffers, limit_bytes: int) -> None:
        self._buffers = buffers
        self._limit_bytes = limit_bytes
        self._frames: list[memoryview] = []
        self._targets: deque[memoryview] = deque()  # the rest of each long frame that is not here yet

    def add(self, cipher: Cipher, record: Frame) -> list[memoryview] | None:
        """Decrypt the next record, and return the frames of its message if that is complete.

        Raises NotAuthenticError."""
        # After an opening record come the records of its long frames, and after them the next opening record.
        if self._targets:
            target = self._targets[0][:RECORD_BYTES]
            cipher.decrypt_into(record, target)
            self._targets[0] = self._targets[0][RECORD_BYTES:]
            if not self._targets[0]:
                self._targets.popleft()
        else:
            self._open(memoryview(cipher.decrypt(record)))
        if self._targets:
            return None
        frames = self._frames
        self._frames = []
        return frames

    def _open(self, data: memoryview) -> None:
        """Take over an opening record. Raises NotAuthenticError if no peer of this version sends it."""
        try:
            (count,) = struct.unpack_from("<H", data)
            lengths = struct.unpack_from(f"<{count}Q", data, 2)
        except struct.error:
            raise NotAuthenticError("an opening record") from None
        at = 2 + 8 * count
        shorts = sum(length for length in lengths if length < SHORT_BYTES)
        # Before any memory is allocated.
        if at + shorts != len(data) or (self._limit_bytes and sum(lengths) > self._limit_bytes):
            raise NotAuthenticError("an opening record")
        for length in lengths:
            if length < SHORT_BYTES:
                # A copy, which begins where numbers may be read.
                self._frames.append(memoryview(bytes(data[at : at + length])))
                at += length
            else:
                self._frames.append(self._buffers.lease(length))
                self._targets.append(self._frames[-1])


class ReceivedFrame:
    """A received frame, with the two attributes of zmq.Frame that its readers use."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    @property
    def bytes(self) -> bytes:
        return bytes(self.buffer)


# --- sockets ----------------------------------------------------------------------------------------------------------


class EncryptedSocket(zmq.Socket[bytes]):
    """A socket whose messages are encrypted; the base of both kinds.

    ``recv_multipart`` and ``poll`` see whole messages only. A zmq.Poller also sees single records, so that after it a
    message must be received with NOBLOCK."""

    # As class attributes, because a zmq.Socket takes no others.
    psk = b""
    limit_bytes = 0
    _buffers = Buffers()
    _scratch = memoryview(b"")
    _ready: deque[list[memoryview]] = deque()  # noqa: RUF012 (``prepare`` replaces it)

    def prepare(self, psk: bytes, limit_bytes: int) -> None:
        """Set what a socket needs before it listens or connects.

        limit_bytes: length of the longest message that it accepts; 0 for any."""
        self.psk = psk
        self.limit_bytes = limit_bytes
        self._scratch = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._ready = deque()
        self._buffers = Buffers()
        # One message of the trainer is many of ZeroMQ, none of which may be refused alone.
        self.sndhwm = 0
        keep_freed_memory()

    def poll(self, timeout: float | None = None, flags: int = zmq.POLLIN) -> int:
        """Wait until a whole message is here, for so many milliseconds at most. Returns POLLIN or 0."""
        due = None if timeout is None or timeout < 0 else time.monotonic() + timeout / 1000
        while not self._fetch():
            left = None if due is None else due - time.monotonic()
            if left is not None and left <= 0:
                return 0
            # Not for ever, because a handshake may have to begin again.
            super().poll(int(1000 * (RETRY_S if left is None else min(left, RETRY_S))))
        return int(zmq.POLLIN)

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        """Return the frames of the next message: bytes, or with copy=False objects with a ``buffer``.

        Raises zmq.Again with NOBLOCK if no whole message is here."""
        while not self._fetch():
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            self.poll()
        frames = self._ready.popleft()
        return [bytes(frame) for frame in frames] if copy else [ReceivedFrame(frame) for frame in frames]

    # Those of ZeroMQ would send in clear text.
    def send(  # type: ignore[override]
        self, data: Any, flags: int = 0, copy: bool = True, track: bool = False, **_: Any
    ) -> None:
        """Send a message of one frame."""
        self.send_multipart([data], flags, copy)

    def recv(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        """Return the first frame of the next message; otherwise as ``recv_multipart``."""
        return self.recv_multipart(flags, copy)[0]

    def _fetch(self) -> bool:
        """Read what has arrived up to the end of a message. Returns whether a whole message is here."""
        self._look()
        for _ in range(MOST_RECORDS):
            if self._ready:
                break
            try:
                frames = [super().recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                break
            while frames[-1].more:
                frames.append(super().recv(copy=False))
            self._take([frame.buffer for frame in frames])
        return bool(self._ready)

    def _look(self) -> None:
        """Do what must be done from time to time."""

    def _take(self, frames: list[memoryview]) -> None:
        """Handle a message of ZeroMQ."""
        raise NotImplementedError

    def _send_records(self, to: list[bytes], cipher: Cipher, frames: Sequence[Frame]) -> None:
        """Encrypt and send a message. Raises zmq.Again if the connection was refused.

        to: the frames before each record."""
        views = [memoryview(frame).cast("B") for frame in frames]
        self._send_raw([*to, cipher.encrypt(opening(views))])
        for view in views:
            if len(view) < SHORT_BYTES:
                continue
            for begin in range(0, len(view), RECORD_BYTES):
                data = view[begin : begin + RECORD_BYTES]
                record = self._scratch[: len(data) + TAG_BYTES]
                cipher.encrypt_into(data, record)
                self._send_raw([*to, record])

    def _send_raw(self, frames: Sequence[Frame]) -> None:
        for frame in frames[:-1]:
            super().send(frame, zmq.NOBLOCK | zmq.SNDMORE)
        super().send(frames[-1], zmq.NOBLOCK)


class EncryptedRouter(EncryptedSocket):
    """A ROUTER that answers handshakes, with a session per connection."""

    _sessions: dict[bytes, tuple[Session, Assembly]] = {}  # noqa: RUF012 (``prepare`` replaces it)

    _is_mandatory = False

    def prepare(self, psk: bytes, limit_bytes: int) -> None:
        super().prepare(psk, limit_bytes)
        self._sessions = {}

    @property
    def router_mandatory(self) -> bool:
        """ZeroMQ's option, which it does not tell."""
        return self._is_mandatory

    @router_mandatory.setter
    def router_mandatory(self, value: bool) -> None:
        self._is_mandatory = value
        self.setsockopt(zmq.ROUTER_MANDATORY, int(value))

    def send_multipart(self, msg_parts: Any, flags: int = 0, copy: bool = True, track: bool = False, **_: Any) -> None:
        """Send a message to the connection that its first frame names; it is dropped if that has no session.

        Raises zmq.ZMQError in that case if the option ROUTER_MANDATORY is set."""
        identity = bytes(msg_parts[0])
        if existing := self._sessions.get(identity):
            self._send_records([identity], existing[0].sending, msg_parts[1:])
        elif self._is_mandatory:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def _take(self, frames: list[memoryview]) -> None:
        identity = bytes(frames[0])
        if len(frames) == 3 and frames[1] == HANDSHAKE_1:
            self._answer(identity, frames[2])
        elif len(frames) == 2:
            self._receive(identity, frames[1])

    def _answer(self, identity: bytes, message: memoryview) -> None:
        """Begin a session, which replaces the connection's earlier one."""
        self._sessions.pop(identity, None)
        try:
            reply, session = Responder(self.psk).answer(message)
        except NotAuthenticError as error:
            return self._reset(identity, HANDSHAKE_1, error)
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[identity] = session, Assembly(self._buffers, self.limit_bytes)
        return self._reply([identity, HANDSHAKE_2 + mark_of(message), reply])

    def _receive(self, identity: bytes, record: memoryview) -> None:
        existing = self._sessions.get(identity)
        if not existing:  # sent before the peer knew that its connection is a new one
            return self._reply([identity, RESET, RECORD])
        session, assembly = existing
        try:
            frames = assembly.add(session.receiving, record)
        except NotAuthenticError as error:
            del self._sessions[identity]
            return self._reset(identity, RECORD, error)
        if frames is not None:
            self._ready.append([memoryview(identity), *frames])
        return None

    def _reset(self, identity: bytes, cause: bytes, error: NotAuthenticError) -> None:
        logger.warning(f"dropped {error} that no peer with the run's token has sent in this place of its connection")
        self._reply([identity, RESET, cause])

    def _reply(self, frames: list[bytes]) -> None:
        try:
            self._send_raw(frames)
        except zmq.ZMQError:  # the connection has ended
            self._sessions.pop(frames[0], None)


class EncryptedDealer(EncryptedSocket):
    """A DEALER that begins a handshake on each connection. Messages wait for the end of the handshake.

    Attributes:
        look_at_events: reads the events of the connection, and calls ``restart`` if it broke.
        is_reset: whether the connection's keys were dropped since the reader of this flag cleared it, so that messages
            may be lost.
    """

    look_at_events: Callable[[], object] | None = None
    is_reset = False
    _handshake: Initiator | None = None
    _session: Session | None = None
    _assembly: Assembly | None = None
    _waiting: deque[list[bytes]] = deque()  # noqa: RUF012 (``prepare`` replaces it)
    _retry_at = 0.0

    def prepare(self, psk: bytes, limit_bytes: int) -> None:
        super().prepare(psk, limit_bytes)
        self._waiting = deque()

    def connect(self, addr: str) -> Any:
        connected = super().connect(addr)
        self.restart()
        return connected

    def restart(self) -> None:
        """Drop the keys and begin a handshake, which ZeroMQ sends as soon as there is a connection."""
        self._session = None
        self._assembly = None
        self._handshake = Initiator(self.psk)
        try:
            self._send_raw([HANDSHAKE_1, self._handshake.message])
        except zmq.Again:  # the peer has refused the connection
            self._handshake = None
            self._retry_at = time.monotonic() + RETRY_S

    def send_multipart(self, msg_parts: Any, flags: int = 0, copy: bool = True, track: bool = False, **_: Any) -> None:
        """Send a message, or keep a copy until the handshake ends. Raises zmq.Again as ``offer`` expects it."""
        self._look()
        if not self._session:
            self.progress()
        if self._session:
            return self._send_records([], self._session.sending, msg_parts)
        if not self._handshake or len(self._waiting) >= MOST_WAITING:
            raise zmq.Again
        self._waiting.append([bytes(frame) for frame in msg_parts])
        return None

    def progress(self) -> None:
        """Go on with the handshake. For sockets on which nothing else is received."""
        self._fetch()

    @property
    def is_established(self) -> bool:
        return self._session is not None

    def _look(self) -> None:
        if self.look_at_events:
            self.look_at_events()
        if not self._session and not self._handshake and time.monotonic() >= self._retry_at and self.psk:
            self.restart()

    def _take(self, frames: list[memoryview]) -> None:
        try:
            if len(frames) == 2 and self._handshake and frames[0] == HANDSHAKE_2 + mark_of(self._handshake.message):
                self._session = self._handshake.finish(frames[1])
                self._handshake = None
                self._assembly = Assembly(self._buffers, self.limit_bytes)
                while self._waiting:
                    self._send_records([], self._session.sending, self._waiting.popleft())
            elif len(frames) == 2 and frames[0] == RESET:
                # A record of the connection before may cause this answer, and precede the handshake that is under way.
                if self._session or frames[1] == HANDSHAKE_1:
                    self._fail()
            elif len(frames) == 1 and self._session and self._assembly:
                message = self._assembly.add(self._session.receiving, frames[0])
                if message is not None:
                    self._ready.append(message)
        except NotAuthenticError as error:
            logger.warning(
                f"dropped {error} that no server with the run's token has sent in this place of its connection"
            )
            self._fail()

    def _fail(self) -> None:
        self.is_reset = True
        self._session = None
        self._assembly = None
        self._handshake = None
        self._retry_at = time.monotonic() + RETRY_S


# --- memory -----------------------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD = -1  # of mallopt(3)
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Have glibc keep the memory of records instead of returning it to the kernel after each, which doubles their cost.

    Does nothing with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, 2 * RECORD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
