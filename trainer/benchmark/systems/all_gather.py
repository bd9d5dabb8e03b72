"""All-gather between the tasks of a barrier job, over connections that stay open for the whole run.

BarrierTaskContext.allGather takes about a second regardless of the data, because it sleeps between two polls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

import numpy as np

from pipeline.core.arrays import Floats


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
    listener = Listener((host, 0), backlog=ranks, authkey=key)
    threading.Thread(target=_serve, args=(listener, ranks), name="all-gather", daemon=True).start()
    return AllGather(host, int(listener.address[1]), key)


def _serve(listener: Listener, ranks: int) -> None:
    """Accept all ranks, then send the rows of all of them to each, again and again, until one disconnects."""
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
