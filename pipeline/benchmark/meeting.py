"""How the tasks of a barrier job meet: all over connections to a hub in the driver, which stay open for the whole run.

BarrierTaskContext.allGather would do, but takes about a second whatever it carries (it sleeps between two looks)."""

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
class Hub:
    """Where tasks meet; part of their closure. key: only tasks of this job may come in."""

    host: str
    port: int
    key: bytes

    @contextmanager
    def join(self, index: int) -> Iterator[Seat]:
        """The place of task ``index``. Raises OSError where the hub is gone."""
        with Client((self.host, self.port), authkey=self.key) as connection:
            connection.send_bytes(str(index).encode())
            yield Seat(connection)


@dataclass(frozen=True)
class Seat:
    """A task's connection to the others."""

    connection: Connection

    def gather(self, row: Floats) -> Floats:
        """Every task's row [tasks, k], in order of tasks. One message each way. Raises EOFError when a task has died."""
        self.connection.send_bytes(row.tobytes())
        return np.frombuffer(self.connection.recv_bytes()).reshape(-1, len(row))


def hub(host: str, tasks: int) -> Hub:
    """A hub for one job of so many tasks, which hands everyone's rows to everyone, round after round.

    It is a thread that ends when a task leaves: then all of them have, or one has died and the job ends with it. If they
    never all come, it waits until this process ends."""
    key = secrets.token_bytes(16)
    listener = Listener((host, 0), backlog=tasks, authkey=key)
    threading.Thread(target=_serve, args=(listener, tasks), name="hub", daemon=True).start()
    return Hub(host, int(listener.address[1]), key)


def _serve(listener: Listener, tasks: int) -> None:
    with ExitStack() as stack, suppress(EOFError, OSError):
        stack.enter_context(listener)
        seats: dict[int, Connection] = {}
        while len(seats) < tasks:
            with suppress(AuthenticationError):  # a stranger
                connection = stack.enter_context(listener.accept())
                seats[int(connection.recv_bytes())] = connection
        in_order = [seats[index] for index in range(tasks)]
        while True:
            told = b"".join(connection.recv_bytes() for connection in in_order)
            for connection in in_order:
                connection.send_bytes(told)
