"""Neighbours in a simulated network: any order of messages ends with virtual time's bits, and no crash stops a run."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.storage.store import Store
from tests.support.configs import make_config
from tests.support.simulated_network import LEADER, SimulatedNetwork
from tests.support.virtual_runs import QUIET
from trainer.checkpoints.read import newest, read_state, read_vector, versions
from trainer.checkpoints.replica_file import create_replicas, open_replicas, replica_name
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState, folder_of
from trainer.config import Config, RunFacts
from trainer.context import RunContext
from trainer.coordination.orders import StepMeasurements
from trainer.data.gossip import GivenExamples
from trainer.gossip.rounds import Examples, Pool
from trainer.gossip.schedule import DELAY
from trainer.home.folders import Folders
from trainer.home.place import StorePlace
from trainer.home.segments import begin_start
from trainer.launch.end_watch import is_end
from trainer.leader.neighbours import NeighbourLeader
from trainer.leader.peer_checkpoints import PeerTimes, plan_of
from trainer.leader.peer_members import PeerMembership, view_body
from trainer.leader.peer_training import PeerTraining
from trainer.lifecycle.prepare import ensure_checkpoint
from trainer.run_files import CHECKPOINTS, METRICS, PUSHES
from trainer.runlog.kinds.peers import GossipEvent
from trainer.runlog.kinds.run import GenerationEvent
from trainer.runlog.read import iter_events, read_pushes, surviving_events
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.compute import MiniBatchResult, Quadratic
from trainer.simulation.peers.engine import PeerEngine
from trainer.simulation.peers.history import PeerHistory
from trainer.simulation.peers.replay import PeerReplay
from trainer.simulation.replay import adopt_pools, workers_of_rounds
from trainer.transport.bodies.examples import pack_examples, unpack_examples
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.messages.gossip import GossipPool
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.neighbours import NeighbourModel, NeighbourView, RoundGrant
from trainer.transport.messages.peers import ModelCopy, PeerBeat
from trainer.worker.neighbour_replica import NeighbourPhase, NeighbourReplica

Vector = npt.NDArray[np.float32]
PARAMETERS = 64
ROWS = 400
STEPS = 12


def run_config(output: Path, exchange: str = "d-psgd", **values: Any) -> Config:
    common: dict[str, Any] = {"batch_size": 40, "learning_rate": 0.1, "steps": STEPS, "checkpoint_every_s": 1.5}
    return make_config("", output, protocol="bsp", exchange=exchange, **common | values)


class Toy(Quadratic):
    """The toy loss; with pools of examples its gradients depend on the pool of their step."""

    def __init__(self, context: RunContext, num_workers: int) -> None:
        super().__init__(context, num_workers)
        self.pools: list[list[Pool]] = [[] for _ in range(num_workers)]

    def adopt(self, worker: int, pool: Pool) -> None:
        self.pools[worker] = adopted(self.pools[worker], pool)

    def selection(self, worker: int, clock: int) -> GivenExamples | None:
        """Select examples at times that differ from worker to worker."""
        ids = 1000 * worker + 2 * clock + np.arange(2)
        examples = Examples(ids, ids % 7, (ids % 256).astype(np.uint8)[:, None, None, None])
        return None if clock % (5 + worker % 2) else GivenExamples(clock, examples)

    def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> MiniBatchResult:
        return self.at(worker, clock, parameters, self.pools[worker])

    def at(self, worker: int, clock: int, parameters: Sequence[Float32s], pools: Sequence[Pool]) -> MiniBatchResult:
        """Return the gradient of a step if these are the pools of the worker."""
        result = super().step(worker, clock, parameters)
        others = [pool.others() for pool in pools if pool.clock <= clock][-1:]
        if not others or not len(others[0].ids):
            return result
        noise = np.random.default_rng([clock, *others[0].ids]).standard_normal(PARAMETERS, np.float32)
        return result._replace(vector=result.vector + noise)


def adopted(pools: Sequence[Pool], pool: Pool) -> list[Pool]:
    return [*(each for each in pools if each.clock < pool.clock), pool]


class Host:
    """A worker's process in the network. It implements NeighbourLinks for its replica."""

    def __init__(self, network: Network, worker: int) -> None:
        self.network = network
        self.worker = worker
        self.process = network.random.getrandbits(60)
        self.peers: dict[int, int] = {}
        self.finished = False
        self.pools: list[Pool] = []
        self.pushed = np.zeros(PARAMETERS, np.float32)
        values = np.zeros(PARAMETERS, np.float32)
        self.replica = NeighbourReplica(network.config, network.facts, worker, self.process, values, self.pushed, self)
        self.links: dict[int, float] = {}
        self.replica._usable_links = self._keep_links  # type: ignore[method-assign]
        self.replica._mix = self._note_links  # type: ignore[method-assign]

    def _keep_links(self) -> list[tuple[int, float, int]] | None:
        links = NeighbourReplica._usable_links(self.replica)
        self.links = {session: weight for _, weight, session in links or ()}
        return links

    def _note_links(self, others: Sequence[tuple[float, Vector]]) -> None:
        """Note which sessions' models are used in the round that ends."""
        replica = self.replica
        self.network.used[replica.generation, replica.session, replica.round] = self.links
        NeighbourReplica._mix(replica, others)

    # NeighbourLinks
    def connect(self, members: Sequence[Mapping[str, Any] | None]) -> None:
        self.peers = {worker: member["process"] for worker, member in enumerate(members) if member}

    def send(self, worker: int, message: Message, *bodies: Body) -> None:
        if isinstance(message, NeighbourModel):
            self.network.sent[message.round] += len(bodies[0])
        self.network.post(self.process, self.peers[worker], message, *map(bytes, bodies))

    # the client's loop, an event at a time
    def act(self) -> None:
        """Do one of the things that a client does by itself: ask to join, compute a step, report, beat."""
        replica = self.replica
        what = self.network.random.random()
        if self.finished:
            return
        if replica.phase in (NeighbourPhase.OUTSIDE, NeighbourPhase.COPYING) and what < 0.8:
            introduction = {"address": "", "host": "", "memory": {}}
            self.network.post(self.process, LEADER, replica.joining(), pack_json(introduction), b"")
        elif replica.phase is NeighbourPhase.TURN and what < 0.6:
            if replica.must_wait or self.worker == self.network.idle:
                return
            self._exchange_examples()
            gradient, examples, loss, correct, *_ = self.network.compute.at(
                self.worker, replica.round, [replica.values.copy()], self.pools
            )
            self.pushed[:] = gradient
            loss = self.network.losses.get((self.worker, replica.round), loss)
            replica.submit(StepMeasurements(examples, loss, correct, 0.1))
        elif what < 0.9:
            for version in replica.copies:
                message, *bodies = replica.copy_of(version)
                self.network.post(self.process, LEADER, message, *map(bytes, bodies))
            if request := replica.wanted_pool():
                self.network.post(self.process, LEADER, request, b"")
            if report := replica.report():
                self.network.post(self.process, LEADER, report[0], b"", report[1])
        else:
            self.network.post(self.process, LEADER, PeerBeat(self.worker, self.process, replica.number), b"")

    def _exchange_examples(self) -> None:
        """Do what a worker does before its step."""
        if pool := self.replica.next_pool():
            self.pools = adopted(self.pools, pool)
            self.network.contents += [pool.examples.has_content] if pool.round else []
        gift = self.network.compute.selection(self.worker, self.replica.round)
        if self.network.config.data.gossip and gift:
            offer = self.replica.give_examples(*gift)
            self.network.post(self.process, LEADER, offer, pack_examples(gift.examples))

    def receive(self, message: Message, bodies: tuple[bytes, ...], *, from_leader: bool) -> None:
        if isinstance(message, GossipPool):
            self.replica.take_pool(message, unpack_examples(bodies[0]))
        elif from_leader and not isinstance(message, ModelCopy):
            self.replica.obey(message, bodies[0])
        else:
            self.replica.handle(message, bodies)

    def describe(self) -> tuple[Any, ...]:
        return self.replica.phase.value, self.replica.round, self.replica.until, self.replica.number


