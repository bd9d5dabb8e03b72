"""Workers and servers in one thread and in virtual time: the product's coordinator and slices, no processes.

A step takes as long as a function says; everything else takes no time, and what happens at one instant happens in
worker order. So asynchronous runs can be repeated, and held against what a paper or a loop says."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.config import slice_bounds
from trainer.coordination.coordinator import Coordinator, Measured, Order, Record
from trainer.protocols.base import Protocol
from trainer.server.parameter_slice import ParameterSlice

Vector = npt.NDArray[np.float64]
Gradient = Callable[[Vector, int, int], Vector]  # (parameters, worker, clock)


@dataclass
class Run:
    """What happened: starts holds (time, worker, clock, version) of every step."""

    parameters: Vector
    records: list[Record]
    starts: list[tuple[float, int, int, int]]
    seconds: float
    clocks_at_starts: list[list[int]] = field(default_factory=list)


def simulate(
    protocol: Protocol,
    *,
    workers: int,
    steps: int,
    gradient: Gradient,
    start: Vector,
    rate: float,
    step_time: Callable[[int, int], float] = lambda worker, clock: 1.0,
    momentum: float = 0.0,
    servers: int = 1,
    stop: str = "global",
    lose_at: dict[tuple[int, int], float] | None = None,
) -> Run:
    """rate is a/n. lose_at: {(worker, clock): seconds away}: it dies before it pushes that step, and joins again."""
    coordinator = Coordinator(
        protocol,
        num_workers=workers,
        num_servers=servers,
        steps=steps,
        steps_per_epoch=steps,
        rate=lambda epoch: rate,
        stop=stop,  # type: ignore[arg-type]
    )
    bounds = slice_bounds(len(start), servers)
    slices = [ParameterSlice(start[b:e].copy(), np.zeros(e - b), momentum, workers, "ema") for b, e in bounds]
    pushed: dict[int, Vector] = {}
    queue: list[tuple[float, int, int, Vector]] = []
    run = Run(start, [], [], 0.0)
    away = dict(lose_at or {})
    sessions = dict.fromkeys(range(workers), 1)

    def carry_out(orders: Iterable[Order], now: float) -> None:
        for order in orders:
            for (begin, end), part in zip(bounds, slices, strict=True):
                if order.accepted:
                    used = [pushed[worker][begin:end] for worker, _ in order.accepted]
                    part.apply(used, order.learning_rate, [weight for _, weight in order.accepted])
            parameters = np.concatenate([part.values for part in slices])
            for worker, _, clock in order.unblocked:
                run.starts.append((now, worker, clock, order.version))
                run.clocks_at_starts.append([member.clock for member in coordinator.members])
                heapq.heappush(queue, (now + step_time(worker, clock), worker, clock, parameters))
        run.records += coordinator.records
        coordinator.records = []

    for worker in range(workers):
        for server in range(servers):
            coordinator.join(server, worker, sessions[worker], 0.0)
    carry_out(coordinator.advance(0.0), 0.0)
    while queue:
        now, worker, clock, parameters = heapq.heappop(queue)
        run.seconds = now
        if clock < 0:
            sessions[worker] += 1
            for server in range(servers):
                coordinator.join(server, worker, sessions[worker], now)
        elif (pause := away.pop((worker, clock), None)) is not None:
            coordinator.lose(worker)
            heapq.heappush(queue, (now + pause, worker, -1, parameters))
        else:
            pushed[worker] = gradient(parameters, worker, clock)
            for server in reversed(range(servers)):
                measured = None if server else Measured(1, 0.0, 0, 1.0)
                assert coordinator.push(server, worker, sessions[worker], clock, now, measured)
        carry_out(coordinator.advance(now), now)
    run.parameters = np.concatenate([part.values for part in slices])
    return run
