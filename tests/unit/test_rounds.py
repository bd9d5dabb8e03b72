"""All-reduce in a simulated network: any order of messages and any crashes end with the bits of bsp."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.simulated_network import LEADER, SimulatedNetwork
from trainer.checkpoints.read import read_slice_range
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import WriteOutcome, write_model, write_state
from trainer.config import Config, Data, RunFacts, RunSpec, slice_bounds
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import AllReduce
from trainer.gossip.rounds import Examples, Pool
from trainer.home.folders import Folders
from trainer.leader.rounds import RoundsLeader
from trainer.rules import build_slice, worker_rate
from trainer.run_files import METRICS, PUSHES
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.kinds.run import RollbackEvent
from trainer.runlog.read import iter_events, read_pushes, surviving_events
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.messages.all_reduce import CopyReceipt, GradientPiece, PeerView, RangeSum, WantSnapshot
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.peers import LinkLoss, PeerBeat
from trainer.worker.replica import Phase, Replica

Vector = npt.NDArray[np.float32]
PARAMETERS = 5
STATISTICS = 2
STEPS = 5


def run_config(output: Path, gossip: int = 0, **run: Any) -> Config:
    data = Data(shards="unused", batch_size=6, gossip=gossip)
    return Config(data, RunSpec(output=str(output), **{"steps": STEPS} | run), exchange=AllReduce())


def run_facts(workers: int) -> RunFacts:
    return RunFacts(workers, 12, PARAMETERS, STATISTICS)  # 2 steps per epoch


def gradient(worker: int, clock: int, values: Vector, pool: Sequence[int] = ()) -> Vector:
    """A gradient whose sum depends on the order of the additions. pool: ids of the examples of others."""
    noise = np.random.default_rng([worker, clock, *pool]).normal(size=len(values)).astype(np.float32)
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
        self.pools: list[Pool] = []
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
    def connect(self, members: Sequence[Mapping[str, Any]]) -> None:
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
            self.pushed[:] = gradient(self.worker, replica.clock, replica.values, self._exchange_examples())
            replica.values[PARAMETERS:] += 1  # as BatchNorm does in the forward pass
            loss = self.network.losses.get((self.worker, replica.clock), 1.0)
            replica.submit(StepMeasurements(2, loss, 1, 0.1))
        elif (report := replica.report()) and self.network.random.random() < 0.5:
            self.network.post(self.process, LEADER, report[0], b"", report[1])
        else:
            self.network.post(self.process, LEADER, PeerBeat(self.worker, self.process, replica.number), b"")

    def _exchange_examples(self) -> list[int]:
        """Do what a worker does before its step, and return the ids of its pool."""
        clock = self.replica.clock
        if pool := self.replica.next_pool():
            self.pools = [*(each for each in self.pools if each.clock < pool.clock), pool]
        if self.replica.gossip and gives(self.worker, clock):
            self.replica.give_examples(clock, examples_of(self.worker, clock))
        others = [pool.others() for pool in self.pools if pool.clock <= clock]
        self.network.contents += [each.has_content for each in others[-1:] if len(each.ids)]
        return others[-1].ids.tolist() if others else []

    def receive(self, message: Message, bodies: tuple[bytes, ...], *, from_leader: bool) -> None:
        if from_leader:
            self.replica.obey(message, bodies[0])
        else:
            self.replica.handle(message, bodies)

    def describe(self) -> tuple[Any, ...]:
        return self.replica.phase.value, self.replica.version, self.replica.number

    def _write(self, generation: int, version: int, values: Vector, momentum: Vector) -> None:
        write_model(folder_of(self.network.checkpoints, version), version, values, momentum, generation)
        receipt = CopyReceipt(self.worker, self.process, generation, version, int(WriteOutcome.WRITTEN))
        self.network.post(self.process, LEADER, receipt, b"")


class Network(SimulatedNetwork[Host]):
    """Workers that exchange by all-reduce."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        workers: int,
        losses: Mapping[tuple[int, int], float] | None = None,
        *,
        has_collective: bool = False,
        **values: Any,
    ) -> None:
        """values: of the run."""
        config = run_config(folder, checkpoint_every_s=1.5, **values)
        super().__init__(seed, config, run_facts(workers), Folders.from_home(folder))
        self.contents: list[bool] = []  # whether the pools of all steps had content
        self.has_collective = has_collective
        self.operations: dict[tuple[int, int], dict[int, tuple[int, Vector]]] = {}  # by view and version, by worker
        self.sums: list[tuple[int, tuple[int, int], Vector]] = []  # by process, on their way
        self.checkpoints = self.folders.checkpoints
        self.losses = losses or {}
        self.sent: Counter[int] = Counter()  # bytes of gradients and sums, by process
        self._first_checkpoint()
        self.begin()

    def _first_checkpoint(self) -> None:
        values, momentum = initial()
        write_model(folder_of(self.checkpoints, 0), 0, values, momentum)
        identity = self.config.identity()
        clocks = dict.fromkeys(range(self.facts.num_workers), 0)
        state = RunState(0, 0, 0, 0, 0.0, None, False, clocks, 0.0, 1, PARAMETERS, STATISTICS, identity)
        write_state(folder_of(self.checkpoints, 0), state)

    def make_leader(self) -> RoundsLeader:
        return RoundsLeader(self.config, self.facts, self.folders, self.send_as_leader, self.microseconds)

    def make_host(self, worker: int) -> Host:
        return Host(self, worker)

    def post(self, source: int, target: int, message: Message, *bodies: bytes) -> None:
        super().post(source, target, message, *bodies)
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

    def deliver(self) -> None:
        """Deliver the first message of a random channel, or end an operation of the collective."""
        if self.sums and self.random.random() < 0.3:
            process, (number, version), total = self.sums.pop(self.random.randrange(len(self.sums)))
            if process in self.hosts and self.hosts[process].group == number:
                self.hosts[process].replica.collected(number, version, total)
            return
        super().deliver()

    def note_crash(self) -> None:
        self._fail_operations(0.5)

    def note_cut(self, host: Host) -> None:
        if host.replica.phase is not Phase.OUTSIDE:
            self.post(host.process, LEADER, LinkLoss(host.worker, host.process, host.replica.number), b"")

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