class Network(SimulatedNetwork[Host]):
    """Workers that exchange models with neighbours."""

    def __init__(
        self,
        seed: int,
        config: Config,
        workers: int,
        losses: Mapping[tuple[int, int], float] | None = None,
        *,
        is_far: bool = False,
    ) -> None:
        """is_far: whether the run's folder is in a store, of which this host has no file."""
        output = Path(config.run.output)
        folders = _far_folders(output) if is_far else Folders.from_home(output)
        super().__init__(seed, config, RunFacts(workers, ROWS, PARAMETERS, 0), folders)
        self.root = output / CHECKPOINTS
        self.compute = Toy(RunContext.from_config(config), workers)
        self.steps = config.steps_per_worker(ROWS)
        self.contents: list[bool] = []  # whether pools had content when workers got them
        self.losses = losses or {}
        self.sent: Counter[int] = Counter()  # bytes of models by round
        self.idle: int | None = None  # a worker that computes nothing
        self.used: dict[tuple[int, int, int], dict[int, float]] = {}  # by generation, session and round
        ensure_checkpoint(config, self.facts, self.compute.start(), self.folders.home)
        self.begin()

    def make_leader(self) -> NeighbourLeader:
        return NeighbourLeader(self.config, self.facts, self.folders, self.send_as_leader, self.microseconds)

    def training(self) -> PeerTraining:
        assert isinstance(self.leader, NeighbourLeader)
        assert self.leader.training, "a checkpoint is loaded"
        return self.leader.training

    def make_host(self, worker: int) -> Host:
        return Host(self, worker)

    def accuse(self) -> None:
        """Let server 0 lose a worker that lives, as if it had been silent."""
        self.leader.lost(self.random.randrange(self.facts.num_workers), self.now)

    def stop_early(self) -> None:
        """Let server 0 obey a decision to end the run whose checkpoint is damaged: the run continues from the newest."""
        answers = iter([True])
        self.leader.evaluations.stops_early = lambda now: next(answers, False)

    def cut_neighbours(self) -> None:
        """Cut a worker's connection to another one, which loses messages."""
        host = self.random.choice(list(self.hosts.values()))
        if host.peers:
            self.channels.pop((host.process, self.random.choice(list(host.peers.values()))), None)
            host.replica.repeat()

    def cut_for_long(self) -> None:
        """Cut a connection between workers, of which its sender learns late."""
        host = self.random.choice(list(self.hosts.values()))
        if host.peers:
            self.channels.pop((host.process, self.random.choice(list(host.peers.values()))), None)
            self.do_later(200, lambda: host.replica.repeat() if host.process in self.hosts else None)


