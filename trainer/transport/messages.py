"""What goes over the wire: a fixed header, then at most one body of raw floats or JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"PS1"
JSON_LIMIT_BYTES = 1 << 20


class Op(IntEnum):
    """JOIN..GIVE_UP: worker to server; HELLO..WRITTEN: server to server 0; STATUS..END: supervisor to server 0; the rest
    are answers, and the orders and loads that server 0 sends the other servers. END is answered by END. JOIN, HELLO and
    STATUS..END carry an introduction, and are answered by REFUSED where it is not this run's."""

    JOIN = 1
    PUSH = 2
    HEARTBEAT = 3
    GIVE_UP = 4
    HELLO = 10
    HELD = 11
    LOADED = 12
    WRITTEN = 13
    STATUS = 20
    LOST = 21
    END = 22
    PARAMETERS = 30
    STOP = 31
    REJOIN = 32
    CANCEL = 33
    INFO = 34
    REFUSED = 35
    LOAD = 40
    ORDER = 41


# In the header's ``flags``: the numbers lie in the memory that worker and server share, not in the body.
IN_MEMORY = 1

_HEADER = struct.Struct("<3sBBxxxiqqqqiidddQQi")


@dataclass(frozen=True)
class Header:
    """index: the worker's or server's number; session: grows with every join of a worker and start of a server;
    generation: grows with every roll-back; clock: of the worker; version: of the parameters; the rest: of a step;
    fingerprint, begun, passes: the rows of its mini-batch (see coordination/passes.py), passes -1 without them."""

    op: Op
    flags: int = 0
    index: int = -1
    session: int = 0
    generation: int = 0
    clock: int = 0
    version: int = 0
    examples: int = 0
    correct: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    read_s: float = 0.0
    fingerprint: int = 0
    begun: int = 0
    passes: int = -1

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            self.op,
            self.flags,
            self.index,
            self.session,
            self.generation,
            self.clock,
            self.version,
            self.examples,
            self.correct,
            self.loss,
            self.seconds,
            self.read_s,
            self.fingerprint,
            self.begun,
            self.passes,
        )


class Malformed(ValueError):
    """Bytes that no peer of this version sends."""


def unpack(data: bytes | memoryview) -> Header:
    """Raises Malformed."""
    if len(data) != _HEADER.size or bytes(data[:3]) != MAGIC:
        raise Malformed(f"a header of {len(data)} bytes")
    _, op, *rest = _HEADER.unpack(data)
    try:
        header = Header(Op(op), *rest)
    except ValueError:
        raise Malformed(f"operation {op}") from None
    if min(header.session, header.generation) < 0:
        raise Malformed(f"session {header.session}, generation {header.generation}")
    return header


def pack_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(data: bytes | memoryview) -> dict[str, Any]:
    """A JSON object. Raises Malformed."""
    if len(data) > JSON_LIMIT_BYTES:
        raise Malformed(f"{len(data)} bytes of JSON")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(value, dict):
        raise Malformed("no JSON object")
    return value
