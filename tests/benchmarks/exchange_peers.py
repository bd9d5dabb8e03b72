"""Yardsticks of ``make bench-exchange`` that need neither torch nor the trainer's connections."""

from __future__ import annotations

import selectors
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trainer.config import slice_bounds
from trainer.exchange.mixing import mix

Times = tuple[float, float]  # wall and CPU, milliseconds per step
Vector = npt.NDArray[np.float32]
THIRD = 1 / 3  # weight of a link of the ring
CHUNK = 1 << 15  # floats that are added at once, so that the sum stays in the cache


@contextmanager
def average_in_ring(rank: int, listeners: Sequence[socket.socket]) -> Iterator[Callable[[Vector], Vector]]:
    """Yield a function that averages a vector with both neighbours' over plain TCP connections.

    rank: of this process. listeners: of all processes; neighbours connect to them."""
    workers = len(listeners)
    others = sorted({(rank - 1) % workers, (rank + 1) % workers})
    connections: dict[int, socket.socket] = {}
    for other in others:
        if other < rank:
            connections[other] = socket.create_connection(listeners[other].getsockname())
            connections[other].sendall(bytes([rank]))
    while len(connections) < len(others):
        accepted, _ = listeners[rank].accept()
        connections[accepted.recv(1)[0]] = accepted
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    try:
        yield lambda own: _average(own, connections)
    finally:
        for connection in connections.values():
            connection.close()


def _average(own: Vector, connections: dict[int, socket.socket]) -> Vector:
    """Send a vector on all connections, receive one from each, and return the weighted mean."""
    received = {other: np.empty_like(own) for other in connections}
    # Sending and receiving in turn, as far as either goes: with blocking calls all processes could wait for each other.
    unsent = {other: own.view(np.uint8).data for other in connections}
    missing = {other: received[other].view(np.uint8).data for other in connections}
    with selectors.DefaultSelector() as selector:
        for other, connection in connections.items():
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, other)
        while selector.get_map():
            for key, events in selector.select():
                other = key.data
                connection = connections[other]
                if events & selectors.EVENT_WRITE and unsent[other]:
                    unsent[other] = unsent[other][connection.send(unsent[other]) :]
                if events & selectors.EVENT_READ and missing[other]:
                    missing[other] = missing[other][connection.recv_into(missing[other]) :]
                wanted = (selectors.EVENT_WRITE if unsent[other] else 0) | (
                    selectors.EVENT_READ if missing[other] else 0
                )
                if not wanted:
                    selector.unregister(connection)
                elif wanted != key.events:
                    selector.modify(connection, wanted, other)
    return mix(own, [(THIRD, received[other]) for other in sorted(received)])


class Semaphore(Protocol):
    """The part of threading.Semaphore and of multiprocessing's that the floor needs."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class SharedSums(NamedTuple):
    """The memory that the processes of the floor share.

    Attributes:
        gradients: by worker, float32 [elements].
        sums: float32 [elements], of which worker j writes range j.
        arrivals: by phase (all gradients written, all sums written) and worker, the arrivals of others that it awaits.
    """

    gradients: Sequence[Any]
    sums: Any
    arrivals: Sequence[Sequence[Semaphore]]


def share_sums(context: Any, elements: int, workers: int) -> SharedSums:
    """Return memory for the floor. context: of multiprocessing."""
    arrivals = [[context.Semaphore(0) for _ in range(workers)] for _ in range(2)]
    gradients = [context.RawArray("f", elements) for _ in range(workers)]
    return SharedSums(gradients, context.RawArray("f", elements), arrivals)


def add_in_memory(rank: int, shared: SharedSums) -> tuple[Vector, Callable[[Vector], None]]:
    """Return a worker's gradient, and a function that writes the sum of all gradients to a vector.

    That is the least that an all-reduce does: each worker reads every gradient in its range, and copies all sums. The
    function returns once all workers have called it. ``shared`` needs two workers or more."""
    gradients = [np.frombuffer(gradient, np.float32) for gradient in shared.gradients]
    sums = np.frombuffer(shared.sums, np.float32)
    begin, end = slice_bounds(len(sums), len(gradients))[rank]

    def add_up(total: Vector) -> None:
        # No third meeting is needed: a sum is written again once all have entered the next call.
        _meet(rank, shared.arrivals[0])
        for first in range(begin, end, CHUNK):
            span = slice(first, min(first + CHUNK, end))
            np.add(gradients[0][span], gradients[1][span], out=sums[span])
            for other in gradients[2:]:
                sums[span] += other[span]
            total[span] = sums[span]  # while it is in the cache
        _meet(rank, shared.arrivals[1])
        total[:begin] = sums[:begin]
        total[end:] = sums[end:]

    return gradients[rank], add_up


def _meet(rank: int, arrivals: Sequence[Semaphore]) -> None:
    """Tell all other workers that this one has arrived, and wait for all of them."""
    for other, arrival in enumerate(arrivals):
        if other != rank:
            arrival.release()
    for _ in range(len(arrivals) - 1):
        arrivals[rank].acquire()


def run_torchft(python: str, warm_up: int, elements: int, workers: int, steps: int) -> Times:
    """Run the processes of torchft, and return the wall time of the slowest and the CPU time of all, per step.

    Args:
        python: an interpreter that has torchft.
        warm_up: steps before the measured ones.
        elements, workers, steps: of the measurement.
    """
    program = Path(__file__).with_name("torchft_worker.py")
    numbers = [str(value) for value in (workers, elements, warm_up, steps)]
    processes: list[subprocess.Popen[str]] = []

    def start(lighthouse: str, rank: int) -> subprocess.Popen[str]:
        command = [python, str(program), lighthouse, str(rank), *numbers]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        processes.append(process)
        return process

    try:
        address = _line_of(start("serve", 0))
        group = [start(address, rank) for rank in range(workers)]
        times = [[float(value) for value in _line_of(worker).split()] for worker in group]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(wall for wall, _ in times), sum(cpu for _, cpu in times)


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline().strip()
    assert line, "a process of torchft ended: run its environment's python -c 'import torchft'"
    return line
