"""The wire format: a fixed header, then at most one body of raw floats or JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

MAGIC = b"PS1"
JSON_LIMIT_BYTES = 1 << 20


class Op(IntEnum):
    """The operation of a message.

    JOIN..GIVE_UP go from worker to server, HELLO..WRITTEN from server to server 0, STATUS..END from supervisor to
    server 0. The rest are replies, and LOAD and ORDER from server 0 to the other servers. The reply to END is END.
    JOIN, HELLO and STATUS..END carry an introduction; the reply to an introduction of another run is REFUSED."""

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


# A bit of the header's ``flags``: the floats are in the shared memory of worker and server, not in the body.
IN_MEMORY = 1

_HEADER = struct.Struct("<3sBBxxxiqqqqiidddQQi")


@dataclass(frozen=True)
class Header:
    """The fixed header of a message.

    Attributes:
        op: operation.
        flags: see IN_MEMORY.
        index: number of the worker or server.
        session: grows with every join of a worker and every start of a server.
        generation: grows with every roll-back.
        clock: of the worker.
        version: of the parameters.
        examples, correct, loss: examples of the step's mini-batch, correct predictions, mean loss.
        seconds, read_s: duration of the step, and of reading its mini-batch.
        fingerprint, begun, passes: rows of the mini-batch (see coordination/passes.py); passes is -1 if unknown.
    """

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
    """A message that no peer of this version sends."""


def unpack(data: bytes | memoryview) -> Header:
    """Parse a header. Raises Malformed."""
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
    """Parse a JSON object of at most JSON_LIMIT_BYTES. Raises Malformed."""
    if len(data) > JSON_LIMIT_BYTES:
        raise Malformed(f"{len(data)} bytes of JSON")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(value, dict):
        raise Malformed("no JSON object")
    return value
