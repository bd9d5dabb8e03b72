"""The sum of gradients by torch.distributed, among workers that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.errors import JobError
from trainer.config import RunFacts
from trainer.coordination.parameter_slice import add_pushed
from trainer.transport.messages.all_reduce import StoreEntry
from trainer.transport.messages.heads import Body, Message
from trainer.worker.collective import MOST_FAILURES, TorchCollective, have_own_gpus

Vector = npt.NDArray[np.float32]
PRIVATE = "ipc://@a-test"
WAIT_S = 20.0


class Worker:
    """A worker of the network, whose calls this test's thread makes. It is the mesh of its collective."""

    def __init__(self, network: Network, worker: int) -> None:
        self.network = network
        self.worker = worker
        self.sums: list[tuple[int, int, Vector]] = []
        self.collective = TorchCollective(self, network.facts, PRIVATE, network.calls.put, self._take, 30.0)

    def send(self, worker: int, message: Message, *bodies: Body) -> None:
        assert isinstance(message, StoreEntry)
        self.network.sent.append((worker, message, bodies))

    def _take(self, number: int, version: int, total: Vector) -> None:
        self.sums.append((number, version, total.copy()))


class Network:
    """Workers of a run. Their messages arrive when ``run`` delivers them."""

    def __init__(self, workers: int, elements: int, buffers: int = 0) -> None:
        self.facts = RunFacts(workers, 100, elements - buffers, buffers)
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.sent: list[tuple[int, StoreEntry, tuple[Body, ...]]] = []
        self.workers = [Worker(self, worker) for worker in range(workers)]

    def open(self, number: int, workers: list[Worker] | None = None) -> None:
        for worker in self.workers if workers is None else workers:
            worker.collective.open(number, [{}] * len(self.workers))

    def close(self) -> None:
        for worker in self.workers:
            worker.collective.close()

    def run(self, until: Callable[[], bool]) -> None:
        """Make the calls that the groups' threads post, and deliver messages."""
        while not until():
            try:
                self.calls.get(timeout=WAIT_S)()
            except Empty:
                raise AssertionError("no call arrives") from None
            for worker, message, (key, value) in self.sent:
                self.workers[worker].collective.hear(message, key, value)
            self.sent.clear()

    def sum(self, version: int, gradients: list[Vector], factors: list[float]) -> list[Vector]:
        """Return the sums that the workers have after a round."""
        before = [len(worker.sums) for worker in self.workers]
        for worker, gradient, factor in zip(self.workers, gradients, factors, strict=True):
            worker.collective.start(version, gradient, factor)
        self.run(lambda: all(len(w.sums) > count for w, count in zip(self.workers, before, strict=True)))
        assert all(worker.sums[-1][1] == version for worker in self.workers)
        return [worker.sums[-1][2] for worker in self.workers]


@pytest.fixture
def network() -> Iterator[Callable[..., Network]]:
    made: list[Network] = []

    def make(*arguments: int) -> Network:
        made.append(Network(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def gradients(workers: int, elements: int) -> list[Vector]:
    draw = np.random.default_rng([workers, elements])
    return [draw.normal(size=elements).astype(np.float32) for _ in range(workers)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("elements", [1, 7, 100_003])
def test_sums_are_those_of_the_mesh_but_for_rounding(
    network: Callable[..., Network], workers: int, elements: int
) -> None:
    """Check several rounds, with factors, which do not apply to statistics. All workers get the same bits."""
    run = network(workers, elements, elements // 4)
    run.open(1)
    factors = [0.5 + worker for worker in range(workers)]
    for version in range(3):
        each = [np.roll(gradient, version) for gradient in gradients(workers, elements)]
        expected = np.empty(elements, np.float32)
        add_pushed(expected, each, factors, run.facts.num_parameters)
        sums = run.sum(version, each, factors)
        assert np.linalg.norm(sums[0] - expected) <= 1e-6 * np.linalg.norm(expected)
        assert all(each.tobytes() == sums[0].tobytes() for each in sums)


def test_equal_gradients_have_sums_of_equal_bits(network: Callable[..., Network]) -> None:
    """In a later view too, whose group is another one."""
    run = network(4, 3001)
    sums = []
    for number in (1, 2):
        run.open(number)
        sums += [run.sum(version, gradients(4, 3001), [1.0] * 4)[0] for version in range(4)]
    assert len({each.tobytes() for each in sums}) == 1


def test_a_view_that_is_left_in_an_operation_does_not_block(network: Callable[..., Network]) -> None:
    """Two of three workers start a round, as if the third were frozen; a round of the next view has the right sum."""
    run = network(3, 1000)
    run.open(1)
    each = gradients(3, 1000)
    run.sum(0, each, [1.0] * 3)
    for worker in run.workers[:2]:
        worker.collective.start(1, each[0], 1.0)
    run.open(2)
    sums = run.sum(1, each, [1.0] * 3)
    np.testing.assert_allclose(sums[0], np.sum(each, axis=0), atol=1e-5)
    assert [sum[:2] for sum in run.workers[0].sums] == [(1, 0), (2, 1)]


def test_addresses_that_arrive_before_the_view_are_kept(network: Callable[..., Network]) -> None:
    run = network(2, 8)
    run.open(3, run.workers[:1])
    while not run.workers[1].collective._early:
        run.run(lambda: bool(run.workers[1].collective._early))
    run.open(3, run.workers[1:])
    assert run.sum(0, [np.ones(8, np.float32)] * 2, [1.0] * 2)[1].tolist() == [2.0] * 8


def test_a_member_that_leaves_breaks_the_group_of_the_others(network: Callable[..., Network]) -> None:
    """The next view has a group again. After too many failures in a row the worker ends with a remedy."""
    run = network(2, 8)
    one, two = (worker.collective for worker in run.workers)
    for number in range(1, MOST_FAILURES + 1):
        run.open(number)
        run.sum(0, [np.ones(8, np.float32)] * 2, [1.0] * 2)
        assert not one.has_broken(0.0)
        two.close()
        one.start(1, np.ones(8, np.float32), 1.0)
        run.run(lambda: one._error != "")
        assert one.has_broken(0.0)
        one.close()
        assert not one.has_broken(0.0)
        if number == 2:
            break
    one._failures = MOST_FAILURES
    run.open(99)
    with pytest.raises(JobError, match="let workers reach each other at any port, or use --collective mesh"):
        one.has_broken(0.0)


def test_workers_that_cannot_be_connected_end_in_time(network: Callable[..., Network]) -> None:
    run = network(2, 8)
    one = run.workers[0].collective
    run.open(1, run.workers[:1])
    assert not one.has_broken(1e9)  # the other may still compute
    one.start(0, np.ones(8, np.float32), 1.0)
    assert not one.has_broken(0.0)
    with pytest.raises(JobError, match="the workers cannot be connected"):
        one.has_broken(1e9)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(["a", "b"], True), (["a", "a"], False), (["a", ""], False), (["", ""], False), ([None, "a"], False)],
)
def test_nccl_needs_a_gpu_per_worker(gpus: list[str | None], expected: bool) -> None:
    members: list[dict[str, Any]] = [{} if gpu is None else {"gpu": gpu} for gpu in gpus]
    assert have_own_gpus(members) == expected
