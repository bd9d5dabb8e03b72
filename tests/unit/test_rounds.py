"""All-reduce in a simulated network: any order of messages and any crashes end with the bits of bsp."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trainer.checkpoints.read import read_slice_range
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import WriteOutcome, write_slice, write_state
from trainer.config import Config, Data, RunFacts, RunSpec, slice_bounds
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.home.folders import Folders
from trainer.leader.rounds import FromWorker, RoundsLeader, replaced
from trainer.rules import build_slice, worker_rate
from trainer.run_files import PUSHES
from trainer.runlog.read import read_pushes
from trainer.transport.messages import (
    CopyReceipt,
    GradientPiece,
    LinkLoss,
    Message,
    PeerBeat,
    PeerView,
    RangeSum,
    Replacement,
    RunEnd,
    WantSnapshot,
    pack_json,
)
from trainer.worker.replica import Body, Phase, Replica

Vector = npt.NDArray[np.float32]
PARAMETERS = 5
STATISTICS = 2
STEPS = 5
LEADER = -1


def run_config(output: Path, **run: Any) -> Config:
    return Config(
        Data(shards="unused", batch_size=6), RunSpec(output=str(output), steps=STEPS, **run), exchange=AllReduce()
    )


def run_facts(workers: int) -> RunFacts:
    return RunFacts(workers, 12, PARAMETERS, STATISTICS)  # 2 steps per epoch


def gradient(worker: int, clock: int, values: Vector) -> Vector:
    """A gradient whose sum depends on the order of the additions."""
    noise = np.random.default_rng([worker, clock]).normal(size=len(values)).astype(np.float32)
    return (noise + np.float32(0.1) * values).astype(np.float32)


def expected(config: Config, facts: RunFacts) -> Vector:
    """The parameters of bsp in one process."""
    whole = build_slice(config, facts.num_workers, *initial())
    for step in range(STEPS):
        rate = worker_rate(config, facts, step / config.steps_per_epoch(facts.rows))
        pushed = [gradient(worker, step, whole.values) for worker in range(facts.num_workers)]
        whole.apply(pushed, rate, [1.0] * facts.num_workers)
    return whole.values


def initial() -> tuple[Vector, Vector]:
    values = np.linspace(-1, 1, PARAMETERS + STATISTICS).astype(np.float32)
    return values, np.zeros(PARAMETERS, np.float32)


class Host:
    """A worker's process in the network. It implements Links for its replica."""

    def __init__(self, network: Network, worker: int) -> None:
        self.network = network
        self.worker = worker
        self.process = network.random.getrandbits(60)
        self.peers: list[int] = []
        self.group = 0  # number of the view whose members the collective connects
        self.finished = False
        elements = PARAMETERS + STATISTICS
        self.pushed = np.zeros(elements, np.float32)
        self.replica = Replica(
            network.config, network.facts, worker, self.process, np.zeros(elements, np.float32), self.pushed,
            np.zeros(elements, np.float32), self,
            lambda version: read_slice_range(network.checkpoints, version, 0, elements), self._write,
            self if network.has_collective else None,
        )  # fmt: skip

    # Links
    def connect(self, number: int, members: Sequence[Mapping[str, Any]]) -> None:
        self.peers = [member["process"] for member in members]

    def send(self, worker: int, message: Message, *bodies: Body) -> None:
        self.network.post(self.process, self.peers[worker], message, *map(bytes, bodies))

    def shares_memory(self, worker: int) -> bool:
        return False

    def memory_of(self, worker: int) -> Any:
        raise AssertionError("messages carry the elements")

    def offer_piece(self, number: int, version: int) -> None: ...
    def offer_sum(self, number: int, version: int) -> None: ...

    # Collective
    def open(self, number: int, members: Sequence[Mapping[str, Any]]) -> None:
        self.group = number

    def close(self) -> None:
        self.group = 0

    def start(self, version: int, gradient: Vector, factor: float) -> None:
        self.network.add_up(self.process, self.worker, (self.group, version), gradient * np.float32(factor))

    # the client's loop, an event at a time
    def act(self) -> None:
        """Do one of the things that a client does by itself: ask to join, compute a step, report, beat."""
        replica = self.replica
        if self.finished:
            return
        if replica.phase is Phase.OUTSIDE:
            introduction = {"address": "", "host": "", "memory": {}, **replica.holding()}
            message, rounds = replica.joining()
            self.network.post(self.process, LEADER, message, pack_json(introduction), rounds)
        elif replica.phase is Phase.TURN and not replica.must_wait:
            self.pushed[:] = gradient(self.worker, replica.clock, replica.values)
            replica.values[PARAMETERS:] += 1  # as BatchNorm does in the forward pass
            loss = self.network.losses.get((self.worker, replica.clock), 1.0)
            replica.submit(StepMeasurements(2, loss, 1, 0.1))
        elif self.worker == 0 and (report := replica.report()) and self.network.random.random() < 0.5:
            self.network.post(self.process, LEADER, report[0], b"", report[1])
        else:
            beat = PeerBeat(self.worker, self.process, replica.number, max(0, replica.version))
            self.network.post(self.process, LEADER, beat, b"")

    def receive(self, message: Message, bodies: tuple[bytes, ...]) -> None:
        if isinstance(message, RunEnd):
            self.finished = True
        elif isinstance(message, Replacement):
            self.network.end(self)
            if all(host.worker != self.worker for host in self.network.hosts.values()):
                self.network.start(self.worker)  # its supervisor does
        elif self.network.is_of_leader(message):
            self.replica.obey(message, bodies[0])
        else:
            self.replica.handle(message, bodies)

    def _write(self, generation: int, version: int, values: Vector, momentum: Vector) -> None:
        total = len(values)
        write_slice(
            folder_of(self.network.checkpoints, version), 0, 1, version, 0, total, total, values, momentum, generation
        )
        receipt = CopyReceipt(self.worker, self.process, generation, version, int(WriteOutcome.WRITTEN))
        self.network.post(self.process, LEADER, receipt, b"")


