"""CPU time of a push-pull round trip, for every way of carrying one, measured side by side.

A round trip: a worker hands its whole gradient to the servers, they update, it has the whole vector. Counted is the CPU
time (user and system) of all servers and workers between two moments of steady work; wall time on a shared machine says
little. Nothing is computed between round trips, so servers are as busy as they can be."""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.bench_peers import RATE, Counts, Floats, made_up_slice
from trainer.checkpoint import State, folder_of, write_slice, write_state
from trainer.config import Config, Facts
from trainer.head import CHECKPOINTS
from trainer.processes import Child, context
from trainer.slice import slice_bounds
from trainer.transport import Secret, local_addresses

WARM_UP = 3  # round trips of every worker before the first moment
PATIENCE_S = 120.0
SECRET = Secret("0123456789abcdef")
TCP_GOAL, MEMORY_GOAL = 1.6, 2.0


@dataclass(frozen=True)
class Case:
    numbers: int
    workers: int
    servers: int

    def __str__(self) -> str:
        return f"{self.numbers / 1e6:.2f} M  N{self.workers} S{self.servers}"


NUMBERS = (270_000, 853_000, 11_170_000)  # ResNet-20, ResNet-56 and, on wider images, ResNet-18
PEERS = ((1, 1), (4, 1), (12, 2))
CASES = [Case(numbers, workers, servers) for numbers in NUMBERS for workers, servers in PEERS]
QUICK = [Case(270_000, 4, 1), Case(853_000, 12, 2)]

Start = Callable[[Case, Path, Counts], list[Child]]


def _child(folder: Path, name: str, role: str, *arguments: object) -> Child:
    return Child(name, folder / f"{name}.log", "tests.bench_peers", role, *arguments)


def _trainer(case: Case, folder: Path, counts: Counts, addresses: list[str], use_memory: bool) -> list[Child]:
    """The trainer's servers from a first checkpoint of zeros, with a run so long that no other is ever due."""
    config = Config(
        shards="",
        output=str(folder),
        servers=case.servers,
        steps=10**9,
        recipe="constant",
        checkpoint_every_s=1e9,
        same_host="memory" if use_memory else "socket",
    )
    facts = Facts(case.workers, 10**9, case.numbers, 0)
    _first_checkpoint(config, facts)
    servers = [
        Child(f"server-{index}", folder / f"server-{index}.log", "trainer.server", config, facts, index, addresses, SECRET)
        for index in range(case.servers)
    ]
    return servers + [
        _child(folder, f"worker-{index}", "trainer_worker", facts, index, addresses, SECRET, use_memory, counts)
        for index in range(case.workers)
    ]


def _first_checkpoint(config: Config, facts: Facts) -> None:
    folder = folder_of(Path(config.output) / CHECKPOINTS, 0)
    zeros = np.zeros(facts.numbers, np.float32)
    write_slice(folder, 0, 1, 0, 0, facts.numbers, facts.numbers, zeros, zeros)
    clocks = dict.fromkeys(range(facts.num_workers), 0)
    write_state(folder, State(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, facts.numbers, 0, config.identity()))


def start_tcp(case: Case, folder: Path, counts: Counts) -> list[Child]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(case.servers)]
    addresses = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in held]
    for listener in held:
        listener.close()
    return _trainer(case, folder, counts, addresses, use_memory=False)


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
    world, meeting = case.servers + case.workers, f"file://{folder}/meeting"
    servers = [
        _child(folder, f"server-{index}", "rpc_server", index, world, meeting, end - begin, case.workers)
        for index, (begin, end) in enumerate(slice_bounds(case.numbers, case.servers))
    ]
    return servers + [
        _child(folder, f"worker-{index}", "rpc_worker", index, case.servers, world, meeting, case.numbers, counts)
        for index in range(case.workers)
    ]


def start_memory_floor(case: Case, folder: Path, counts: Counts) -> list[Child]:
    values, momentum = (context().RawArray("f", case.numbers) for _ in range(2))
    locks = [folder / f"lock-{index}" for index in range(case.servers)]
    return [
        _child(folder, f"worker-{index}", "memory_worker", index, case.workers, values, momentum, locks, counts)
        for index in range(case.workers)
    ]


TCP, IPC, RAW, RPC = "ours, tcp", "ours, ipc", "raw TCP", "torch RPC"
MEMORY, LOCKED = "ours, memory", "memory + lock"
WAYS: dict[str, Start] = {
    TCP: start_tcp,
    IPC: start_ipc,
    RAW: start_raw_tcp,
    RPC: start_rpc,
    MEMORY: start_memory,
    LOCKED: start_memory_floor,
}
FLOOR_OF = {TCP: RAW, IPC: RAW, RPC: RAW, MEMORY: LOCKED}


