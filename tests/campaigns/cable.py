"""A TCP connection that a test can cut, or on which nothing moves for a while."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

LOOPBACK = "127.0.0.1"


class Cable:
    """A TCP port that leads to another one, until it is cut; whoever connects again is led there again."""

    def __init__(self, to: int) -> None:
        self.to = to
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self.listener.getsockname()[1])
        self.ends: list[socket.socket] = []
        self._blocked_until = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self.listener.accept()[0]
                with suppress(ConnectionError):
                    far = socket.create_connection((LOOPBACK, self.to))
                    self.ends += [near, far]
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=self._lead, args=ends, daemon=True).start()
                    continue
                near.close()

    def _lead(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(max(0.0, self._blocked_until - time.monotonic()))
                self._carry(source, data)
                target.sendall(data)
        self._close(source, target)

    def _carry(self, source: socket.socket, data: bytes) -> None:
        """Look at what is on its way from one of the ends."""

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Every connection of this moment breaks."""
        ends, self.ends = self.ends, []
        self._close(*ends)

    def block(self, seconds: float) -> None:
        """Nothing gets through for so long; nobody is told."""
        self._blocked_until = time.monotonic() + seconds

    def close(self) -> None:
        self.listener.close()
        self.cut()


class Tap(Cable):
    """A cable that keeps a copy of all that it carries."""

    def __init__(self, to: int) -> None:
        self._carried: dict[socket.socket, bytearray] = {}  # by the end that sent it
        super().__init__(to)

    def _carry(self, source: socket.socket, data: bytes) -> None:
        self._carried.setdefault(source, bytearray()).extend(data)

    def carried(self, data: bytes) -> bool:
        """Return whether one end has sent these bytes, in clear text and in one piece."""
        return any(data in sent for sent in list(self._carried.values()))
