"""A network of workers and a leader without sockets: every order of messages and every fault is drawn from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.leader.worker_messages import FromWorker
from trainer.transport.messages.heads import Message
from trainer.transport.messages.peers import PeerBeat, Replacement, RunEnd

LEADER = -1
BEATS = -2  # the leader's end of the connections of heartbeats, which each worker has beside the other one
Bodies = tuple[bytes, ...]


class NetworkHost(Protocol):
    """A worker's process in the network. finished: whether it has heard of the end of the run."""

    worker: int
    process: int
    finished: bool

    def act(self) -> None:
        """Do one of the things that a client does by itself."""
        ...

    def receive(self, message: Message, bodies: Bodies, *, from_leader: bool) -> None: ...
    def describe(self) -> tuple[Any, ...]: ...


H = TypeVar("H", bound=NetworkHost)


class SimulatedNetwork(Generic[H]):
    """Workers and a leader. Channels keep the order of messages; everything else is drawn from a seed.

    A subclass makes the leader and the hosts, and calls ``begin`` once it is ready."""

    def __init__(self, seed: int, config: Config, facts: RunFacts, folders: Folders) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.facts = facts
        self.folders = folders
        self.now = 0.0
        self.clock = 1
        self.channels: dict[tuple[int, int], deque[tuple[Message, Bodies]]] = {}
        self.identities: dict[int, int] = {}
        self.hosts: dict[int, H] = {}
        self.frozen: set[int] = set()  # processes that neither act nor receive
        self.event = 0
        self.later: list[tuple[int, Callable[[], None]]] = []  # what happens at an event or after it
        self.leader: Any

    def make_leader(self) -> Any:
        raise NotImplementedError

    def make_host(self, worker: int) -> H:
        raise NotImplementedError

    def begin(self) -> None:
        """Start the leader and all workers."""
        self._start_leader()
        for worker in range(self.facts.num_workers):
            self.start(worker)

    def _start_leader(self) -> None:
        self.identities = {}
        self.leader = self.make_leader()
        self.leader.begin_generation()
        self.leader.regroup(self.now)

    def microseconds(self) -> int:
        self.clock += 1
        return self.clock

    def send_as_leader(self, worker: int, message: Message, *bodies: bytes) -> None:
        if worker in self.identities:
            self.post(LEADER, self.identities[worker], message, *bodies)

    def start(self, worker: int) -> None:
        host = self.make_host(worker)
        self.hosts[host.process] = host

    def post(self, source: int, target: int, message: Message, *bodies: bytes) -> None:
        """Send a message. Heartbeats to the leader have a connection of their own."""
        channel = (source, BEATS if isinstance(message, PeerBeat) else target)
        self.channels.setdefault(channel, deque()).append((message, bodies))

    def end(self, host: H) -> None:
        del self.hosts[host.process]
        self.frozen.discard(host.process)
        for channel in [channel for channel in self.channels if channel[1] == host.process]:
            del self.channels[channel]

    # --- events -------------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver the first message of a random channel."""
        channels = [
            channel for channel, messages in self.channels.items() if messages and channel[1] not in self.frozen
        ]
        if not channels:
            return
        channel = self.random.choice(channels)
        message, bodies = self.channels[channel].popleft()
        source, target = channel
        if target in (LEADER, BEATS):
            self._to_leader(source, target, message, bodies)
        elif target in self.hosts:
            self._to_host(self.hosts[target], message, bodies, from_leader=source in (LEADER, BEATS))

    def deliver_all(self) -> None:
        """Deliver messages until none is left."""
        while any(self.channels.values()):
            self.deliver()

    def _to_leader(self, source: int, end: int, message: Any, bodies: Bodies) -> None:
        """Hand the leader a message. end: that of the connection, over which the answer goes."""
        assert isinstance(message, FromWorker)
        if self.leader.processes.is_replaced(message.worker, message.process):
            self.post(end, source, Replacement(message.process), b"")
            return
        if not isinstance(message, PeerBeat):
            self.identities[message.worker] = source
        if answer := self.leader.hear(message, bodies[0], bodies[-1], self.now):
            self.post(end, source, *answer)

    def _to_host(self, host: H, message: Message, bodies: Bodies, *, from_leader: bool) -> None:
        if isinstance(message, RunEnd):
            host.finished = True
        elif isinstance(message, Replacement):
            self.end(host)
            if all(other.worker != host.worker for other in self.hosts.values()):
                self.start(host.worker)  # its supervisor does
        else:
            host.receive(message, bodies, from_leader=from_leader)

    def crash(self) -> None:
        """Kill a worker at any point of its sends. Half of the time its supervisor tells server 0."""
        host = self.random.choice(list(self.hosts.values()))
        for channel, messages in self.channels.items():
            if channel[0] == host.process:
                for _ in range(self.random.randint(0, len(messages))):
                    messages.pop()
        self.note_crash()
        self.end(host)
        if self.random.random() < 0.5:
            self.leader.lost(host.worker, self.now)
        self.start(host.worker)

    def note_crash(self) -> None:
        """Do what a crash does beside the loss of messages."""

    def freeze(self) -> None:
        """Freeze a worker for some time. Then it goes on, or its supervisor replaces it by a new process.

        The new process may start late, and server 0 may learn of the loss late, even after the new process has joined."""
        running = [host for host in self.hosts.values() if host.process not in self.frozen]
        if not running:
            return
        host = self.random.choice(running)
        self.frozen.add(host.process)
        if self.random.random() < 0.3:
            self.do_later(600, lambda: self.frozen.discard(host.process))
        else:
            self.do_later(600, lambda: self.replace(host))

    def freeze_two(self) -> None:
        """Freeze two workers at the same time."""
        self.freeze()
        self.freeze()

    def crash_unnoticed(self) -> None:
        """Kill a worker, of which server 0 learns late, and which starts late."""
        self.replace(self.random.choice(list(self.hosts.values())))

    def replace(self, host: H) -> None:
        """Kill a process, and soon start another one for its worker and tell server 0, in any order."""
        if host.process not in self.hosts:
            return
        self.note_crash()
        self.end(host)
        self.do_later(200, lambda: self.start(host.worker))
        self.do_later(300, lambda: self.leader.lost(host.worker, self.now))

    def do_later(self, most: int, what: Callable[[], None]) -> None:
        """Do something after a random number of events. most: of events."""
        self.later.append((self.event + self.random.randint(0, most), what))

    def suspect(self) -> None:
        """Start another process for a worker whose first one still runs, as if it had been frozen."""
        self.start(self.random.choice(list(self.hosts.values())).worker)

    def cut(self) -> None:
        """Cut a worker's connections to server 0, which loses messages and the address of the worker."""
        host = self.random.choice(list(self.hosts.values()))
        for channel in [(host.process, LEADER), (LEADER, host.process)]:
            self.channels.pop(channel, None)
        if self.identities.get(host.worker) == host.process:
            del self.identities[host.worker]
        self.note_cut(host)

    def note_cut(self, host: H) -> None:
        """Do what a worker does whose connection to server 0 has broken."""

    def crash_leader(self) -> None:
        """Kill server 0, with all messages from and to it."""
        for channel in [channel for channel in self.channels if LEADER in channel or BEATS in channel]:
            del self.channels[channel]
        self._start_leader()

    def run(self, faults: Sequence[str] = (), most: int = 60_000) -> int:
        """Run to the end, with the faults at random times, and return the number of events.

        faults: names of methods. most: events after which the run fails."""
        due = sorted(self.random.randint(20, 1500) for _ in faults)
        left = list(faults)
        for event in range(most):
            self.event = event
            for due_event, what_is_due in [each for each in self.later if each[0] <= event]:
                self.later.remove((due_event, what_is_due))
                what_is_due()
            if left and self.hosts and event >= due[len(faults) - len(left)]:
                getattr(self, left.pop())()
            what = self.random.random()
            running = [host for host in self.hosts.values() if host.process not in self.frozen]
            if what < 0.75:
                self.deliver()
            elif what < 0.97 and running:
                self.random.choice(running).act()
            else:
                self.now += 0.2
                self.leader.tick(self.now)
            if not (left or self.later) and self.hosts and all(host.finished for host in self.hosts.values()):
                return event
        raise AssertionError(f"not at the end after {most} events: {self.describe()}")

    def describe(self) -> str:
        """Return the state of all workers and of the leader."""
        hosts = [(host.worker, *host.describe()) for host in self.hosts.values()]
        return f"{hosts}, {self.leader.status(self.now)}, view {self.leader.number}"
