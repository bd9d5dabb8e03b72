"""Coordinator and slice_servers under every order of events that sockets, dying workers and slow hosts can make of them.

A state machine of hypothesis delivers, delays, repeats and loses what real workers, servers and supervisors would send;
messages of one sender to one receiver keep their order, as they do in a connection. Gradients are unit vectors, one for
every (worker, clock): what the slices hold afterwards tells which were applied, and how often."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.configs import make_config
from tests.support.tiers import only
from tests.support.virtual_time import ALL
from trainer.config import RunFacts
from trainer.coordination.barriers import Barriers
from trainer.coordination.budget import Budget
from trainer.coordination.clocks import Clocks
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.membership import WorkerPhase
from trainer.coordination.momentum import heavy_ball
from trainer.coordination.orders import Order, Record, Share, Snapshot, StepMeasurements
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.server.slice_server import SliceServer
from trainer.transport.messages.heads import Message
from trainer.transport.messages.servers import Cancel, GiveUp, Join, Parameters, Push, Rejoin, Stop

SILENCE_S = 10.0
START_WAIT_S = 30.0


@dataclass
class Worker:
    """What a worker's process knows: its session, the step it computes, the answers that it waits for."""

    session: int
    turn: int | None = None
    joining: bool = True
    stopped: bool = False
    answers: dict[int, Parameters | Stop] = field(default_factory=dict)


