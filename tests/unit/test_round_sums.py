"""The sums of a round, between workers in one thread whose messages a test delivers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.configs import make_config
from trainer.config import RunFacts
from trainer.coordination.orders import Round, StepMeasurements
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import GradientPiece, RangeSum
from trainer.transport.messages.heads import Body, Message
from trainer.worker.replica_links import Vector
from trainer.worker.round_history import MOST_COPIES, ModelSnapshot, RoundHistory
from trainer.worker.round_sums import RoundSums

ELEMENTS = 11
REPORT = StepMeasurements(2, 1.0, 1, 0.1)


class Wire:
    """The links of one worker: they keep its messages, and share memory with workers whose marks a test sets."""

    def __init__(self, shares: bool = False) -> None:
        self.sent: list[tuple[int, Message, tuple[Body, ...]]] = []
        self.shares = shares
        self.pieces: list[Vector | None] = []  # of the memory of any other worker, in the order of looks
        self.marks: list[tuple[int, int]] = []

    def connect(self, members: Any) -> None: ...

    def send(self, worker: int, message: Message, *bodies: Body) -> None:
        self.sent.append((worker, message, bodies))

    def shares_memory(self, worker: int) -> bool:
        return self.shares

    def memory_of(self, worker: int) -> Any:
        return self

    def piece(self, number: int, version: int, begin: int, end: int) -> Vector | None:
        return self.pieces.pop(0)

    range_sum = piece

    def offer_piece(self, number: int, version: int) -> None: ...

    def offer_sum(self, number: int, version: int) -> None:
        self.marks.append((number, version))


def sums_of(workers: int, worker: int, wire: Wire, gradient: Vector) -> RoundSums:
    config = make_config(exchange="all-reduce", protocol="bsp", batch_size=12)
    facts = RunFacts(workers, 100, ELEMENTS - 2, 2)
    return RoundSums(config, facts, worker, gradient, np.zeros(ELEMENTS, np.float32), wire, None)


def gradients(workers: int) -> list[Vector]:
    return [np.random.default_rng(worker).normal(size=ELEMENTS).astype(np.float32) for worker in range(workers)]


@pytest.mark.parametrize("seed", range(4))
def test_all_workers_have_the_same_bits_in_any_order(seed: int) -> None:
    """Compare with a loop that adds the gradients in the order of workers; worker 0 decides about the snapshot."""
    shuffle = random.Random(seed)
    pushed = gradients(3)
    wires = [Wire() for _ in pushed]
    workers = [sums_of(3, worker, wires[worker], pushed[worker]) for worker in range(3)]
    workers[seed % 2].wish = 1
    reports = [REPORT._replace(loss=float(worker)) for worker in range(3)]
    for worker in shuffle.sample(range(3), 3):
        workers[worker].send_gradient(7, 4, reports[worker])
    while waiting := [wire for wire in wires if wire.sent]:
        wire = shuffle.choice(waiting)
        addressee, message, bodies = wire.sent.pop(shuffle.randrange(len(wire.sent)))
        if isinstance(message, GradientPiece):
            workers[addressee].take_piece(message, *bodies)
        elif isinstance(message, RangeSum):
            workers[addressee].take_sum(message, *bodies)
    expected = np.zeros(ELEMENTS, np.float32)
    for gradient in pushed:
        expected += gradient
    for each in workers:
        assert each.are_complete
        np.testing.assert_array_equal(np.concatenate(each.sums_by_range()), expected)
        assert each.reports == tuple(reports)
        assert each.snapshot == (seed % 2 == 0)


def test_a_snapshot_is_made_once_for_a_wish() -> None:
    sums = sums_of(1, 0, Wire(), gradients(1)[0])
    snapshots = []
    for wish in (2, 2, 3):
        sums.wish = wish
        sums.send_gradient(1, 1, REPORT)
        snapshots.append(sums.snapshot)
        sums.clear()
        sums.grant_wish()
    assert snapshots == [True, False, True]
    sums.forget_wishes()
    assert sums.wish == 0


@pytest.mark.parametrize("pieces", [[None], [np.ones(5, np.float32), None], [np.ones(5, np.float32)] * 2])
def test_a_sum_is_sent_if_no_piece_has_changed_meanwhile(pieces: list[Vector | None]) -> None:
    """A mark that is missing before or after the addition means that the worker has left the view."""
    wire = Wire(shares=True)
    sums = sums_of(2, 0, wire, gradients(2)[0])
    sums.send_gradient(7, 4, REPORT)
    assert wire.sent.pop()[2][1] == b"", "the gradient is in memory"
    wire.pieces = list(pieces)
    other = sums_of(2, 1, sender := Wire(), gradients(2)[1])
    other.send_gradient(7, 4, REPORT)
    sums.take_piece(GradientPiece(7, 4, 1, True), sender.sent[0][2][0], b"")
    is_whole = all(piece is not None for piece in pieces)
    assert [type(message) for _, message, _ in wire.sent] == [RangeSum] * is_whole
    assert ((7, 4) in wire.marks) == is_whole


def test_a_sum_with_too_few_reports_is_malformed() -> None:
    sums = sums_of(2, 0, Wire(), gradients(2)[0])
    two = sums_of(2, 1, wire := Wire(), gradients(2)[1])
    two.send_gradient(7, 4, REPORT)
    one_report = wire.sent[0][2][0]
    with pytest.raises(MalformedMessageError, match="1 reports"):
        sums.take_sum(RangeSum(7, 4, 1, False, False), one_report, bytes(4 * 6))
    assert not sums.are_complete


def test_settled_rounds_and_snapshots_are_forgotten() -> None:
    """Keep a snapshot of an earlier version only while it is needed, and all later ones."""
    history = RoundHistory(1)
    rounds = [Round(False, (REPORT._replace(loss=float(number)),)) for number in range(4)]
    history.rounds = list(rounds)  # 7 to 10 of 10
    model = np.zeros(1, np.float32)
    history.snapshots = {version: ModelSnapshot(version % 2, model, model) for version in (7, 8, 9, 10)}
    assert history.versions(1) == [7, 9]
    assert not history.is_full(6 + MOST_COPIES)
    assert history.is_full(7 + MOST_COPIES)
    history.settle(10, 6, (7, 8, 9, 10))
    assert history.rounds == rounds
    history.settle(10, 8, (7,))
    assert history.rounds == rounds[2:]
    assert list(history.snapshots) == [7, 9, 10]
