"""The event loop of a run in virtual time, which passes messages between virtual workers and the real servers' code."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path

import numpy as np

from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.write import WriteOutcome
from trainer.config import Config, RunFacts
from trainer.coordination.orders import Order, StepMeasurements
from trainer.data.gossip import GivenExamples
from trainer.home.folders import Folders
from trainer.leader.leader import Follower, Leader
from trainer.plan import FLOAT_BYTES
from trainer.rules import local_plan
from trainer.run_files import METRICS, PUSHES
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import recorded_losses
from trainer.runlog.read import iter_events, read_pushes
from trainer.server.slice_server import SliceServer
from trainer.simulation.compute import Compute
from trainer.simulation.network import CollectiveNetwork, Network
from trainer.simulation.options import SimulationSettings
from trainer.simulation.step_times import StepTimes
from trainer.transport.messages.heads import Message
from trainer.transport.messages.servers import Cancel, Join, Parameters, Push, Rejoin
from trainer.transport.status import RunStatus

KEEP_S = 0.2  # virtual seconds between checks for due checkpoints and log lines
NO_BODY = memoryview(b"{}")
SCRIPTED = "a scripted failure"
NO_TURN = Parameters(0, 0, 0, 0, 0, in_memory=False)


class Kind(IntEnum):
    """The kind of an event."""

    FINISH = 0  # a worker has computed its gradient
    ARRIVE = 1  # the gradient has reached the servers
    GIVE_UP = 2  # a worker stops its step between two micro-batches
    JOIN = 3
    DIE = 4
    CRASH = 5  # of a server
    RECOVER = 6
    OFFER = 7  # a worker's examples for others have reached server 0


@dataclass(order=True, slots=True)
class Event:
    """An event of the queue. Events of the same time are handled in the order of workers.

    Attributes:
        time: virtual seconds.
        worker: its index; -1 for the servers.
        kind: see Kind.
        attempt: the worker's attempt when the event was queued. FINISH, ARRIVE and GIVE_UP are void if it has changed.
        away_s: seconds until the restart, of DIE and CRASH.
    """

    time: float
    worker: int
    kind: Kind
    attempt: int = 0
    away_s: float = 0.0


@dataclass(slots=True)
class VirtualWorker:
    """The state of a virtual worker. All times are virtual seconds.

    Attributes:
        parts: the parameters at which it computes, one float32 array per server.
        session: number of its joins.
        attempt: changes with every step, join and death, which makes earlier events of the worker void.
        turn: the message that brought the parameters.
        step_start: start of the current step.
        ends: end of the current step.
        back_at: end of the latest scripted absence.
        offer: the examples that it has given last, with the session in which it did.
    """

    parts: list[Float32s]
    session: int = 0
    attempt: int = 0
    turn: Parameters = NO_TURN
    step_start: float = 0.0
    ends: float = 0.0
    back_at: float = 0.0
    offer: tuple[int, GivenExamples] | None = None


class Engine:
    """The simulation of one run: virtual workers, and the real leader and slice servers, driven by an event queue.

    A push costs O(log N) in the queue, the work of the servers, and ``compute``.

    Args:
        config, facts: the run.
        simulated: the virtual cluster.
        compute: computes the gradients.
        folders: the run's folders.
        observe: observe(engine) is called after every event.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        simulated: SimulationSettings,
        compute: Compute,
        folders: Folders,
        observe: Callable[[Engine], None],
    ) -> None:
        self.config = config
        self.facts = facts
        self.simulated = simulated
        self.compute = compute
        self.observe = observe
        self.folders = folders
        self.root = self.folders.work
        self.now, generation = begin_at(self.root)
        self.network = _network(config.stage_configs()[0], facts, simulated)
        self.step_times = StepTimes(config, facts, simulated)
        self.queue: list[Event] = []
        count = config.processes.servers
        nothing = np.empty(0, np.float32)
        self.workers = [VirtualWorker([nothing] * count) for _ in range(facts.num_workers)]
        self.has_snapshot = False  # True after an order for a snapshot, until the observer resets it
        self.down = False
        self.back_at = 0.0  # end of the latest scripted absence of the servers
        checkpoints = self.folders.checkpoints
        self.servers = [
            SliceServer(
                config, facts, index, checkpoints, partial(self._answer, index), wrote=partial(self._wrote, index)
            )
            for index in range(count)
        ]
        self.leader = Leader(
            config,
            facts,
            self.folders,
            self._send_order,
            self._send_load,
            self.servers[0].parameters,
            lambda: generation,
            send_pool=lambda worker, _, pool: compute.adopt(worker, pool),
        )

    def run(self) -> None:
        """Handle events until the run has ended or no event is left.

        Raises DataError if there is no sound checkpoint to load."""
        for failure in self.simulated.failures_of(self.facts.num_workers):
            if self.now and failure.at_s <= self.now:
                continue  # it happened before the run was resumed
            kind = Kind.CRASH if failure.worker is None else Kind.DIE
            self._schedule(failure.at_s, -1 if failure.worker is None else failure.worker, kind, away_s=failure.away_s)
        # Starts the run: all servers load the newest checkpoint and all workers join, which queues their first steps.
        self._recover(first=True)
        due = 0.0
        while self.queue and not self.is_over():
            event = heapq.heappop(self.queue)
            self.now = event.time
            self._handle(event)
            if self.now >= due and not self.down:  # a dead server writes nothing
                self.leader.keep(self.now)
                due = self.now + KEEP_S
            self.observe(self)
            self.leader.look_for_decision(self.now)  # the observer has evaluated the checkpoints of this event
        self.leader.keep(self.now)
        if self.leader.training:
            self.leader.training.journal.write_pushes()

    def is_over(self) -> bool:
        """Return whether the run has ended. Gradients that workers still compute then are not used."""
        return self.leader.training is not None and self.leader.training.coordinator.finished

    def status(self) -> RunStatus:
        """Return the status that the leader reports to a supervisor."""
        return self.leader.status(self.now)

    def trouble(self) -> str | None:
        """Return why the last checkpoint failed, as text, or None."""
        return self.leader.trouble(self.now)

    def interrupt(self) -> None:
        """Write a checkpoint, because the run is about to stop."""
        if not self.down:
            self.leader.end(self.now)

    # --- events -------------------------------------------------------------------------------------------------------

    def _schedule(self, time: float, worker: int, kind: Kind, away_s: float = 0.0) -> None:
        attempt = self.workers[worker].attempt if worker >= 0 else 0
        heapq.heappush(self.queue, Event(time, worker, kind, attempt, away_s))

    def _handle(self, event: Event) -> None:
        """Pass an event to the method of its kind, unless it belongs to a step that is void."""
        worker = event.worker
        if event.kind is Kind.CRASH:
            self._crash(event.away_s)
        elif event.kind is Kind.RECOVER:
            self._recover()
        elif event.kind is Kind.DIE:
            self._die(worker, event.away_s)
        elif event.kind is Kind.JOIN:
            self._join(worker)
        elif event.kind is Kind.OFFER:
            self._offer(worker)
        elif event.attempt != self.workers[worker].attempt or self.down:
            return  # the step was cancelled, or the worker or servers died meanwhile
        elif event.kind is Kind.FINISH and self.network:
            self._schedule(self.network.push(self.now), worker, Kind.ARRIVE)
        elif event.kind is Kind.GIVE_UP:
            self._give_up(worker)
        else:
            self._push(worker)

    def _join(self, worker: int) -> None:
        """Let a worker join at all servers with a new session; no-op while it is absent or the servers are down."""
        virtual = self.workers[worker]
        if self.down or virtual.back_at > self.now:
            return  # _recover makes all workers join; a worker that died again joins at its own restart
        virtual.session += 1
        virtual.attempt += 1
        for server in self.servers:
            server.join(b"", Join(worker, virtual.session), NO_BODY)
        for index in range(len(self.servers)):
            self.leader.joined(index, worker, virtual.session, self.now)

    def _push(self, worker: int) -> None:
        """Compute the gradient of a worker's step and give it to all servers at once.

        It is computed only now, when its virtual time is over, so that a cancelled step costs nothing."""
        virtual = self.workers[worker]
        turn = virtual.turn
        plan = local_plan(self.leader.stage.config, self.facts, turn.clock)
        result = self.compute.push(worker, turn.clock, virtual.parts, plan)
        measured = result.measurements((virtual.ends - virtual.step_start) / len(plan.rates))
        message = Push(worker, virtual.session, turn.generation, turn.clock, in_memory=False)
        virtual.attempt += 1
        for server in self.servers:
            server.push(b"", message, result.vector[server.begin : server.end].data.cast("B"))
        for index in reversed(range(len(self.servers))):  # server 0 last: only its message has the measurements
            self.leader.pushed(index, worker, virtual.session, turn.clock, self.now, None if index else measured)

    def _give_up(self, worker: int) -> None:
        """End the step of a worker whose gradient would be refused, and tell the leader, which assigns the next step.

        The report has no examples and no loss, the virtual seconds so far, and the rows of the mini-batch. The leader
        needs the rows to know where the worker's pass over its shard ends."""
        virtual = self.workers[worker]
        virtual.attempt += 1
        row_sums = self.compute.seen(worker, virtual.turn.clock)
        measured = StepMeasurements(0, 0.0, 0, self.now - virtual.step_start, seen=row_sums)
        self.leader.gave_up(worker, virtual.session, virtual.turn.clock, self.now, measured)

    def _offer(self, worker: int) -> None:
        """Deliver the examples that a worker gives to others, which the leader ignores if the worker was lost meanwhile."""
        offer = self.workers[worker].offer
        if offer and not self.down:
            session, (epoch, examples) = offer
            self.leader.offered(worker, session, epoch, self.now, examples)

    def _die(self, worker: int, away_s: float) -> None:
        """Let a worker die and restart after ``away_s`` virtual seconds. Its current step is lost."""
        self.workers[worker].attempt += 1  # voids the step that the worker was computing
        self.compute.restart(worker)
        self.workers[worker].back_at = max(self.workers[worker].back_at, self.now + away_s)
        if not self.down:
            self.leader.lost(worker, self.now)
        log_event(self.root, "restart", role="worker", index=worker, cause=SCRIPTED)
        self._schedule(self.now + away_s, worker, Kind.JOIN)

    def _crash(self, away_s: float) -> None:
        """Let all servers die and restart after ``away_s`` virtual seconds. They then load the newest checkpoint."""
        self.down = True
        self.back_at = max(self.back_at, self.now + away_s)
        log_event(self.root, "restart", role="server", index=0, cause=SCRIPTED)
        self._schedule(self.now + away_s, -1, Kind.RECOVER)

    def _recover(self, *, first: bool = False) -> None:
        """Let all servers load the newest checkpoint, and all workers join that are not absent.

        No-op after a crash if the servers have crashed again meanwhile: they return when the last absence is over.

        first: True at the start of the run. The other servers then register at the leader, which makes all of them load
        after the last one has. Otherwise, or if there is only one server, ``begin_generation`` makes them load."""
        if not first and (not self.down or self.now < self.back_at):
            return
        followers = range(1, len(self.servers))
        if first and followers:
            for index in followers:
                self.leader.hello(b"", index, 1)
        else:
            self.leader.begin_generation("server 0 was started again")
        self.down = False
        for worker, virtual in enumerate(self.workers):
            if virtual.back_at <= self.now:
                self._join(worker)

    # --- messages of servers ------------------------------------------------------------------------------------------

    def _send_order(self, followers: Sequence[Follower], order: Order) -> None:
        self.has_snapshot = self.has_snapshot or order.snapshot
        for server in self.servers:
            server.execute(order)

    def _send_load(self, followers: Sequence[Follower], generation: int, version: int, stage: int) -> None:
        if stage != self.servers[0].stage:
            self.network = _network(self.leader.stage.config, self.facts, self.simulated)
        for server in self.servers:
            server.load(generation, version, stage)
        # As the workers do when they join the generation.
        if self.config.reads_losses and self.config.run.example_ledger:
            self.compute.restore_losses(list(recorded_losses(self.folders.home, version)))
        for index in reversed(range(len(self.servers))):
            self.leader.loaded(index, generation, self.now)

    def _wrote(self, index: int, generation: int, sequence: int, outcome: WriteOutcome) -> None:
        self.leader.wrote(index, generation, sequence, outcome)

    def _answer(self, index: int, identity: bytes, message: Message, body: bytes | None) -> None:
        """Deliver a server's message to a virtual worker. A step begins when the last server's parameters are there.

        Stop is ignored: a worker without a step has no event. So is Rejoin after a crash, as ``_recover`` lets workers
        join; otherwise it means that the next stage begins, to which the worker's step does not belong."""
        if isinstance(message, Parameters):
            virtual = self.workers[message.worker]
            virtual.parts[index] = np.frombuffer(body or b"", np.float32)
            if index == len(self.servers) - 1:
                self._begin(virtual, message)
        elif isinstance(message, Cancel):
            self._cancel(self.workers[message.worker], message.worker)
        elif isinstance(message, Rejoin) and index == 0 and not self.down:
            self.workers[message.worker].attempt += 1
            self._schedule(self.now, message.worker, Kind.JOIN)

    def _begin(self, virtual: VirtualWorker, turn: Parameters) -> None:
        """Start a step of a worker, as soon as the parameters that were just sent have reached it."""
        virtual.turn = turn
        virtual.attempt += 1
        virtual.step_start = self.network.reply(self.now) if self.network else self.now
        steps = len(local_plan(self.leader.stage.config, self.facts, turn.clock).rates)
        clocks = range(turn.clock, turn.clock + steps)
        virtual.ends = virtual.step_start + sum(self.step_times.seconds(turn.worker, clock) for clock in clocks)
        # The step begins with the selection of examples for others, whose message takes as long as others. Of several
        # steps without a push between them, all gradients are computed at the end: so the first one selects for all.
        selections = [self.compute.selection(turn.worker, clock) for clock in clocks]
        if gifts := list(filter(None, selections)):
            virtual.offer = virtual.session, gifts[-1]
            latency_s = self.network.latency_s if self.network else 0.0
            self._schedule(virtual.step_start + latency_s, turn.worker, Kind.OFFER)
        self._schedule(virtual.ends, turn.worker, Kind.FINISH)

    def _cancel(self, virtual: VirtualWorker, worker: int) -> None:
        """Make the worker give up its step at the end of the current micro-batch, unless that is the last one."""
        part_s = (virtual.ends - virtual.step_start) / self.leader.stage.config.protocol.parts_of_a_step()
        if not part_s:
            return
        # The message takes the latency of the network, and cannot stop a step before its parameters have arrived.
        cancel_arrival = max(self.now + (self.network.latency_s if self.network else 0.0), virtual.step_start)
        # The worker only notices between two micro-batches. Half a part of slack absorbs rounding errors.
        stops = virtual.step_start + part_s * math.ceil((cancel_arrival - virtual.step_start) / part_s)
        if stops < virtual.ends - part_s / 2:
            self._schedule(max(stops, self.now), worker, Kind.GIVE_UP)