class World:
    """Workers, servers and the connections between them; nothing happens but by ``deliver``."""

    def __init__(
        self,
        protocol: Protocol,
        workers: int,
        servers: int,
        steps: int,
        stop: str,
        barriers: tuple[int, ...] = (),
    ) -> None:
        self.barriers = barriers
        self.workers_, self.servers, self.steps, self.stop = workers, servers, steps, stop
        self.protocol = protocol
        # A worker's clock passes the budget by less than one push.
        self.clocks = workers * steps + protocol.most_local_steps()
        self.width = workers * self.clocks
        config = make_config("", "", servers=servers, steps=steps, momentum=0.0, batch_size=workers)
        facts = RunFacts(workers, workers, servers * self.width, 0)
        self.now, self.sessions = 0.0, 100
        self.pipes: dict[tuple[str, int, int], deque[Any]] = defaultdict(deque)
        self.slice_servers = [
            SliceServer(config, facts, index, Path(), self._answer(index)) for index in range(servers)
        ]
        for slice_server in self.slice_servers:
            empty = np.zeros(0, np.float32)
            slice_server.slice = ParameterSlice(
                np.zeros(self.width, np.float32), empty, heavy_ball(0.0), workers, "whole"
            )
            slice_server.slice.momentum = np.zeros(self.width, np.float32)
        self.coordinator = Coordinator(
            protocol,
            Budget(workers, steps, 1, stop),  # type: ignore[arg-type]
            num_servers=servers,
            rate=lambda epoch: 1.0,
            start_wait_s=START_WAIT_S,
            barriers=Barriers(barriers),
        )
        self.orders: list[Order] = []
        self.records: list[Record] = []
        self.states: list[npt.NDArray[np.float32]] = []
        self.summed: list[Share] = []  # that no update has applied yet
        self.used: dict[tuple[int, int], float] = {}  # (worker, clock) of every gradient in a sum, and its weight
        self.applied = np.zeros(self.width, np.float32)
        self.workers = [self.process() for _ in range(workers)]
        for worker in range(workers):
            self.send_join(worker)

    @property
    def budget(self) -> int:
        return self.steps * self.workers_

    def process(self) -> Worker:
        self.sessions += 1
        return Worker(self.sessions)

    # --- workers ------------------------------------------------------------------------------------------------------

    def send_join(self, worker: int) -> None:
        for server in range(self.servers):
            self.pipes["up", worker, server].append(Join(worker, self.workers[worker].session))

    def push(self, worker: int) -> None:
        mine = self.workers[worker]
        message = Push(worker, mine.session, 0, mine.turn or 0, in_memory=False)
        for server in range(self.servers):
            self.pipes["up", worker, server].append(message)
        mine.turn, mine.answers = None, {}

    def give_up(self, worker: int) -> None:
        """The worker was told that its gradient comes too late, and stops between two micro-batches."""
        mine = self.workers[worker]
        self.pipes["up", worker, 0].append(GiveUp(worker, mine.session, mine.turn or 0))
        mine.turn, mine.answers = None, {}

    def restart(self, worker: int) -> None:
        """A new process, or an old one that lost its connection: it waits for nothing of before."""
        self.workers[worker] = self.process()
        for server in range(self.servers):
            self.pipes["down", worker, server].clear()
        self.send_join(worker)

    def beat(self, worker: int) -> None:
        mine = self.workers[worker]
        if not mine.stopped and not self.coordinator.alive(worker, mine.session, self.now) and not mine.joining:
            self.restart(worker)

    def _hear(self, worker: int, server: int, message: Parameters | Stop | Cancel | Rejoin) -> None:
        mine = self.workers[worker]
        if message.session != mine.session:
            return
        if isinstance(message, Rejoin):
            self.sessions = max(self.sessions, message.later_session)
            return self.restart(worker)
        if isinstance(message, Cancel):
            if mine.turn == message.clock:
                self.give_up(worker)
            return None
        mine.answers[server] = message
        if len(mine.answers) < self.servers:
            return None
        if len({(answer.clock, answer.version) for answer in mine.answers.values()}) > 1:
            return self.restart(worker)  # it was given up and let in again: some answers are to its first join
        mine.joining, mine.answers = False, {}
        if isinstance(message, Stop):
            mine.stopped = True
        else:
            mine.turn = message.clock
        return None

    # --- servers ------------------------------------------------------------------------------------------------------

    def _answer(self, server: int) -> Callable[[bytes, Message, bytes | None], None]:
        def answer(identity: bytes, message: Message, body: bytes | None) -> None:
            assert isinstance(message, Parameters | Stop | Cancel | Rejoin)
            self.pipes["down", message.worker, server].append(message)

        return answer

    def _serve(self, worker: int, server: int, message: Join | Push | GiveUp) -> None:
        slice_server = self.slice_servers[server]
        if isinstance(message, GiveUp):
            given_up = (worker, message.session, message.clock, self.now, StepMeasurements(0, 0.0, 0, 1.0))
            if not self.coordinator.give_up(*given_up):
                self.pipes["down", worker, 0].append(Rejoin(worker, message.session))
            return self.advance()
        if isinstance(message, Join):
            slice_server.join(b"", message, memoryview(b"{}"))
        else:
            vector = np.zeros(self.width, np.float32)
            vector[self.place(worker, message.clock)] = 1.0
            if not slice_server.push(b"", message, memoryview(vector.tobytes())):
                return None
        if server:
            self.pipes["held", server, 0].append(message)
        else:
            self._held(0, message)
        return None

    def _held(self, server: int, message: Join | Push) -> None:
        worker = message.worker
        if isinstance(message, Join):
            self.coordinator.join(server, worker, message.session, self.now)
        else:
            measured = None if server else StepMeasurements(1, 0.0, 0, 1.0)
            arrival = (server, worker, message.session, message.clock, self.now, measured)
            if not self.coordinator.push(*arrival) and server == 0:
                self.pipes["down", worker, 0].append(Rejoin(worker, message.session))
        self.advance()

    def advance(self) -> None:
        for order, snapshot in self.coordinator.advance(self.now):
            self._check(order, snapshot)
            order = order._replace(snapshot=False)  # there is no folder to write to
            self.slice_servers[0].execute(order)
            self.states.append(self.slice_servers[0].slice.values.copy())
            for server in range(1, self.servers):
                self.pipes["order", server, 0].append(order)
        self.records += self.coordinator.records
        self.coordinator.records = []

    def deliver(self, name: tuple[str, int, int]) -> None:
        kind, sender, receiver = name
        message = self.pipes[name].popleft()
        if kind == "up":
            self._serve(sender, receiver, message)
        elif kind == "down":
            self._hear(sender, receiver, message)
        elif kind == "held":
            self._held(sender, message)
        else:
            self.slice_servers[sender].execute(message)
            np.testing.assert_array_equal(self.slice_servers[sender].slice.values, self.states[message.sequence - 1])

    def full(self) -> list[tuple[str, int, int]]:
        return sorted(name for name, pipe in self.pipes.items() if pipe)

    def place(self, worker: int, clock: int) -> int:
        return worker * self.clocks + clock

    def mini_batches(self, gradient: Share | Record) -> int:
        """Return the number of mini-batches whose gradients a push sums."""
        return self.coordinator.steps_of_push(gradient.clock)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _check(self, order: Order, snapshot: Snapshot | None) -> None:
        before = self.orders[-1] if self.orders else Order(0, 0)
        self.orders.append(order)
        assert order.sequence == before.sequence + 1
        assert order.version == before.version + (order.learning_rate is not None)
        members = self.coordinator.members
        for share in order.shares:
            assert (share.worker, share.clock) not in self.used, "a gradient was used twice"
            assert members[share.worker].phase not in (WorkerPhase.ABSENT, WorkerPhase.JOINING), "its worker was lost"
            self.used[share.worker, share.clock] = share.weight
        self.summed += order.shares
        if order.learning_rate is not None:
            takers = [share.worker for share in self.summed]
            size = self.protocol.update_size(self.workers_)
            assert 1 <= len(takers) <= size
            if self.protocol.in_worker_order:
                assert takers == list(range(self.workers_))
            for share in self.summed:
                self.applied[self.place(share.worker, share.clock)] -= np.float32(share.weight)
            self.summed = []
        bound = self.protocol.clock_bound()
        if bound is not None:
            away = (WorkerPhase.ABSENT, WorkerPhase.JOINING, WorkerPhase.FINISHED)
            slowest = min((m.clock for m in members if m.phase not in away), default=0)
            assert all(clock - slowest <= bound for _, _, clock in order.unblocked)
        unapplied = Counter[int]()
        for share in self.summed:
            unapplied[share.worker] += self.mini_batches(share)
        least = min(member.clock - unapplied[member.index] for member in members)
        for _, _, clock in order.unblocked:
            assert all(least >= barrier for barrier in self.barriers if barrier <= clock), "it passed a barrier alone"
        assert order.snapshot == (snapshot is not None)
        if snapshot:
            for worker, member in enumerate(members):
                clock = member.clock - unapplied[worker]
                if member.phase in (WorkerPhase.ABSENT, WorkerPhase.JOINING) and not self.waits_later(clock):
                    clock = self.protocol.clock_on_joining(clock, self.coordinator.view)
                assert snapshot.position.clocks[worker] == clock
            assert snapshot.position.version == order.version

    def waits_later(self, clock: int) -> bool:
        """Return whether a barrier follows a step."""
        return any(barrier > clock for barrier in self.barriers)

    def check(self) -> None:
        np.testing.assert_allclose(self.slice_servers[0].slice.values, self.applied, rtol=1e-6)
        accepted = [record for record in self.records if record.accepted]
        assert len(accepted) == np.count_nonzero(self.applied)
        assert self.coordinator.budget.position.accepted == sum(map(self.mini_batches, accepted))
        last = self.workers_ if self.stop == "local" else 1  # pushes that may reach beyond the end of the run
        beyond = last * (self.protocol.most_local_steps() - 1)
        assert self.coordinator.budget.position.accepted <= self.budget + beyond
        if self.protocol.synchronous:
            assert all(record.staleness == 0 for record in accepted)
        assert len({(record.worker, record.clock) for record in accepted}) == len(accepted)
        assert all(0 <= record.staleness < record.version for record in accepted)
        assert [r.version for r in accepted] == sorted(r.version for r in accepted)

    def run_to_the_end(self) -> None:
        """Nothing is lost any more: then everybody gets to the end, in a bounded number of steps."""
        for _ in range(40 * (self.budget + 4)):
            for name in self.full():
                while self.pipes[name]:
                    self.deliver(name)
            self.now += 1.0
            for worker, mine in enumerate(self.workers):
                self.beat(worker)
                if mine.turn is not None:
                    self.push(worker)
                elif mine.joining:
                    self.send_join(worker)
            self.coordinator.lose_silent(self.now, SILENCE_S)
            self.advance()
            if all(mine.stopped for mine in self.workers) and not self.full():
                return
        raise AssertionError(f"stuck: {[member.phase for member in self.coordinator.members]}, {self.workers}")


