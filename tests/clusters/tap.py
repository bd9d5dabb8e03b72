"""A recorder of what passes over TCP connections: the class Tap."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Self

BLOCK = 1 << 16


class Tap:
    """Accepts connections on one address, passes all bytes on to the same ports of another, and keeps a copy of them.

    A context manager. address: where clients connect; target: where the servers listen; ports: theirs."""

    def __init__(self, address: str, target: str, ports: Sequence[int]) -> None:
        self._target = target
        self._listeners = [socket.create_server((address, port)) for port in ports]
        self._recorded: dict[int, list[bytearray]] = {port: [] for port in ports}

    def __enter__(self) -> Self:
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which close() does not
            listener.close()

    def recorded(self, port: int) -> list[bytes]:
        """Return the bytes that have passed so far: an entry for each direction of each connection to a port."""
        return [bytes(stream) for stream in self._recorded[port]]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                port = listener.getsockname()[1]
                server = socket.create_connection((self._target, port))
                for source, sink in ((client, server), (server, client)):
                    stream = bytearray()
                    self._recorded[port].append(stream)
                    threading.Thread(target=_copy, args=(source, sink, stream), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, stream: bytearray) -> None:
    """Pass on what one end sends until it closes its connection."""
    with contextlib.suppress(OSError):
        while block := source.recv(BLOCK):
            stream += block
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