@pytest.mark.slow
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


@pytest.mark.parametrize(("workers", "parameters"), [(5, PARAMETERS), (12, PARAMETERS), (12, 29)])
def test_more_workers_end_with_the_bits_of_bsp(
    workers: int, parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash workers and server 0. The shorter vector has no element for some of the twelve workers."""
    monkeypatch.setattr(sys.modules[__name__], "PARAMETERS", parameters)
    network = Network(workers, tmp_path, workers)
    network.run(["crash", "suspect", "crash_leader", "crash"])
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


def act_all(network: Network, phase: Phase) -> bool:
    """Have all workers of a phase act, and deliver all messages. Returns False if there was no such worker."""
    hosts = [host for host in network.hosts.values() if host.replica.phase is phase]
    for host in hosts:
        host.act()
    network.deliver_all()
    return bool(hosts)


def step_all(network: Network) -> None:
    """Have all workers join, complete a round if its messages arrive, and report it."""
    while act_all(network, Phase.OUTSIDE):
        pass
    act_all(network, Phase.TURN)
    for host in network.hosts.values():
        if report := host.replica.report():
            network.post(host.process, LEADER, report[0], b"", report[1])
    network.deliver_all()
    network.now += 1
    network.leader.tick(network.now)
    network.deliver_all()


@pytest.mark.parametrize("completed", [0, 2, STEPS - 1])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_ahead_of_all_others_is_lost_without_a_trace(
    worker: int, completed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill a worker that has completed a round and reported it, with the sums that the others need still unsent."""
    network = Network(1, tmp_path, 3)
    for _ in range(completed):
        step_all(network)
    host = next(each for each in network.hosts.values() if each.worker == worker)
    post = network.post

    def post_no_sums(source: int, target: int, message: Message, *bodies: bytes) -> None:
        if source != host.process or not isinstance(message, RangeSum):
            post(source, target, message, *bodies)

    monkeypatch.setattr(network, "post", post_no_sums)
    step_all(network)
    versions = {each.worker: each.replica.version for each in network.hosts.values()}
    assert versions == dict.fromkeys(range(3), completed) | {worker: completed + 1}
    network.end(host)
    network.leader.lost(worker, network.now)
    network.start(worker)
    network.run()
    check(network)
    assert not any(isinstance(event, RollbackEvent) for event in iter_events(network.folders.work / METRICS))


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
        assert list(replica.history.snapshots) == [1]


def test_a_view_of_another_process_changes_nothing(tmp_path: Path) -> None:
    network = Network(1, tmp_path, 2)
    host = next(iter(network.hosts.values()))
    members = [{"process": 1, "address": "", "host": "", "memory": {}}] * 2
    body = {"members": members, "source": None, "copies": [], "accepted": 0, "examples": 0, "clocks": [0, 0]}
    host.replica.obey(PeerView(9, 9, 0), pack_json(body))
    assert host.replica.phase is Phase.OUTSIDE


def gives(worker: int, clock: int) -> bool:
    """True if a worker selects examples for others before a step. Workers do so at different times."""
    return clock % (2 + worker % 2) == 0


def examples_of(worker: int, clock: int) -> Examples:
    ids = np.array([100 * worker + clock, 1000 + 100 * worker + clock])
    return Examples(ids, ids % 7, (ids % 256).astype(np.uint8)[:, None, None, None])


def pools_of(workers: int, steps: int) -> list[dict[int, list[int]]]:
    """Return the ids of the pool of every worker in each step, by the rule of bsp on servers."""
    given_now: dict[int, list[int]] = {}
    last: dict[int, list[int]] = {}
    pools = []
    for clock in range(steps):
        pools.append({w: [i for other in sorted(last) if other != w for i in last[other]] for w in range(workers)})
        for worker in range(workers):
            if gives(worker, clock) and worker not in given_now:
                given_now[worker] = examples_of(worker, clock).ids.tolist()
        if len(given_now) == workers > 1:
            last, given_now = given_now, {}
    return pools


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.full)])
def test_faults_leave_the_pools_of_examples_as_they_are(seeds: range, tmp_path: Path) -> None:
    """Compare pools and log with those of bsp, whoever is lost at any time."""
    steps = 16
    known = []
    for seed, _, faults in walks(seeds.stop):
        if seed not in seeds:
            continue
        workers = 2 + seed % 3
        network = Network(seed, tmp_path / str(seed), workers, gossip=2, steps=steps)
        pools = pools_of(workers, steps)
        try:
            network.run(faults)
            whole = build_slice(network.config, workers, *initial())
            for step in range(steps):
                rate = worker_rate(network.config, network.facts, step / 2)
                pushed = [gradient(worker, step, whole.values, pools[step][worker]) for worker in range(workers)]
                whole.apply(pushed, rate, [1.0] * workers)
            end, _ = read_slice_range(network.checkpoints, steps, 0, PARAMETERS + STATISTICS)
            np.testing.assert_array_equal(end, whole.values)
            assert logged_pools(network) == [{w: ids for w, ids in each.items() if ids} for each in pools]
        except Exception as error:
            raise AssertionError(f"seed {seed}, {workers} workers, {faults}") from error
        known += network.contents
        assert faults or all(network.contents), "without faults no pool is read from the set"
    assert np.mean(known) > 0.8


def logged_pools(network: Network) -> list[dict[int, list[int]]]:
    """Return the ids of the pool of every worker in each step, as the log has them; without workers that have none."""
    events = surviving_events(iter_events(network.folders.work / METRICS))
    spans: dict[int, list[tuple[int, list[int]]]] = {}
    ids: dict[int, dict[str, list[int]]] = {}
    for event in events:
        if isinstance(event, GossipEvent):
            ids[event.round] = event.ids
        elif isinstance(event, PoolEvent):
            others = [i for worker, own in ids[event.round].items() if worker != str(event.worker) for i in own]
            earlier = [each for each in spans.get(event.worker, []) if each[0] < event.clock]
            spans[event.worker] = [*earlier, (event.clock, others)]
    steps = range(network.config.steps_per_worker(network.facts.rows))
    return [
        {
            worker: max(each for each in of_worker if each[0] <= step)[1]
            for worker, of_worker in sorted(spans.items())
            if of_worker[0][0] <= step
        }
        for step in steps
    ]
