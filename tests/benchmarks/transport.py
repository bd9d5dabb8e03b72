"""CPU time of a push-pull round trip, for every way of carrying one, measured side by side.

A round trip: a worker hands its whole gradient to the servers, they update, it has the whole vector. Counted is the CPU
time (user and system) of all servers and workers between two moments of steady work; wall time on a shared machine says
little, and is measured of a small model only, of which messages are all. Nothing is computed between round trips, so
servers are as busy as they can be."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.benchmarks.peers import RATE, Counts, made_up_slice
from tests.benchmarks.ways import CLEAR, FLOOR_OF, IPC, LOCKED, MEMORY, PIPES, RAW, SMALL, TCP, WAYS, Case, Start
from trainer.launch.child import Child
from trainer.launch.fork_server import context

WARM_UP = 3  # round trips of every worker before the first moment
PATIENCE_S = 120.0
SOCKET_GOAL, MEMORY_GOAL = 1.6, 2.0


NUMBERS = (270_000, 853_000, 11_170_000)  # ResNet-20, ResNet-56 and, on wider images, ResNet-18
PEERS = ((1, 1), (4, 1), (12, 2))
CASES = [Case(numbers, workers, servers) for numbers in NUMBERS for workers, servers in PEERS]
QUICK = [Case(270_000, 4, 1), Case(853_000, 12, 2)]
SMALL_CASES = [Case(30, workers, 1) for workers in (1, 2, 4)]  # a linear model


def cpu_ms(start: Start, case: Case, seconds: float) -> float:
    return trip_ms(start, case, seconds)[0]


def trip_ms(start: Start, case: Case, seconds: float) -> tuple[float, float]:
    """CPU milliseconds of all processes a round trip, and wall milliseconds that a worker waits for one.

    seconds: of the measurement at least; it has two trips a worker and a tick."""
    counts: Counts = context().RawArray("Q", case.workers)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        children = start(case, Path(scratch), counts)
        try:
            _wait(children, lambda: min(counts) >= WARM_UP)
            began, trips, spent = time.monotonic(), sum(counts), _cpu_s(children)
            end, enough = began + seconds, trips + 2 * case.workers
            _wait(children, lambda: time.monotonic() >= end and sum(counts) >= enough and _cpu_s(children) > spent)
            count = sum(counts) - trips
            wall_s = time.monotonic() - began
            return 1000 * (_cpu_s(children) - spent) / count, 1000 * wall_s * case.workers / count
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
        copies = 1 if way in (MEMORY, LOCKED, PIPES) else 4
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
    worst: dict[str, float] = {IPC: 0.0, MEMORY: 0.0}
    for case in cases:
        results, least = measure(case, repeat, seconds), limits(case.numbers)
        for way in WAYS:
            print(_line(case, way, results, least.of(way)), flush=True)
        for way in worst:
            worst[way] = max(worst[way], statistics.median(ratios(results, way, FLOOR_OF[way])))
        _print_limit(case, least)
    print(
        f"  worst of {IPC} over {RAW}: {worst[IPC]:.2f} (goal <= {SOCKET_GOAL:g}); {TCP} is encrypted,"
        f" {CLEAR} goes the same way with --encryption off"
    )
    print(f"  worst of {MEMORY} over {LOCKED}: {worst[MEMORY]:.2f} (goal <= {MEMORY_GOAL:g})")
    _run_small(repeat, seconds)


def _run_small(repeat: int, seconds: float) -> None:
    """Print the wall time of a small model's round trip; of the repeats the least, which other programs disturbed least.

    The floors are processes that only exchange the messages and make the update."""
    print(f"  wall (and CPU) ms a push-pull of {SMALL_CASES[0].numbers} parameters, least of {repeat}:")
    for case in SMALL_CASES:
        trips = [{way: trip_ms(WAYS[way], case, seconds) for way in SMALL} for _ in range(repeat)]
        for way in SMALL:
            cpu, wall = (min(values) for values in zip(*(trip[way] for trip in trips), strict=True))
            print(f"  N{case.workers} S{case.servers}  {way:<15}{wall:>7.3f} ({cpu:.3f})", flush=True)


def _line(case: Case, way: str, results: Results, limit_ms: float) -> str:
    found = results[way]
    median, extent = statistics.median(found), f"{min(found):.2f} to {max(found):.2f}"
    floor = FLOOR_OF.get(way)
    ratio = f"{statistics.median(ratios(results, way, floor)):.2f} x {floor}" if floor else "(floor)"
    return f"  {case!s:<18}{way:<15}{median:>9.2f}   {extent:<17}{ratio:<25}{median / limit_ms:>10.1f} x"


def _print_limit(case: Case, least: Limits) -> None:
    size = 4 * case.numbers
    print(
        f"  {'':<18}limit: {2 * size / 1e6:.2f} MB there and back; update {least.update_ms:.2f} ms, memcpy at this size"
        f" {size / 1e6 / least.copy_ms:.1f} GB/s: {least.of(TCP):.2f} ms through sockets (4 copies),"
        f" {least.of(MEMORY):.2f} ms in memory (1)"
    )
