"""The ways of carrying a push-pull round trip that bench_transport compares: what each starts for a case."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.benchmarks.peers import Counts
from tests.clusters.machine import free_ports
from tests.support.configs import make_config
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import Config, RunFacts, slice_bounds
from trainer.home.folders import Folders
from trainer.launch.child import Child
from trainer.launch.fork_server import context
from trainer.run_files import CHECKPOINTS
from trainer.server.endpoint import Endpoint
from trainer.transport.addresses import local_addresses
from trainer.transport.sockets import Secret

SECRET = Secret("0123456789abcdef")


@dataclass(frozen=True)
class Case:
    numbers: int
    workers: int
    servers: int

    def __str__(self) -> str:
        return f"{self.numbers / 1e6:.2f} M  N{self.workers} S{self.servers}"


Start = Callable[[Case, Path, Counts], list[Child]]


def _child(folder: Path, name: str, role: str, *arguments: object) -> Child:
    return Child(name, folder / f"{name}.log", "tests.benchmarks.peers", role, *arguments)


def _trainer(
    case: Case, folder: Path, counts: Counts, addresses: list[str], use_memory: bool, secret: Secret = SECRET
) -> list[Child]:
    """The trainer's servers from a first checkpoint of zeros, with a run so long that no other is ever due."""
    config = make_config(
        "",
        folder,
        servers=case.servers,
        steps=10**9,
        recipe="constant",
        momentum_rule="heavy-ball",  # as all ways have it
        checkpoint_every_s=1e9,
        same_host="memory" if use_memory else "socket",
    )
    facts = RunFacts(case.workers, 10**9, case.numbers, 0)
    _first_checkpoint(config, facts)
    servers = [
        Child(
            f"server-{index}",
            folder / f"server-{index}.log",
            "trainer.server.process",
            config,
            facts,
            Endpoint(index, addresses, secret, None, Folders.from_home(folder)),
        )
        for index in range(case.servers)
    ]
    return servers + [
        _child(folder, f"worker-{index}", "trainer_worker", config, facts, index, addresses, secret, use_memory, counts)
        for index in range(case.workers)
    ]


def _first_checkpoint(config: Config, facts: RunFacts) -> None:
    folder = folder_of(Path(config.run.output) / CHECKPOINTS, 0)
    zeros = np.zeros(facts.elements, np.float32)
    write_model(folder, 0, zeros, zeros)
    clocks = dict.fromkeys(range(facts.num_workers), 0)
    write_state(folder, RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, facts.elements, 0, config.identity()))


def start_tcp(case: Case, folder: Path, counts: Counts, secret: Secret = SECRET) -> list[Child]:
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(case.servers)]
    return _trainer(case, folder, counts, addresses, use_memory=False, secret=secret)


def start_clear_tcp(case: Case, folder: Path, counts: Counts) -> list[Child]:
    """Test a run with --encryption off."""
    return start_tcp(case, folder, counts, replace(SECRET, encryption="off"))


def start_ipc(case: Case, folder: Path, counts: Counts) -> list[Child]:
    return _trainer(case, folder, counts, local_addresses(folder.name, case.servers), use_memory=False)


def start_memory(case: Case, folder: Path, counts: Counts) -> list[Child]:
    return _trainer(case, folder, counts, local_addresses(folder.name, case.servers), use_memory=True)


def start_raw_tcp(case: Case, folder: Path, counts: Counts) -> list[Child]:
    children, ports = [], []
    for index, (begin, end) in enumerate(slice_bounds(case.numbers, case.servers)):
        with socket.create_server(("127.0.0.1", 0), backlog=case.workers) as listener:
            ports.append(listener.getsockname()[1])
            children.append(_child(folder, f"server-{index}", "tcp_server", listener, end - begin, case.workers))
    return children + [
        _child(folder, f"worker-{index}", "tcp_worker", index, case.numbers, ports, counts)
        for index in range(case.workers)
    ]


def start_rpc(case: Case, folder: Path, counts: Counts) -> list[Child]:
    world, rendezvous = case.servers + case.workers, f"file://{folder}/rendezvous"
    servers = [
        _child(folder, f"server-{index}", "rpc_server", index, world, rendezvous, end - begin, case.workers)
        for index, (begin, end) in enumerate(slice_bounds(case.numbers, case.servers))
    ]
    return servers + [
        _child(folder, f"worker-{index}", "rpc_worker", index, case.servers, world, rendezvous, case.numbers, counts)
        for index in range(case.workers)
    ]


def start_memory_floor(case: Case, folder: Path, counts: Counts) -> list[Child]:
    values, momentum = (context().RawArray("f", case.numbers) for _ in range(2))
    locks = [folder / f"lock-{index}" for index in range(case.servers)]
    return [
        _child(folder, f"worker-{index}", "memory_worker", index, case.workers, values, momentum, locks, counts)
        for index in range(case.workers)
    ]


def start_pipes(case: Case, folder: Path, counts: Counts) -> list[Child]:
    vectors = [context().RawArray("f", 2 * case.numbers) for _ in range(case.workers)]
    servers, pushes, answers = [], [], []
    for index, (begin, end) in enumerate(slice_bounds(case.numbers, case.servers)):
        pushes.append([context().Pipe(duplex=False) for _ in vectors])
        answers.append([context().Pipe(duplex=False) for _ in vectors])
        ends = [read for read, _ in pushes[-1]], [write for _, write in answers[-1]]
        servers.append(_child(folder, f"server-{index}", "pipe_server", begin, end, vectors, *ends))
    return servers + [
        _child(
            folder,
            f"worker-{worker}",
            "pipe_worker",
            worker,
            vectors[worker],
            [pipes[worker][1] for pipes in pushes],
            [pipes[worker][0] for pipes in answers],
            counts,
        )
        for worker in range(case.workers)
    ]


TCP, CLEAR, IPC, RAW, RPC = "ours, tcp", "ours, clear", "ours, ipc", "raw TCP", "torch RPC"
MEMORY, LOCKED, PIPES = "ours, memory", "memory + lock", "memory + pipes"
WAYS: dict[str, Start] = {
    TCP: start_tcp,
    CLEAR: start_clear_tcp,
    IPC: start_ipc,
    RAW: start_raw_tcp,
    RPC: start_rpc,
    MEMORY: start_memory,
    LOCKED: start_memory_floor,
    PIPES: start_pipes,
}
FLOOR_OF = {TCP: RAW, CLEAR: RAW, IPC: RAW, RPC: RAW, MEMORY: LOCKED, PIPES: LOCKED}
SMALL = (MEMORY, IPC, PIPES, RAW)  # of which the wall time of a small model's round trip is measured