def cpu_ms(start: Start, case: Case, seconds: float) -> float:
    """CPU milliseconds of all processes a round trip, over at least so many seconds and two round trips a worker."""
    counts: Counts = context().RawArray("Q", case.workers)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        children = start(case, Path(scratch), counts)
        try:
            _wait(children, lambda: min(counts) >= WARM_UP)
            end, trips, spent = time.monotonic() + seconds, sum(counts), _cpu_s(children)
            enough = trips + 2 * case.workers
            _wait(children, lambda: time.monotonic() >= end and sum(counts) >= enough)
            return 1000 * (_cpu_s(children) - spent) / (sum(counts) - trips)
        finally:
            for child in children:
                child.kill()


def _cpu_s(children: Sequence[Child]) -> float:
    times = [psutil.Process(child.process.pid).cpu_times() for child in children]
    return float(sum(time.user + time.system for time in times))


def _wait(children: Sequence[Child], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        for child in children:
            if child.exit_code() is not None:
                raise SystemExit(f"{child.name} ended: {child.cause()}")
        if time.monotonic() > deadline:
            raise SystemExit(f"no end of {children[0].name} and its peers after {PATIENCE_S:.0f} s")
        time.sleep(0.01)


@dataclass(frozen=True)
class Limits:
    """What the work itself costs one thread: ms of an update, and ms of copying the vector once."""

    update_ms: float
    copy_ms: float

    def of(self, way: str) -> float:
        """Through a socket every number is copied in and out of the kernel, both ways; in memory it is copied once."""
        copies = 1 if way in (MEMORY, LOCKED) else 4
        return self.update_ms + copies * self.copy_ms


def limits(numbers: int) -> Limits:
    arrays = [np.zeros(numbers, np.float32) for _ in range(4)]
    values, momentum, pushed, copy = arrays
    part = made_up_slice(values, momentum, 1)
    return Limits(
        _least_ms(lambda: part.apply([pushed], RATE, [1.0])),
        _least_ms(lambda: np.copyto(copy, values)),
    )


def _least_ms(work: Callable[[], object], times: int = 10) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return 1000 * min(found)


Results = dict[str, list[float]]


def measure(case: Case, repeat: int, seconds: float) -> Results:
    """Every way once, then again: a change of the machine's mood falls on all of them."""
    results: Results = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way, start in WAYS.items():
            results[way].append(cpu_ms(start, case, seconds))
    return results


def ratios(results: Results, way: str, floor: str) -> list[float]:
    return [mine / theirs for mine, theirs in zip(results[way], results[floor], strict=True)]


def run(cases: Sequence[Case], repeat: int, seconds: float) -> None:
    print("\n1. CPU ms of all processes a push-pull round trip (N workers, S servers, no computation)")
    print(f"  {repeat} interleaved repeats of {seconds:g} s; ratios are medians of the repeats' own")
    print(f"  {'case':<18}{'way':<15}{'median':>9}   {'range':<17}{'of its floor':<25}{'of the limit':>12}")
    worst: dict[str, float] = {TCP: 0.0, MEMORY: 0.0}
    for case in cases:
        results, least = measure(case, repeat, seconds), limits(case.numbers)
        for way, found in results.items():
            print(_line(case, way, results, least.of(way)), flush=True)
        for way in worst:
            worst[way] = max(worst[way], statistics.median(ratios(results, way, FLOOR_OF[way])))
        _print_limit(case, least)
    print(f"  worst of ours over {RAW}: {worst[TCP]:.2f} (goal <= {TCP_GOAL:g}), of ours in memory over")
    print(f"  {LOCKED}: {worst[MEMORY]:.2f} (goal <= {MEMORY_GOAL:g}); {IPC} is the default of one host without memory")


def _line(case: Case, way: str, results: Results, limit_ms: float) -> str:
    found = results[way]
    median, extent = statistics.median(found), f"{min(found):.2f} to {max(found):.2f}"
    floor = FLOOR_OF.get(way)
    ratio = f"{statistics.median(ratios(results, way, floor)):.2f} x {floor}" if floor else "(floor)"
    return f"  {case!s:<18}{way:<15}{median:>9.2f}   {extent:<17}{ratio:<25}{median / limit_ms:>10.1f} x"


def _print_limit(case: Case, least: Limits) -> None:
    size = 4 * case.numbers
    print(
        f"  {'':<18}limit: {2 * size / 1e6:.2f} MB there and back; update {least.update_ms:.2f} ms, memcpy"
        f" {size / 1e6 / max(least.copy_ms, 1e-6):.1f} GB/s; {least.of(TCP):.2f} ms through sockets (4 copies),"
        f" {least.of(MEMORY):.2f} ms in memory (1)"
    )
