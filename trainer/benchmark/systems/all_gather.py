"""All-gather between the tasks of a barrier job, over connections that stay open for the whole run.

BarrierTaskContext.allGather takes about a second whatever it carries: it sleeps between two polls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AllGather:
    """Where the ranks of one job exchange rows; part of their closure."""

    host: str
    port: int
    key: bytes  # only tasks of this job have it

    @contextmanager
    def connect(self, index: int) -> Iterator[Rank]:
        """The connection of rank ``index``. Raises OSError where the driver is gone."""
        with Client((self.host, self.port), authkey=self.key) as connection:
            connection.send_bytes(str(index).encode())
            yield Rank(connection)


@dataclass(frozen=True)
class Rank:
    """One task's connection to all others."""

    connection: Connection

    def all_gather(self, row: Floats) -> Floats:
        """The rows of all ranks [ranks, k], in their order. One message each way. Raises EOFError when a task has died."""
        self.connection.send_bytes(row.tobytes())
        return np.frombuffer(self.connection.recv_bytes()).reshape(-1, len(row))


def start_all_gather(host: str, ranks: int) -> AllGather:
    """Serve the all-gathers of one job from a thread of this process.

    The thread ends when a rank leaves: then all of them do, or one has died and the job fails with it. Where some never
    connect, the thread waits until this process ends."""
    key = secrets.token_bytes(16)
    listener = Listener((host, 0), backlog=ranks, authkey=key)
    threading.Thread(target=_serve, args=(listener, ranks), name="all-gather", daemon=True).start()
    return AllGather(host, int(listener.address[1]), key)


def _serve(listener: Listener, ranks: int) -> None:
    with ExitStack() as stack, suppress(EOFError, OSError):
        stack.enter_context(listener)
        connections: dict[int, Connection] = {}
        while len(connections) < ranks:
            with suppress(AuthenticationError):  # a client without the key
                connection = stack.enter_context(listener.accept())
                connections[int(connection.recv_bytes())] = connection
        in_order = [connections[index] for index in range(ranks)]
        while True:
            rows = b"".join(connection.recv_bytes() for connection in in_order)
            for connection in in_order:
                connection.send_bytes(rows)