def _far_folders(output: Path) -> Folders:
    work = output.with_name(f"{output.name}-work")
    work.mkdir()
    return begin_start(StorePlace(str(output), Store()), work)


def models_of(root: Path, workers: int) -> Vector:
    version = newest(root, verify=True)
    assert version == STEPS
    path = folder_of(root, version) / replica_name(read_state(root, version).generation)
    return np.array(open_replicas(path, workers, PARAMETERS, 0, version).values)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """expected(exchange, workers, **values): all models at the end of the run in virtual time, and their mean."""

    @cache
    def expected(exchange: str, workers: int, **values: Any) -> tuple[Vector, Vector]:
        folder = tmp_path_factory.mktemp("virtual")
        settings = SimulationSettings(compute="quadratic", workers=workers, rows=ROWS)
        simulate(run_config(folder, exchange, **values), settings, QUIET)
        return models_of(folder / "checkpoints", workers), read_vector(folder / "checkpoints", STEPS)

    return expected


RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("d-psgd", 4, {}),
    ("d-psgd", 1, {}),
    ("d-psgd", 2, {"order": "grad-then-avg", "every": 2}),
    ("d-psgd", 5, {"topology": "complete", "every": 3}),
    ("d-psgd", 5, {"topology": "random-pair"}),
    ("d-psgd", 6, {"topology": "exponential"}),
    ("d-psgd", 3, {"batch_size": 43, "worker_batch": "exact"}),
    ("matcha", 8, {"topology": "graph0"}),
    ("matcha", 6, {"every": 2, "order": "grad-then-avg"}),
]


