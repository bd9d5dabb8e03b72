"""All-gather between the tasks of a barrier job, over connections that stay open for the whole run.

BarrierTaskContext.allGather takes about a second regardless of the data, because it sleeps between two polls."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

import numpy as np

from pipeline.core.arrays import Floats

SILENCE_S = 5  # for which a client may send nothing before it has proved that it has the key


@dataclass(frozen=True)
class AllGather:
    """The address at which the ranks of one job exchange rows. Part of the closure of their tasks."""

    host: str
    port: int
    key: bytes  # authenticates the tasks of this job

    @contextmanager
    def connect(self, index: int) -> Iterator[Rank]:
        """Connect as rank ``index``. Raises OSError if the driver has ended."""
        with Client((self.host, self.port), authkey=self.key) as connection:
            connection.send_bytes(str(index).encode())
            yield Rank(connection)


@dataclass(frozen=True)
class Rank:
    """The connection of one task to all others."""

    connection: Connection

    def all_gather(self, row: Floats) -> Floats:
        """Return the rows of all ranks, in their order: [ranks, k].

        One message each way. Raises EOFError if a task died."""
        self.connection.send_bytes(row.tobytes())
        return np.frombuffer(self.connection.recv_bytes()).reshape(-1, len(row))


def start_all_gather(host: str, ranks: int) -> AllGather:
    """Serve the all-gathers of one job from a thread of this process.

    The thread ends when a rank disconnects: either all ranks have finished, or one has died and the job fails. If some
    ranks never connect, the thread waits until this process ends."""
    key = secrets.token_bytes(16)
    listener = Listener((host, 0), backlog=ranks)
    threading.Thread(target=_serve, args=(listener, ranks, key), name="all-gather", daemon=True).start()
    return AllGather(host, int(listener.address[1]), key)


def _serve(listener: Listener, ranks: int, key: bytes) -> None:
    """Accept all ranks, then send the rows of all of them to each, again and again, until one disconnects."""
    with ExitStack() as stack, suppress(EOFError, OSError):
        stack.enter_context(listener)
        connections: dict[int, Connection] = {}
        while len(connections) < ranks:
            connection = listener.accept()
            with suppress(AuthenticationError, EOFError, OSError):  # such as a port scanner
                rank = _authenticate(connection, key)
                connections[rank] = stack.enter_context(connection)
        in_order = [connections[index] for index in range(ranks)]
        while True:
            rows = b"".join(connection.recv_bytes() for connection in in_order)
            for connection in in_order:
                connection.send_bytes(rows)


def _authenticate(connection: Connection, key: bytes) -> int:
    """Return the rank of a new connection. Raises AuthenticationError, EOFError or OSError for a client without the key.

    A client that sends nothing is given up after SILENCE_S."""
    _limit_waits(connection, SILENCE_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    rank = int(connection.recv_bytes())
    _limit_waits(connection, 0)  # a step may take long
    return rank


def _limit_waits(connection: Connection, seconds: int) -> None:
    """Let reads of a connection fail after some seconds; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:  # options belong to both
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