class Network:
    """Workers and a leader. Channels keep the order of messages; everything else is drawn from a seed."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        workers: int,
        losses: Mapping[tuple[int, int], float] | None = None,
        *,
        has_collective: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.has_collective = has_collective
        self.operations: dict[tuple[int, int], dict[int, tuple[int, Vector]]] = {}  # by view and version, by worker
        self.sums: list[tuple[int, tuple[int, int], Vector]] = []  # by process, on their way
        self.config = run_config(folder, checkpoint_every_s=1.5)
        self.facts = run_facts(workers)
        self.folders = Folders.from_home(folder)
        self.checkpoints = self.folders.checkpoints
        self.losses = losses or {}
        self.now = 0.0
        self.clock = 1
        self.sent: Counter[int] = Counter()  # bytes of gradients and sums, by process
        self.channels: dict[tuple[int, int], deque[tuple[Message, tuple[bytes, ...]]]] = {}
        self.hosts: dict[int, Host] = {}
        self._first_checkpoint()
        self.leader = self._start_leader()
        for worker in range(workers):
            self.start(worker)

    def _first_checkpoint(self) -> None:
        values, momentum = initial()
        total = len(values)
        write_slice(folder_of(self.checkpoints, 0), 0, 1, 0, 0, total, total, values, momentum)
        identity = self.config.identity()
        clocks = dict.fromkeys(range(self.facts.num_workers), 0)
        state = RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, PARAMETERS, STATISTICS, identity)
        write_state(folder_of(self.checkpoints, 0), state)

    def _start_leader(self) -> RoundsLeader:
        self.identities: dict[int, int] = {}
        leader = RoundsLeader(self.config, self.facts, self.folders, self._of_leader, self._microseconds)
        leader.gather()
        leader.regroup(self.now)
        return leader

    def _microseconds(self) -> int:
        self.clock += 1
        return self.clock

    def _of_leader(self, worker: int, message: Message, *bodies: bytes) -> None:
        if worker in self.identities:
            self.post(LEADER, self.identities[worker], message, *bodies)

    def start(self, worker: int) -> None:
        host = Host(self, worker)
        self.hosts[host.process] = host

    def post(self, source: int, target: int, message: Message, *bodies: bytes) -> None:
        self.channels.setdefault((source, target), deque()).append((message, bodies))
        if isinstance(message, GradientPiece | RangeSum):
            self.sent[source] += len(bodies[1])

    def add_up(self, process: int, worker: int, operation: tuple[int, int], gradient: Vector) -> None:
        """Take a worker's gradient. Once all are there, each worker's operation succeeds, or fails, at its own time."""
        parts = self.operations.setdefault(operation, {})
        parts[worker] = (process, gradient)
        if len(parts) == self.facts.num_workers:
            total = parts[0][1].copy()
            for other in range(1, self.facts.num_workers):
                total += parts[other][1]
            self.sums += [(member, operation, total) for member, _ in parts.values()]

    def end(self, host: Host) -> None:
        del self.hosts[host.process]
        for channel in [channel for channel in self.channels if channel[1] == host.process]:
            del self.channels[channel]

    def is_of_leader(self, message: Message) -> bool:
        names = ("Regroup", "PeerView", "Settlement", "WantSnapshot", "WriteCopy")
        return type(message).__name__ in names

    # --- events -------------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Deliver the first message of a random channel, or end an operation of the collective."""
        if self.sums and self.random.random() < 0.3:
            process, (number, version), total = self.sums.pop(self.random.randrange(len(self.sums)))
            if process in self.hosts and self.hosts[process].group == number:
                self.hosts[process].replica.collected(number, version, total)
            return
        channels = [channel for channel, messages in self.channels.items() if messages]
        if not channels:
            return
        channel = self.random.choice(channels)
        message, bodies = self.channels[channel].popleft()
        source, target = channel
        if target == LEADER:
            self._to_leader(source, message, bodies)
        elif target in self.hosts:
            self.hosts[target].receive(message, bodies)

    def _to_leader(self, source: int, message: Any, bodies: tuple[bytes, ...]) -> None:
        assert isinstance(message, FromWorker)
        if self.leader.processes.is_replaced(message.worker, message.process):
            self.post(LEADER, source, *replaced(message.process))
            return
        if not isinstance(message, PeerBeat):
            self.identities[message.worker] = source
        if answer := self.leader.hear(message, bodies[0], bodies[-1], self.now):
            self.post(LEADER, source, *answer)

    def crash(self) -> None:
        """Kill a worker at any point of its sends. Half of the time its supervisor tells server 0."""
        host = self.random.choice(list(self.hosts.values()))
        for channel, messages in self.channels.items():
            if channel[0] == host.process:
                for _ in range(self.random.randint(0, len(messages))):
                    messages.pop()
        self._fail_operations(0.5)
        self.end(host)
        if self.random.random() < 0.5:
            self.leader.lost(host.worker, self.now)
        self.start(host.worker)

    def fail(self) -> None:
        """Break the connections of the collective between living workers."""
        self._fail_operations(1.0)

    def _fail_operations(self, share: float) -> None:
        """Fail a share of the operations that have not ended, on some workers and not on others."""
        for each in list(self.sums):
            host = self.hosts.get(each[0])
            if host and self.random.random() < share:
                self.sums.remove(each)
                self.post(host.process, LEADER, LinkLoss(host.worker, host.process, each[1][0]), b"")

    def suspect(self) -> None:
        """Start another process for a worker whose first one still runs, as if it had been frozen."""
        self.start(self.random.choice(list(self.hosts.values())).worker)

    def cut(self) -> None:
        """Cut a worker's connection to server 0, which loses messages and the address of the worker."""
        host = self.random.choice(list(self.hosts.values()))
        for channel in [(host.process, LEADER), (LEADER, host.process)]:
            self.channels.pop(channel, None)
        if self.identities.get(host.worker) == host.process:
            del self.identities[host.worker]
        if host.replica.phase is not Phase.OUTSIDE:
            self.post(host.process, LEADER, LinkLoss(host.worker, host.process, host.replica.number), b"")

    def crash_leader(self) -> None:
        """Kill server 0, with all messages from and to it."""
        for channel in [channel for channel in self.channels if LEADER in channel]:
            del self.channels[channel]
        self.leader = self._start_leader()

    def run(self, faults: Sequence[str], most: int = 60_000) -> int:
        """Run to the end, with the faults at random times, and return the number of events."""
        due = sorted(self.random.randint(20, 1500) for _ in faults)
        left = list(faults)
        for event in range(most):
            if left and event >= due[len(faults) - len(left)]:
                getattr(self, left.pop())()
            what = self.random.random()
            if what < 0.75:
                self.deliver()
            elif what < 0.97 and self.hosts:
                self.random.choice(list(self.hosts.values())).act()
            else:
                self.now += 0.2
                self.leader.tick(self.now)
            if not left and self.hosts and all(host.finished for host in self.hosts.values()):
                return event
        raise AssertionError(f"not at the end after {most} events: {self.state()}")

    def state(self) -> str:
        phases = [(h.worker, h.replica.phase.value, h.replica.version, h.replica.number) for h in self.hosts.values()]
        return f"{phases}, {self.leader.status(self.now)}, view {self.leader.number} of {self.leader.members and 'all'}"