@pytest.mark.parametrize(("exchange", "workers", "values"), RUNS)
def test_any_order_of_messages_has_virtual_times_bits(
    exchange: str, workers: int, values: dict[str, Any], tmp_path: Path, oracle: Any
) -> None:
    models, mean = oracle(exchange, workers, **values)
    network = Network(workers, run_config(tmp_path, exchange, heartbeat_timeout_s=60.0, **values), workers)
    network.run()
    np.testing.assert_array_equal(models_of(network.root, workers), models)
    np.testing.assert_array_equal(read_vector(network.root, STEPS), mean)
    pushes = read_pushes(network.folders.work / PUSHES)
    assert list(zip(pushes["clock"].tolist(), pushes["worker"].tolist(), strict=True)) == [
        (round, worker) for round in range(STEPS) for worker in range(workers)
    ]
    plan = plan_of(network.config, network.facts, network.root, read_state(network.root, STEPS))
    links = {round: len(plan.edges(round)) for round in range(STEPS)}
    assert network.sent == {round: 2 * 4 * PARAMETERS * count for round, count in links.items() if count}


def test_workers_wait_for_their_neighbours_only(tmp_path: Path) -> None:
    """Worker 0 of a ring of 6 computes nothing: another one stops as many rounds later as it is away from it."""
    network = Network(1, run_config(tmp_path, heartbeat_timeout_s=600.0), 6)
    network.idle = 0
    with pytest.raises(AssertionError, match="not at the end"):
        network.run(most=4000)
    assert {host.worker: host.replica.round for host in network.hosts.values()} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 1}
    assert all(host.replica.until > host.replica.round for host in network.hosts.values())


def count_grants(network: Network, rounds: int, round_s: float) -> tuple[int, int, int]:
    """Let all workers compute rounds in step, with a report every ten rounds, or at once if a horizon stops a worker.

    Returns how many grants server 0 sent, how many rounds ahead of the workers it let them go at most, and how many
    rounds a worker kept for server 0 at most."""
    hosts = list(network.hosts.values())
    grants: list[RoundGrant] = []
    ahead = kept = 0
    post = network.post

    def note(source: int, target: int, message: Message, *bodies: bytes) -> None:
        grants.extend([message] if isinstance(message, RoundGrant) else [])
        post(source, target, message, *bodies)

    network.post = note  # type: ignore[method-assign]
    for host in hosts:
        introduction = pack_json({"address": "", "host": "", "memory": {}})
        network.post(host.process, LEADER, host.replica.joining(), introduction, b"")
    for round in range(rounds):
        network.now += round_s
        for host in hosts:
            if host.replica.phase is NeighbourPhase.TURN:
                host.replica.submit(StepMeasurements(1, 1.0, 1, round_s))
        network.deliver_all()
        kept = max(kept, *(len(host.replica.rounds) for host in hosts))
        for host in hosts:
            is_due = round % 10 == 0 or host.replica.phase is NeighbourPhase.BLOCKED
            if is_due and (report := host.replica.report()):
                network.post(host.process, LEADER, report[0], b"", report[1])
        network.deliver_all()
        ahead = max(ahead, network.training().horizon.until - max(host.replica.round for host in hosts))
    assert min(host.replica.round for host in hosts) > rounds - 10
    return len(grants), ahead, kept


def test_the_horizon_reaches_a_second_within_few_rounds(tmp_path: Path) -> None:
    """Workers that take 2 ms per round would otherwise wait for server 0 in every second round of the first second."""
    network = Network(1, run_config(tmp_path, steps=10_000), 2)
    grants, ahead, _ = count_grants(network, 400, 0.002)
    assert grants < 100
    assert 100 < ahead <= 501


def test_newcomers_do_not_move_the_horizon(tmp_path: Path) -> None:
    """A newcomer waits until its neighbours reach it, so it would wait longer after each loss."""
    network = Network(1, run_config(tmp_path, steps=10_000), 3)
    count_grants(network, 400, 0.002)
    host = next(host for host in network.hosts.values() if host.worker == 2)
    for _ in range(10):
        network.leader.lost(2, network.now)
        network.deliver_all()
        introduction = pack_json({"address": "", "host": "", "memory": {}})
        network.post(host.process, LEADER, host.replica.joining(), introduction, b"")
        network.deliver_all()
        network.now += 0.2
        network.leader.tick(network.now)
        network.deliver_all()
    assert network.leader.members[2].first > 400
    assert network.training().horizon.until - max(each.replica.round for each in network.hosts.values()) <= 501


