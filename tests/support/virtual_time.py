"""Workers and servers in one thread and in virtual time: the product's coordinator and slices, no processes.

A step takes as long as a function says; everything else takes no time, and what happens at one instant happens in
worker order. So asynchronous runs can be repeated, and held against what a paper or a loop says. Parameters are float64.
A gradient is handed out once: a run that uses one twice, or one whose worker was lost before, ends with a KeyError."""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError
from pipeline.core.specs import OPTION
from trainer.config import slice_bounds
from trainer.coordination.barriers import Barriers
from trainer.coordination.budget import Budget, Position
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.membership import WorkerPhase
from trainer.coordination.momentum import heavy_ball
from trainer.coordination.orders import Order, Record, Snapshot, StepMeasurements
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.protocols import PROTOCOLS
from trainer.protocols.base import Protocol

Vector = npt.NDArray[np.float64]
Gradient = Callable[[Vector, int, int], Vector]  # (parameters, worker, clock)
PUSH, GIVE_UP, JOIN, LOSE = range(4)
START = np.random.default_rng(0).normal(size=7)


@dataclass
class Run:
    """What happened; seconds: until the run was over.

    starts: (time, worker, clock, version) of every step; clocks_at_starts, and clocks after every event: by worker, of
    those that take part; pushed: (worker, clock) of the gradients pushed or given up before the run was over, less those
    of a worker that was lost before their turn, and less those that the servers went back behind."""

    parameters: Vector
    records: list[Record]
    starts: list[tuple[float, int, int, int]]
    seconds: float
    clocks_at_starts: list[dict[int, int]] = field(default_factory=list)
    clocks: list[dict[int, int]] = field(default_factory=list)
    pushed: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[Saved] = field(default_factory=list)
    events: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the position as JSON, (values, momentum) of every slice, and the records before it."""

    position: str
    slices: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
    records: list[Record]


@dataclass(order=True)
class Event:
    time: float
    worker: int
    kind: int
    clock: int = 0
    life: int = 0  # of the worker when it began; another one by now makes the event void
    parameters: Vector = field(default_factory=lambda: np.zeros(0), compare=False)
    away: float = 0.0  # how long a lost worker is


class Simulation:
    """rate is a/n. lose_at: {(worker, clock): seconds away}: it dies before it pushes that step, and joins again. losses:
    (time, worker, seconds away): it dies at that time, whatever it does. crash_at: at these events all servers start anew
    from the last checkpoint, and the event is lost; save_every: events between checkpoints. together: the servers see
    everything of one instant before they decide anything. barriers: steps before which all workers wait for each other."""

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
        losses: Iterable[tuple[float, int, float]] = (),
        crash_at: Iterable[int] = (),
        save_every: int = 0,
        together: bool = False,
        barriers: tuple[int, ...] = (),
    ) -> None:
        self.protocol, self.workers, self.steps, self.rate, self.stop = protocol, workers, steps, rate, stop
        self.gradient, self.step_time, self.momentum, self.servers = gradient, step_time, momentum, servers
        self.away, self.crash_at, self.save_every = dict(lose_at or {}), set(crash_at), save_every
        self.losses, self.together, self.barriers = list(losses), together, Barriers(barriers)
        self.bounds = slice_bounds(len(start), servers)
        empty = json.dumps(vars(Position()))
        self.saved = Saved(empty, [(start[b:e].copy(), np.zeros(e - b)) for b, e in self.bounds], [])
        self.run, self.queue, self.lives = Run(start, [], [], 0.0), list[Event](), [0] * workers
        self.computing: dict[int, tuple[float, Event]] = {}  # by worker: when it began, and its end

    def load(self, now: float) -> None:
        """All servers start from the last checkpoint, and all workers join."""
        values = json.loads(self.saved.position)
        position = Position(**values | {"clocks": {int(worker): clock for worker, clock in values["clocks"].items()}})
        budget = Budget(self.workers, self.steps, self.steps, self.stop, position)  # type: ignore[arg-type]
        self.coordinator = Coordinator(
            self.protocol,
            budget,
            num_servers=self.servers,
            rate=lambda epoch: self.rate,
            seconds=now,
            barriers=self.barriers,
        )
        self.slices = [
            ParameterSlice(v.copy(), m.copy(), heavy_ball(self.momentum), self.workers, "changes")
            for v, m in self.saved.slices
        ]
        self.pushed: dict[int, Vector] = {}  # by worker, until it is summed
        self.queue = [Event(time, worker, LOSE, life=-1, away=away) for time, worker, away in self.losses if time > now]
        heapq.heapify(self.queue)
        self.computing = {}
        self.run.records = self.saved.records[:]
        self.run.pushed = [(record.worker, record.clock) for record in self.run.records]
        for worker in range(self.workers):
            self.join(worker, now)
        self.carry_out(now)

    def join(self, worker: int, now: float) -> None:
        self.lives[worker] += 1
        for server in range(self.servers):
            self.coordinator.join(server, worker, self.lives[worker], now)

    def carry_out(self, now: float) -> None:
        for order, snapshot in self.coordinator.advance(now):
            self.execute(order, snapshot, now)
        for record in self.coordinator.records:
            if not record.accepted:
                self.pushed.pop(record.worker, None)
        self.run.records += self.coordinator.records
        self.coordinator.records = []
        self.run.clocks.append(self.clocks())

    def clocks(self) -> dict[int, int]:
        return {m.index: m.clock for m in self.coordinator.members if m.phase >= WorkerPhase.COMPUTING}

    def lose(self, worker: int, away: float, now: float) -> None:
        """A worker dies, and joins again after a while. Not one that is away already, or has done its last step."""
        if self.coordinator.members[worker].phase < WorkerPhase.COMPUTING:
            return
        if self.pushed.pop(worker, None) is not None:
            self.run.pushed.pop(max(at for at, (who, _) in enumerate(self.run.pushed) if who == worker))
        self.computing.pop(worker, None)
        self.coordinator.lose(worker)
        heapq.heappush(self.queue, Event(now + away, worker, JOIN, life=self.lives[worker]))

    def execute(self, order: Order, snapshot: Snapshot | None, now: float) -> None:
        weights = [share.weight for share in order.shares]
        gradients = [self.pushed.pop(share.worker) for share in order.shares]
        for (begin, end), part in zip(self.bounds, self.slices, strict=True):
            used = [gradient[begin:end] for gradient in gradients]
            if order.learning_rate is None:
                part.accumulate(used, weights)
            else:
                part.apply(used, order.learning_rate, weights)
        if snapshot:
            position = json.dumps(vars(snapshot.position))
            slices = [(part.values.copy(), part.momentum.copy()) for part in self.slices]
            self.saved = Saved(position, slices, self.run.records + self.coordinator.records)
            self.run.checkpoints.append(self.saved)
        parameters = np.concatenate([part.values for part in self.slices])
        clocks = self.clocks()
        for worker, _, clock in order.unblocked:
            self.run.starts.append((now, worker, clock, order.version))
            self.run.clocks_at_starts.append(clocks)
            end_at = now + self.step_time(worker, clock)
            event = Event(end_at, worker, PUSH, clock, self.lives[worker], parameters)
            self.computing[worker] = now, event
            heapq.heappush(self.queue, event)
        for worker, _, clock in order.cancelled:
            begun, event = self.computing[worker]
            part_s = (event.time - begun) / self.protocol.parts_of_a_step()
            end_at = begun + part_s * max(1, math.ceil((now - begun) / part_s))
            if end_at < event.time - part_s / 2:  # before the last part is done
                heapq.heappush(self.queue, Event(end_at, worker, GIVE_UP, clock, self.lives[worker]))

    def handle(self, event: Event) -> None:
        now, worker, session = event.time, event.worker, self.lives[event.worker]
        if event.kind == JOIN:
            self.join(worker, now)
        elif event.kind == LOSE:
            self.lose(worker, event.away, now)
        elif event.kind == GIVE_UP:
            if worker in self.computing and self.computing[worker][1].clock == event.clock:
                del self.computing[worker]
                if not self.coordinator.finished:
                    self.run.pushed.append((worker, event.clock))
                assert self.coordinator.give_up(worker, session, event.clock, now, StepMeasurements(0, 0.0, 0, 1.0))
        elif self.computing.get(worker, (0, None))[1] is event:
            if (pause := self.away.pop((worker, event.clock), None)) is not None:
                self.lose(worker, pause, now)
            else:
                del self.computing[worker]
                if not self.coordinator.finished:
                    steps = self.coordinator.steps_of_push(event.clock)
                    push = pushed(steps, self.gradient, self.rate, event.parameters, worker, event.clock)
                    self.pushed[worker] = push
                    self.run.pushed.append((worker, event.clock))
                for server in reversed(range(self.servers)):
                    measured = None if server else StepMeasurements(1, 0.0, 0, 1.0)
                    assert self.coordinator.push(server, worker, session, event.clock, now, measured)

    def to_the_end(self) -> Run:
        self.load(0.0)
        while self.queue:
            event = heapq.heappop(self.queue)
            is_last = not (self.together and self.queue and self.queue[0].time == event.time)
            if event.life in (self.lives[event.worker], -1):
                self.run.events += 1
                self.run.seconds = self.run.seconds if self.coordinator.finished else event.time
                if self.run.events in self.crash_at:
                    self.load(event.time)
                    continue
                self.handle(event)
                if self.save_every and self.run.events % self.save_every == 0:
                    self.coordinator.request_snapshot()
            if is_last:
                self.carry_out(event.time)
        assert self.coordinator.finished, "the run is stuck"
        self.run.parameters = np.concatenate([part.values for part in self.slices])
        return self.run


def pushed(steps: int, gradient: Gradient, rate: float, parameters: Vector, worker: int, clock: int) -> Vector:
    """Return the push of a worker: its gradient, or the sum of the gradients along the steps of its own copy."""
    own = parameters.copy()
    for step in range(clock, clock + steps):
        own -= rate * gradient(own, worker, step)
    return (parameters - own) / rate if steps > 1 else gradient(parameters, worker, clock)


def simulate(protocol: Protocol, **options: Any) -> Run:
    """What came of a run in virtual time; options: those of Simulation."""
    return Simulation(protocol, **options).to_the_end()


# --- what the tests of protocols share --------------------------------------------------------------------------------


def run(protocol: Protocol, workers: int = 4, steps: int = 12, **options: object) -> Run:
    """A run on a quadratic loss, unless the options say otherwise."""
    values: dict[str, Any] = {"gradient": quadratic, "start": START, "rate": 0.05} | options
    return simulate(protocol, workers=workers, steps=steps, **values)


def quadratic(parameters: Vector, worker: int, clock: int) -> Vector:
    """The gradient of a least-squares loss over random rows, fresh for every worker and clock."""
    rows = _rows(worker, clock)
    gradient: Vector = rows.T @ (rows @ parameters - 1) / len(rows)
    return gradient


@functools.cache
def _rows(worker: int, clock: int) -> Vector:
    return np.random.default_rng([worker, clock]).normal(size=(5, len(START)))


def variants(kind: type[Protocol]) -> list[Protocol]:
    """A protocol as it is by default, with each bounded parameter and all of them at their least, and with each choice."""
    found, least, hints = [kind()], dict[str, Any](), get_type_hints(kind)
    for item in fields(kind):
        about = item.metadata.get(OPTION)
        if about and about.least is not None:
            least[item.name] = int(about.least)
            with suppress(UsageError):  # two parameters may bound each other
                found.append(kind(**{item.name: int(about.least)}))
        found += [kind(**{item.name: choice}) for choice in get_args(hints[item.name]) if isinstance(choice, str)]
    return list(dict.fromkeys([*found, kind(**least)]))


ALL = [protocol for kind in PROTOCOLS.values() for protocol in variants(kind)]