def describe_vectors(facts: RunFacts) -> str:
    """Return a line about the memory that the parameters and gradients of all workers take.

    A worker computes at a copy of the parameters, which workers share that have the same version. Its gradient is kept
    until an update uses it."""
    vector = FLOAT_BYTES * facts.elements
    most = 2 * facts.num_workers * vector
    return f"parameters and a gradient of {facts.num_workers:,} workers: up to {most / 1e9:.3g} GB of memory"


def begin_at(root: Path) -> tuple[float, int]:
    """Return the virtual time at which this start resumes, and a lower bound for the number of its generation.

    The bound is above every generation of the logged pushes. Pushes that a killed process logged after its last
    checkpoint therefore belong to an earlier generation, and are void."""
    pushes = root / PUSHES
    if not pushes.exists():
        return 0.0, 0
    generations = read_pushes(pushes, ["generation"])["generation"]
    now = max((event.time or 0.0 for event in iter_events(root / METRICS)), default=0.0)
    return now, int(generations.max()) + 1 if len(generations) else 0


def _network(config: Config, facts: RunFacts, simulated: SimulationSettings) -> Network | CollectiveNetwork | None:
    """Return the network of a stage, or None if messages take no time. config: of the stage."""
    if not simulated.latency_ms and simulated.bandwidth_mbps is None:
        return None
    # Workers that exchange among themselves sum each range of the gradients on another worker. The one server of this
    # simulation computes the same sums in the same order, so that only the times differ.
    if config.exchange.protocol is not None:
        bandwidth = simulated.bandwidth_mbps or math.inf
        return CollectiveNetwork(
            simulated.latency_ms / 1000, bandwidth, FLOAT_BYTES * facts.elements, facts.num_workers
        )
    message = FLOAT_BYTES * facts.elements / config.processes.servers
    return Network(simulated.latency_ms / 1000, simulated.bandwidth_mbps or math.inf, message)