def test_slow_workers_get_a_horizon_of_a_second(tmp_path: Path) -> None:
    network = Network(1, run_config(tmp_path, steps=10_000), 2)
    assert count_grants(network, 40, 0.1)[1] <= 11


def test_workers_keep_few_rounds_for_server_0(tmp_path: Path) -> None:
    """A worker packs them again for every report, so server 0 says soon which ones it has."""
    network = Network(1, run_config(tmp_path, steps=10_000), 2)
    assert count_grants(network, 400, 0.002)[2] <= 40


def test_a_late_first_model_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    """The first source was paused, and lost with its newcomer; its model comes after that of the next source."""
    network = Network(1, run_config(tmp_path), 3)
    replica = next(host.replica for host in network.hosts.values() if host.worker == 0)
    for number in (9, 8):
        replica.take(ModelCopy(number, 3), (np.full(PARAMETERS, number, np.float32).tobytes(), b""))
    introduction = {"address": "", "host": "", "memory": {}}
    members = {
        0: PeerMembership(replica.process, 9, 3, 1, introduction, 0.0),
        1: PeerMembership(5, 5, 0, None, introduction, 0.0, has_model=True),
    }
    replica.obey(NeighbourView(9, 1), view_body(members, {}, 0, network.training().plan))
    assert replica.phase is NeighbourPhase.BLOCKED
    np.testing.assert_array_equal(replica.values, 9)


def test_a_source_forgets_a_newcomer_that_has_its_model(tmp_path: Path) -> None:
    """The newcomer is no neighbour of its source, so the next view ends the connection between them."""
    network = Network(1, run_config(tmp_path), 6)
    plan = network.training().plan
    source = next(host for host in network.hosts.values() if host.worker == 0)
    introduction = {"address": "", "host": "", "memory": {}}
    members = {0: PeerMembership(source.process, 9, 0, None, introduction, 0.0)}
    source.replica.obey(NeighbourView(9, 1), view_body(members, {}, 0, plan))
    source.replica.take(ModelCopy(9, 0), (bytes(4 * PARAMETERS), b""))
    source.replica.obey(RoundGrant(9, 1, 2, 1), pack_json({"due": [], "have": [], "complete": 0}))
    members[3] = PeerMembership(5, 10, 0, 0, introduction, 0.0)
    source.replica.obey(NeighbourView(10, 1), view_body(members, {}, 0, plan))
    source.replica.repeat()
    assert len(network.channels[source.process, 5]) == 2, "the model may be lost until server 0 says that it has come"
    members[3].has_model = True
    source.replica.obey(NeighbourView(11, 1), view_body(members, {}, 0, plan))
    source.replica.repeat()
    assert len(network.channels[source.process, 5]) == 2


@pytest.mark.parametrize("is_far", [False, True])
def test_deaths_of_server_0_leave_the_bits(is_far: bool, tmp_path: Path, oracle: Any) -> None:
    """Each rolls the run back to a checkpoint of all workers."""
    values = {"every": 2, "order": "grad-then-avg"}
    config = run_config(tmp_path / "run", "matcha", heartbeat_timeout_s=60.0, start_wait_s=600.0, **values)
    network = Network(7, config, 3, is_far=is_far)
    network.run(["crash_leader"] * 3)
    models, mean = oracle("matcha", 3, **values)
    np.testing.assert_array_equal(models_of(network.root, 3), models)
    np.testing.assert_array_equal(read_vector(network.root, STEPS), mean)
    events = list(iter_events(network.folders.work / METRICS))
    assert sum(isinstance(event, GenerationEvent) for event in events) == 4
    if is_far:
        assert not list(network.folders.work.rglob("*.safetensors")), "only copies of models in the store"


