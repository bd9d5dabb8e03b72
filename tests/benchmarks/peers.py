"""The processes that bench_transport measures: push-pull round trips with no computation between them.

Every way moves the same elements and ends in the same update, that of ParameterSlice.apply. Each process is started by
trainer.launch.child.Child, as those of a run are. ``counts``: unsigned 64-bit [workers], round trips done."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import threading
from collections.abc import Callable, MutableSequence, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config import Config, RunFacts, slice_bounds
from trainer.coordination.momentum import heavy_ball
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.reports import pack_report
from trainer.transport.messages.heads import pack
from trainer.transport.messages.servers import Push
from trainer.transport.sockets import Secret
from trainer.worker.clients.servers import ServerClient

Counts = MutableSequence[int]
Floats = npt.NDArray[np.float32]
GRADIENT, RATE, MOMENTUM = 1e-3, 1e-4, 0.9
HEADER_BYTES = len(pack(Push(0, 0, 0, 0, in_memory=False)) + pack_report(StepMeasurements(1, 0.0, 0, 0.0)))


def made_up_slice(values: Floats, momentum: Floats, num_workers: int) -> ParameterSlice:
    return ParameterSlice(values, momentum, heavy_ball(MOMENTUM), num_workers, "changes")


def _zeros(numbers: int, num_workers: int) -> ParameterSlice:
    return made_up_slice(np.zeros(numbers, np.float32), np.zeros(numbers, np.float32), num_workers)


def trainer_worker(
    config: Config, facts: RunFacts, worker: int, addresses: list[str], secret: Secret, use_memory: bool, counts: Counts
) -> None:
    """The trainer's own client to the trainer's own servers."""
    client = ServerClient(Agreement.from_config(config, facts), facts, worker, addresses, secret, use_memory=use_memory)
    client.pushed[:] = GRADIENT
    turn = client.join()
    while turn:
        turn = client.exchange(turn, StepMeasurements(1, 0.0, 0, 0.0))
        counts[worker] += 1


def tcp_server(listener: socket.socket, numbers: int, num_workers: int) -> None:
    """One thread a connection: a single loop that blocks in a send could wait for a worker that waits for it."""
    part, lock = _zeros(numbers, num_workers), threading.Lock()
    for _ in range(num_workers):
        connection, _ = listener.accept()
        threading.Thread(target=exchange, args=(connection, part, lock), daemon=True).start()
    threading.Event().wait()


def exchange(connection: socket.socket, part: ParameterSlice, lock: threading.Lock) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    header, pushed = bytearray(HEADER_BYTES), np.empty_like(part.values)
    while fill(connection, header) and fill(connection, pushed):
        with lock:  # the values leave from where they lie: a floor spares itself the copy
            part.apply([pushed], RATE, [1.0])
            send(connection, header, part.values)


def tcp_worker(worker: int, numbers: int, ports: Sequence[int], counts: Counts) -> None:
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bounds = slice_bounds(numbers, len(ports))
    header = bytearray(HEADER_BYTES)
    pushed, pulled = np.full(numbers, GRADIENT, np.float32), np.empty(numbers, np.float32)
    while True:
        for connection, (begin, end) in zip(connections, bounds, strict=True):
            send(connection, header, pushed[begin:end])
        for connection, (begin, end) in zip(connections, bounds, strict=True):
            fill(connection, header)
            fill(connection, pulled[begin:end])
        counts[worker] += 1


def send(connection: socket.socket, header: bytearray, body: Any) -> None:
    connection.sendall(header, socket.MSG_MORE)
    connection.sendall(memoryview(body).cast("B"))


def fill(connection: socket.socket, target: Any) -> bool:
    """Receive until the target is full; False at the end of the connection."""
    rest = memoryview(target).cast("B")
    while rest:
        received = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if not received:
            return False
        rest = rest[received:]
    return True


class _Held:
    """What the one server of a process holds; torch RPC calls a function by its name."""

    part: ParameterSlice
    lock = threading.Lock()


def push_pull(pushed: Any) -> Any:
    """What a torch RPC worker has a server do. A copy leaves: the next update may come before it is serialised."""
    import torch

    with _Held.lock:
        _Held.part.apply([pushed.numpy()], RATE, [1.0])
        return torch.from_numpy(_Held.part.values.copy())


def rpc_server(index: int, world: int, rendezvous: str, numbers: int, num_workers: int) -> None:
    _Held.part = _zeros(numbers, num_workers)
    _join_rpc(f"server-{index}", index, world, rendezvous)
    threading.Event().wait()


def rpc_worker(worker: int, servers: int, world: int, rendezvous: str, numbers: int, counts: Counts) -> None:
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    _join_rpc(f"worker-{worker}", servers + worker, world, rendezvous)
    bounds = slice_bounds(numbers, servers)
    pushed, pulled = torch.full((numbers,), GRADIENT), torch.empty(numbers)
    while True:
        answers = [
            rpc.rpc_async(f"server-{server}", push_pull, (pushed[begin:end],))
            for server, (begin, end) in enumerate(bounds)
        ]
        for (begin, end), answer in zip(bounds, answers, strict=True):
            pulled[begin:end] = answer.wait()
        counts[worker] += 1


def _join_rpc(name: str, rank: int, world: int, rendezvous: str) -> None:
    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"  # or it asks for the address of this machine's host name
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def memory_worker(
    worker: int, num_workers: int, values: Any, momentum: Any, locks: Sequence[Path], counts: Counts
) -> None:
    """No servers, no messages: each worker updates the shared slices itself, one lock a slice, and copies the values.

    locks: files, locked whole: a process that is killed leaves none of them locked."""
    pushed = np.full(len(values), GRADIENT, np.float32)
    pulled = np.empty_like(pushed)
    shared, moving = np.frombuffer(values, np.float32), np.frombuffer(momentum, np.float32)
    bounds = slice_bounds(len(values), len(locks))
    parts = [made_up_slice(shared[begin:end], moving[begin:end], num_workers) for begin, end in bounds]
    files = [os.open(path, os.O_RDWR | os.O_CREAT) for path in locks]
    while True:
        for part, file, (begin, end) in zip(parts, files, bounds, strict=True):
            fcntl.flock(file, fcntl.LOCK_EX)
            part.apply([pushed[begin:end]], RATE, [1.0])
            np.copyto(pulled[begin:end], part.values)
            fcntl.flock(file, fcntl.LOCK_UN)
        counts[worker] += 1


def pipe_server(
    begin: int, end: int, vectors: Sequence[Any], pushes: Sequence[Connection], answers: Sequence[Connection]
) -> None:
    """Add up gradients in memory, with a pipe to and from each worker: the trainer's way without its protocol.

    vectors: by worker, the pushed vector and the pulled one."""
    part = _zeros(end - begin, len(vectors))
    halves = [np.frombuffer(both, np.float32).reshape(2, -1)[:, begin:end] for both in vectors]
    workers = {connection.fileno(): worker for worker, connection in enumerate(pushes)}
    poller = select.poll()
    for descriptor in workers:
        poller.register(descriptor, select.POLLIN)
    header = bytes(HEADER_BYTES)
    while True:
        for descriptor, _ in poller.poll():
            os.read(descriptor, HEADER_BYTES)
            worker = workers[descriptor]
            part.apply([halves[worker][0]], RATE, [1.0])
            np.copyto(halves[worker][1], part.values)
            os.write(answers[worker].fileno(), header)


def pipe_worker(
    worker: int, vectors: Any, pushes: Sequence[Connection], answers: Sequence[Connection], counts: Counts
) -> None:
    np.frombuffer(vectors, np.float32)[: len(vectors) // 2] = GRADIENT
    header = bytes(HEADER_BYTES)
    while True:
        for connection in pushes:
            os.write(connection.fileno(), header)
        for connection in answers:
            os.read(connection.fileno(), HEADER_BYTES)
        counts[worker] += 1


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (
        trainer_worker,
        tcp_server,
        tcp_worker,
        rpc_server,
        rpc_worker,
        memory_worker,
        pipe_server,
        pipe_worker,
    )
}


def main(role: str, *arguments: Any) -> None:
    """The process of one role; it ends when it is killed."""
    ROLES[role](*arguments)
