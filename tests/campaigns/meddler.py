"""A TCP connection on which somebody changes the messages of ZeroMQ."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from typing import NamedTuple

from tests.campaigns.cable import Cable

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame of ZMTP 3
GREETING_BYTES = 64


class Frame(NamedTuple):
    """A frame on its way. flags: MORE or 0; forward: whether it goes to the side that listens."""

    flags: int
    body: bytes
    forward: bool


Meddle = Callable[[Frame], list[Frame]]


class Meddler(Cable):
    """A cable that sends on what ``meddle`` returns instead of each frame. Commands of ZeroMQ pass unchanged."""

    def __init__(self, to: int, meddle: Meddle) -> None:
        self.meddle = meddle
        super().__init__(to)

    def _lead(self, source: socket.socket, target: socket.socket) -> None:
        forward = source.getsockname()[1] == self.port
        with suppress(OSError, struct.error), source.makefile("rb") as stream:
            # The greeting, of which each side sends some only when it has some of the other's.
            rest = GREETING_BYTES
            while rest:
                part = stream.read1(rest)
                target.sendall(part)
                rest -= len(part) or rest
            while True:
                (flags,) = _exactly(stream, 1)
                (length,) = struct.unpack(">Q", _exactly(stream, 8)) if flags & LONG else _exactly(stream, 1)
                frame = Frame(flags & MORE, _exactly(stream, length), forward)
                for each in [frame] if flags & COMMAND else self.meddle(frame):
                    head = struct.pack(">BQ", each.flags | LONG | flags & COMMAND, len(each.body))
                    target.sendall(head + each.body)
        self._close(source, target)


def _exactly(stream: BufferedReader, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise ConnectionError
    return data