@pytest.mark.parametrize("seed", [1, 2, 4])  # the run is under way
def test_all_workers_join_again_after_a_damaged_end(seed: int, tmp_path: Path, oracle: Any) -> None:
    config = run_config(tmp_path / "run", heartbeat_timeout_s=60.0, start_wait_s=600.0)
    network = Network(seed, config, 3)
    network.run(["stop_early"])
    np.testing.assert_array_equal(models_of(network.root, 3), oracle("d-psgd", 3)[0])
    assert network.now < 600, "no worker was waited for in vain"
    assert sum(isinstance(event, GenerationEvent) for event in iter_events(network.folders.work / METRICS)) == 2


def test_a_loss_that_is_not_finite_ends_all_workers(tmp_path: Path) -> None:
    network = Network(1, run_config(tmp_path), 3, losses={(1, 3): float("nan")})
    network.run()
    assert "the loss of worker 1 is nan in round 3" in str(network.leader.status(network.now).diverged)


def test_a_full_disk_costs_checkpoints_and_no_training(
    tmp_path: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the last one, for which the run waits until there is room."""
    expected = oracle("d-psgd", 4)[0]
    tries: list[int] = []

    def fail(path: Path, *shape: Any) -> Any:
        tries.append(shape[-1])
        if shape[-1] < STEPS or tries.count(STEPS) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create_replicas(path, *shape)

    monkeypatch.setattr("trainer.leader.peer_checkpoints.create_replicas", fail)
    network = Network(3, run_config(tmp_path, heartbeat_timeout_s=60.0), 4)
    network.run()
    np.testing.assert_array_equal(models_of(network.root, 4), expected)
    assert tries.count(10) == 1
    assert network.leader.trouble(network.now) is None
    assert versions(network.root) == [0, STEPS]


def test_room_for_all_models_is_reserved_before_they_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a mapped file on a full disk would kill the process."""

    def fail(descriptor: int, offset: int, length: int) -> None:
        assert (offset, length) == (0, os.fstat(descriptor).st_size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        create_replicas(tmp_path / "models", 3, PARAMETERS, 0, version=1)
    assert not (tmp_path / "models").exists(), "it would take the room of the next one"


# Names of faults, with how often each is drawn.
FAULTS = {
    "crash": 5,
    "freeze": 3,
    "crash_unnoticed": 2,
    "freeze_two": 1,
    "cut_for_long": 1,
    "accuse": 1,
    "suspect": 1,
    "cut": 1,
    "cut_neighbours": 1,
    "crash_leader": 1,
}


def disturb(seed: int, folder: Path, **given_values: Any) -> int:
    """Run with random faults, check what must hold whatever they are, and return the result of ``check_replay``."""
    draw = random.Random(seed)
    workers = draw.randint(2, 5)
    faults = draw.choices([*FAULTS], [*FAULTS.values()], k=draw.randint(1, 6))
    values: dict[str, Any] = {
        "topology": draw.choice(["ring", "complete", "random-pair"]),
        "order": draw.choice(["avg-then-grad", "grad-then-avg"]),
        "every": draw.choice([1, 1, 3]),
    }
    if values["topology"] == "ring" and draw.random() < 0.5:
        values |= {"exchange": "matcha"}
    values |= given_values
    network = Network(seed, run_config(folder, **values), workers)
    try:
        network.run(faults)
        return check(network)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {workers} workers, {faults}, {values}") from error


def check(network: Network) -> int:
    """Check the end of a run, and return the result of ``check_replay``.

    Among workers that are members to the end, every link is used by both ends with the same weight, or by none."""
    root = network.root
    steps = network.steps
    state = read_state(root, steps)
    assert state.final
    path = folder_of(root, steps) / replica_name(state.generation)
    models = open_replicas(path, network.facts.num_workers, PARAMETERS, 0, steps)
    assert is_end(state, network.config, network.facts)  # although lost workers have missed rounds
    present = [int(worker) for worker in state.memory["replicas"]["begun"]]
    mean = np.mean(np.array(models.values, np.float64)[present], axis=0)
    np.testing.assert_allclose(read_vector(root, steps), mean, rtol=1e-6, atol=1e-7)
    used = {key[1:]: links for key, links in network.used.items() if key[0] == state.generation}
    is_same = network.leader.generation == state.generation  # it was not started again after the end
    survivors = {member.session for member in network.leader.members.values()} if is_same else set()
    for (session, round), links in used.items():
        for other, weight in links.items():
            if session in survivors and other in survivors:
                assert used[other, round][session] == weight
    pushes = read_pushes(network.folders.work / PUSHES)
    counts = Counter(zip(pushes["clock"].tolist(), pushes["worker"].tolist(), strict=True))
    assert max(counts.values()) == 1
    # The log can lack a round: its only worker was killed before its report, though a newcomer had its model.
    assert {round for round, _ in counts} <= set(range(steps))
    return check_replay(network, state)


def check_replay(network: Network, state: RunState) -> int:
    """The log gives the bits of the run, although killed workers have not reported all rounds.

    Returns the number of gradients that the log lacks and that others have used."""
    pushes = read_pushes(network.folders.work / PUSHES)
    events = surviving_events(iter_events(network.folders.work / METRICS))
    plan = plan_of(network.config, network.facts, network.root, state)
    rounds = workers_of_rounds(pushes, network.steps)
    history = PeerHistory([(0, plan)], events, rounds, PeerTimes.from_state(state).begun)
    compute = Toy(RunContext.from_config(network.config), network.facts.num_workers)
    adopt_pools(compute, events, 0, network.facts.num_workers)
    models = PeerReplay([(1, network.config)], lambda config: (network.facts, compute), history)
    for _ in rounds:
        models.step()
    np.testing.assert_array_equal(models.mean(state), read_vector(network.root, network.steps))
    return sum(map(len, history.unlogged.values()))


@pytest.mark.slow
def test_random_faults_never_stop_a_run(tmp_path: Path) -> None:
    assert sum(disturb(seed, tmp_path / str(seed)) for seed in range(16)), "the log lacks nothing that was used"


@pytest.mark.full
def test_many_random_faults_never_stop_a_run(tmp_path: Path) -> None:
    assert sum(disturb(seed, tmp_path / str(seed)) for seed in range(16, 110))


EXAMPLES: dict[str, Any] = {"gossip": 2, "steps": 60}


@pytest.mark.slow
def test_random_faults_leave_an_exchange_of_examples_whole(tmp_path: Path) -> None:
    """Replay runs from the log, whoever is lost at any time; no run waits for a lost worker."""
    for seed in range(2):
        disturb(seed, tmp_path / str(seed), **EXAMPLES)


@pytest.mark.full
def test_many_faults_leave_an_exchange_of_examples_whole(tmp_path: Path) -> None:
    for seed in range(2, 14):
        disturb(seed, tmp_path / str(seed), **EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "values"),
    [
        ("d-psgd", 4, {}),
        pytest.param("matcha", 6, {"every": 2, "order": "grad-then-avg", "budget": 0.3}, marks=pytest.mark.full),
    ],
)
def test_pools_begin_where_they_do_in_virtual_time(
    exchange: str, workers: int, values: dict[str, Any], tmp_path: Path
) -> None:
    """Compare all rounds, whatever the order of messages. All examples come with their content."""
    virtual = run_config(tmp_path / "virtual", exchange, **values, **EXAMPLES)
    compute = Toy(RunContext.from_config(virtual), workers)
    folders = Folders.from_home(tmp_path / "virtual")
    facts = RunFacts(workers, ROWS, PARAMETERS, 0)
    ensure_checkpoint(virtual, facts, compute.start(), folders.home)
    PeerEngine(virtual, facts, SimulationSettings(workers=workers), compute, folders, lambda engine: None).run()
    rounds = rounds_of_examples(folders)
    assert len(rounds) > 2
    config = run_config(tmp_path / "run", exchange, heartbeat_timeout_s=600.0, **values, **EXAMPLES)
    network = Network(workers, config, workers)
    network.run()
    np.testing.assert_array_equal(read_vector(network.root, 60), read_vector(folders.checkpoints, 60))
    assert rounds_of_examples(network.folders) == rounds
    assert sum(network.contents) == workers * len([clock for _, clock in rounds if clock < 60])


def rounds_of_examples(folders: Folders) -> list[tuple[Any, int]]:
    """Return the ids of each round by worker, with the first step in which they are used."""
    events = surviving_events(iter_events(folders.work / METRICS))
    return [(event.ids, event.version + DELAY) for event in events if isinstance(event, GossipEvent)]