class Storm(RuleBasedStateMachine):
    """One run, and what can happen to it."""

    world: World

    @initialize(
        protocol=st.sampled_from(ALL),
        workers=st.integers(1, 3),
        servers=st.integers(1, 3),
        steps=st.integers(1, 4),
        stop=st.sampled_from(["global", "local"]),
        barriers=st.sampled_from([(), (1,), (2, 3)]),
    )
    def begin(
        self, protocol: Protocol, workers: int, servers: int, steps: int, stop: str, barriers: tuple[int, ...]
    ) -> None:
        clocks = () if protocol.refuses_gradients else tuple(clock for clock in barriers if clock < steps)
        self.world = World(protocol, workers, servers, steps, stop, clocks)

    def _worker(self, number: int) -> int:
        return number % self.world.workers_

    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=12))
    def messages_arrive_in_some_order(self, numbers: list[int]) -> None:
        for number in numbers:
            if full := self.world.full():
                self.world.deliver(full[number % len(full)])

    @rule()
    def all_messages_arrive(self) -> None:
        while full := self.world.full():
            self.world.deliver(full[0])

    @rule()
    def all_steps_are_done(self) -> None:
        for worker, mine in enumerate(self.world.workers):
            if mine.turn is not None:
                self.world.push(worker)

    @rule(number=st.integers(0, 2))
    def a_step_is_done(self, number: int) -> None:
        if self.world.workers[self._worker(number)].turn is not None:
            self.world.push(self._worker(number))

    @rule(number=st.integers(0, 2))
    def a_worker_dies_and_its_supervisor_starts_another(self, number: int) -> None:
        self.world.restart(self._worker(number))
        self.world.coordinator.lose(self._worker(number))
        self.world.advance()

    @rule(number=st.integers(0, 2))
    def a_worker_loses_its_connection_and_joins_again(self, number: int) -> None:
        self.world.restart(self._worker(number))

    @rule(number=st.integers(0, 2))
    def a_worker_is_given_up_while_it_lives(self, number: int) -> None:
        self.world.coordinator.lose(self._worker(number))
        self.world.advance()

    @rule(number=st.integers(0, 2), behind=st.integers(1, 100))
    def a_worker_starts_on_a_host_whose_clock_is_behind(self, number: int, behind: int) -> None:
        self.world.restart(self._worker(number))
        worker = self.world.workers[self._worker(number)]
        worker.session = max(1, worker.session - behind)
        self.world.send_join(self._worker(number))

    @rule(number=st.integers(0, 2))
    def a_worker_asks_once_more(self, number: int) -> None:
        if self.world.workers[self._worker(number)].joining:
            self.world.send_join(self._worker(number))

    @rule(number=st.integers(0, 2))
    def a_worker_gives_a_heartbeat(self, number: int) -> None:
        self.world.beat(self._worker(number))

    @rule(seconds=st.sampled_from([1.0, SILENCE_S / 2, SILENCE_S + 1, START_WAIT_S]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.coordinator.lose_silent(self.world.now, SILENCE_S)
        self.world.advance()

    @rule(number=st.integers(0, 2), server=st.integers(0, 2), ahead=st.integers(-3, 3), old=st.integers(0, 5))
    @precondition(lambda self: hasattr(self, "world"))
    def a_gradient_of_another_time_arrives(self, number: int, server: int, ahead: int, old: int) -> None:
        coordinator, worker = self.world.coordinator, self._worker(number)
        member = coordinator.members[worker]
        if ahead or old:
            before = (member.phase, set(member.held_by), dict(coordinator.ledger.waiting))
            late = (server % self.world.servers, worker, member.session - old, member.clock + ahead)
            assert not coordinator.push(*late, self.world.now, StepMeasurements(1, 0.0, 0, 1.0))
            assert before == (member.phase, set(member.held_by), dict(coordinator.ledger.waiting))

    @rule()
    def a_checkpoint_is_wanted(self) -> None:
        self.world.coordinator.request_snapshot()
        self.world.advance()

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_to_the_end()
        world.check()
        assert world.coordinator.finished
        # Each step before the last barrier is made once, whoever died.
        pushes = [(r.worker, r.clock + step) for r in world.records for step in range(world.mini_batches(r))]
        early = [step for step in pushes if world.waits_later(step[1])]
        assert len(early) == len(set(early)) == max(world.barriers, default=0) * world.workers_
        if world.stop == "global":
            beyond = world.coordinator.budget.position.accepted - world.budget
            assert 0 <= beyond < world.protocol.most_local_steps()
        else:  # no gradient is lost: of a worker that is lost, the steps that it was to take up again
            assert not world.summed
            unused = {share for share in world.used} - {(r.worker, r.clock) for r in world.records}
            assert not unused
        if world.protocol.reproducible:  # whatever happened, it ends like an undisturbed run
            done = {world.place(worker, clock) for worker in range(world.workers_) for clock in range(world.steps)}
            assert set(np.flatnonzero(world.slice_servers[-1].slice.values)) == done


@pytest.mark.parametrize("examples", only([15], [15, 150]))
def test_no_order_of_events_breaks_a_run_or_stops_it(examples: int) -> None:
    run_state_machine_as_test(Storm, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))


def test_a_gradient_that_an_order_uses_outlives_its_worker() -> None:
    """The worker joins again at a follower after its gradient was counted there, and before the order arrives."""
    world = World(ASP(), 1, 2, 2, "global")
    while full := world.full():
        world.deliver(full[0])
    world.push(0)
    world.deliver(("up", 0, 1))
    world.deliver(("held", 1, 0))
    world.deliver(("up", 0, 0))  # now all servers hold it, and server 0 orders an update
    world.restart(0)
    world.deliver(("up", 0, 1))
    world.deliver(("order", 1, 0))
    world.run_to_the_end()
    assert world.coordinator.budget.position.accepted == 2
    world.check()


def test_a_join_on_another_connection_needs_a_new_session() -> None:
    """The answer to the first connection is lost with it, so that the worker must not wait for it."""
    sent: list[tuple[Any, ...]] = []
    facts = RunFacts(1, 1, 4, 0)
    server = SliceServer(make_config("", ""), facts, 0, Path(), lambda *message: sent.append(message))
    for identity in (b"first", b"first", b"second"):
        assert not sent
        server.join(identity, Join(0, 5), memoryview(b"{}"))
    assert sent == [(b"second", Rejoin(0, 5), None)]


def test_clocks_take_the_memory_of_the_workers_alone() -> None:
    clocks = Clocks()
    clocks.put(0, 0)
    for clock in range(1, 10_000):
        clocks.put(1, clock)
    assert (clocks.least(), clocks.greatest()) == (0, 9_999)
    assert len(clocks._low) + len(clocks._high) < 200