FAULTS = ("crash", "suspect", "cut", "crash_leader")


def walks(count: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (seed, workers, faults)."""
    for seed in range(count):
        draw = random.Random(seed)
        yield seed, draw.randint(1, 4), draw.choices(FAULTS, weights=(4, 1, 1, 1), k=draw.randint(0, 6))


def check(network: Network) -> None:
    """Compare the last checkpoint with bsp in one process, and the log with its pushes."""
    values, _ = read_slice_range(network.checkpoints, STEPS, 0, PARAMETERS + STATISTICS)
    np.testing.assert_array_equal(values, expected(network.config, network.facts))
    pushes = read_pushes(network.folders.work / PUSHES)
    assert sorted(zip(pushes["worker"].tolist(), pushes["clock"].tolist(), strict=True)) == [
        (worker, clock) for worker in range(network.facts.num_workers) for clock in range(STEPS)
    ]


def test_random_faults_end_with_the_bits_of_bsp(tmp_path: Path) -> None:
    for seed, workers, faults in walks(60):
        network = Network(seed, tmp_path / str(seed), workers)
        try:
            network.run(faults)
            check(network)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {workers} workers, {faults}") from error


@pytest.mark.full
def test_many_random_faults_end_with_the_bits_of_bsp(tmp_path: Path) -> None:
    for seed, workers, faults in walks(300):
        if seed >= 60:
            network = Network(seed, tmp_path / str(seed), workers)
            network.run(faults)
            check(network)


def collective_walk(seed: int, folder: Path) -> None:
    """Take the sums from a collective, some of whose operations fail on some workers."""
    draw = random.Random(seed)
    workers = draw.randint(1, 4)
    faults = draw.choices((*FAULTS, "fail"), weights=(4, 1, 1, 1, 3), k=draw.randint(0, 6))
    network = Network(seed, folder, workers, has_collective=True)
    try:
        network.run(faults)
        check(network)
        assert all(count == 0 for count in network.sent.values())
    except Exception as error:
        raise AssertionError(f"seed {seed}, {workers} workers, {faults}") from error


def test_a_collective_that_fails_anywhere_changes_no_bit(tmp_path: Path) -> None:
    for seed in range(2):
        collective_walk(seed, tmp_path / str(seed))


@pytest.mark.full
def test_many_collectives_that_fail_change_no_bit(tmp_path: Path) -> None:
    for seed in range(2, 60):
        collective_walk(seed, tmp_path / str(seed))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_each_worker_sends_twice_its_share_of_the_vector(workers: int, tmp_path: Path) -> None:
    """2(N-1)/N of the vector per step: its gradient but for its own range, and the sum of its range to all others."""
    network = Network(1, tmp_path, workers)
    network.run([])
    elements = PARAMETERS + STATISTICS
    for host in network.hosts.values():
        begin, end = slice_bounds(elements, workers)[host.worker]
        expected_bytes = 4 * STEPS * ((elements - (end - begin)) + (workers - 1) * (end - begin))
        assert network.sent[host.process] == expected_bytes
    assert network.sent.total() == 4 * STEPS * 2 * (workers - 1) * elements


def test_a_loss_that_is_not_finite_ends_all_workers(tmp_path: Path) -> None:
    network = Network(1, tmp_path, 3, losses={(1, 3): float("nan")})
    network.run([])
    status = network.leader.status(network.now)
    assert status.version == 3
    assert "worker 1" in str(status.diverged)


def test_a_later_server_0_gets_the_snapshots_that_it_wants(tmp_path: Path) -> None:
    """It counts its wishes from the start again."""
    network = Network(1, tmp_path, 1)
    replica = next(iter(network.hosts.values())).replica
    member = {"process": replica.process, "address": "", "host": "", "memory": {}}
    progress = {"accepted": 0, "examples": 0, "clocks": [0], "until": None}
    for number, wish in ((1, 3), (9, 1)):
        body = pack_json({"members": [member], "source": None, "copies": [], **progress})
        replica.obey(PeerView(number, number, 0), body)
        replica.obey(WantSnapshot(number, wish), b"")
        replica.submit(StepMeasurements(2, 1.0, 1, 0.1))
        assert list(replica.snapshots) == [1]


def test_a_view_of_another_process_changes_nothing(tmp_path: Path) -> None:
    network = Network(1, tmp_path, 2)
    host = next(iter(network.hosts.values()))
    members = [{"process": 1, "address": "", "host": "", "memory": {}}] * 2
    body = {"members": members, "source": None, "copies": [], "accepted": 0, "examples": 0, "clocks": [0, 0]}
    host.replica.obey(PeerView(9, 9, 0), pack_json(body))
    assert host.replica.phase is Phase.OUTSIDE
