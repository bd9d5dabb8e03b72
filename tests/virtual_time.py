"""Workers and servers in one thread and in virtual time: the product's coordinator and slices, no processes.

A step takes as long as a function says; everything else takes no time, and what happens at one instant happens in
worker order. So asynchronous runs can be repeated, and held against what a paper or a loop says. Parameters are float64."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config import slice_bounds
from trainer.coordination.budget import Budget, Position
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.orders import Measured, Order, Record
from trainer.protocols.base import Protocol
from trainer.server.parameter_slice import ParameterSlice

Vector = npt.NDArray[np.float64]
Gradient = Callable[[Vector, int, int], Vector]  # (parameters, worker, clock)
PUSH, GIVE_UP, JOIN = range(3)


@dataclass
class Run:
    """What happened: starts holds (time, worker, clock, version) of every step."""

    parameters: Vector
    records: list[Record]
    starts: list[tuple[float, int, int, int]]
    seconds: float
    clocks_at_starts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the position as JSON, and (values, momentum) of every slice."""

    position: str
    slices: list[tuple[Any, Any]]


@dataclass(order=True)
class Event:
    time: float
    worker: int
    kind: int
    clock: int = 0
    life: int = 0  # of the worker when it began; another one by now makes the event void
    parameters: Vector = field(default_factory=lambda: np.zeros(0), compare=False)


class Simulation:
    """rate is a/n. lose_at: {(worker, clock): seconds away}: it dies before it pushes that step, and joins again. crash_at:
    after so many events all servers start anew from the last checkpoint; save_every: events between checkpoints."""

    def __init__(
        self,
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
        crash_at: Iterable[int] = (),
        save_every: int = 0,
    ) -> None:
        self.protocol, self.workers, self.steps, self.rate, self.stop = protocol, workers, steps, rate, stop
        self.gradient, self.step_time, self.momentum, self.servers = gradient, step_time, momentum, servers
        self.away, self.crash_at, self.save_every = dict(lose_at or {}), set(crash_at), save_every
        self.bounds = slice_bounds(len(start), servers)
        empty = json.dumps(vars(Position()))
        self.saved = Saved(empty, [(start[b:e].copy(), np.zeros(e - b)) for b, e in self.bounds])
        self.run, self.queue, self.lives = Run(start, [], [], 0.0), list[Event](), [0] * workers
        self.computing: dict[int, tuple[float, Event]] = {}  # by worker: when it began, and its end

    def load(self, now: float) -> None:
        """All servers start from the last checkpoint, and all workers join."""
        values = json.loads(self.saved.position)
        position = Position(**values | {"clocks": {int(worker): clock for worker, clock in values["clocks"].items()}})
        budget = Budget(self.workers, self.steps, self.steps, self.stop, position)  # type: ignore[arg-type]
        self.coordinator = Coordinator(
            self.protocol, budget, num_servers=self.servers, rate=lambda epoch: self.rate, seconds=now
        )
        self.slices = [
            ParameterSlice(v.copy(), m.copy(), self.momentum, self.workers, "ema") for v, m in self.saved.slices
        ]
        self.pushed: dict[int, Vector] = {}
        self.queue, self.computing = [], {}
        self.run.records = [record for record in self.run.records if record.version <= position.version]
        for worker in range(self.workers):
            self.join(worker, now)
        self.carry_out(now)

    def join(self, worker: int, now: float) -> None:
        self.lives[worker] += 1
        for server in range(self.servers):
            self.coordinator.join(server, worker, self.lives[worker], now)

    def carry_out(self, now: float) -> None:
        for order in self.coordinator.advance(now):
            self.execute(order, now)
        self.run.records += self.coordinator.records
        self.coordinator.records = []

    def execute(self, order: Order, now: float) -> None:
        weights = [share.weight for share in order.shares]
        for (begin, end), part in zip(self.bounds, self.slices, strict=True):
            used = [self.pushed[share.worker][begin:end] for share in order.shares]
            if order.learning_rate is None:
                part.accumulate(used, weights)
            else:
                part.apply(used, order.learning_rate, weights)
        if order.snapshot:
            names = ("version", "accepted", "examples", "clocks", "memory")
            position = json.dumps({name: order.snapshot[name] for name in names})
            self.saved = Saved(position, [(part.values.copy(), part.momentum.copy()) for part in self.slices])
        parameters = np.concatenate([part.values for part in self.slices])
        for worker, _, clock in order.unblocked:
            self.run.starts.append((now, worker, clock, order.version))
            self.run.clocks_at_starts.append([member.clock for member in self.coordinator.members])
            end_at = now + self.step_time(worker, clock)
            event = Event(end_at, worker, PUSH, clock, self.lives[worker], parameters)
            self.computing[worker] = now, event
            heapq.heappush(self.queue, event)
        for worker, _, clock in order.cancelled:
            begun, event = self.computing[worker]
            part_s = (event.time - begun) / self.protocol.parts_of_a_step()
            end_at = begun + part_s * math.ceil((now - begun) / part_s)
            if end_at < event.time - part_s / 2:  # before the last part is done
                heapq.heappush(self.queue, Event(end_at, worker, GIVE_UP, clock, self.lives[worker]))

    def handle(self, event: Event) -> None:
        now, worker, session = event.time, event.worker, self.lives[event.worker]
        if event.kind == JOIN:
            self.join(worker, now)
        elif event.kind == GIVE_UP:
            if worker in self.computing and self.computing[worker][1].clock == event.clock:
                del self.computing[worker]
                assert self.coordinator.give_up(worker, session, event.clock, now, Measured(0, 0.0, 0, 1.0))
        elif self.computing.get(worker, (0, None))[1] is event:
            del self.computing[worker]
            if (pause := self.away.pop((worker, event.clock), None)) is not None:
                self.coordinator.lose(worker)
                heapq.heappush(self.queue, Event(now + pause, worker, JOIN, life=self.lives[worker]))
            else:
                self.pushed[worker] = self.gradient(event.parameters, worker, event.clock)
                for server in reversed(range(self.servers)):
                    measured = None if server else Measured(1, 0.0, 0, 1.0)
                    assert self.coordinator.push(server, worker, session, event.clock, now, measured)

    def to_the_end(self) -> Run:
        self.load(0.0)
        events = 0
        while self.queue:
            event = heapq.heappop(self.queue)
            if event.life != self.lives[event.worker]:
                continue
            events += 1
            self.run.seconds = event.time
            if events in self.crash_at:
                self.load(event.time)
                continue
            self.handle(event)
            if self.save_every and events % self.save_every == 0:
                self.coordinator.request_snapshot()
            self.carry_out(event.time)
        assert self.coordinator.finished, "the run is stuck"
        self.run.parameters = np.concatenate([part.values for part in self.slices])
        return self.run


def simulate(protocol: Protocol, **options: Any) -> Run:
    """What came of a run in virtual time; options: those of Simulation."""
    return Simulation(protocol, **options).to_the_end()
