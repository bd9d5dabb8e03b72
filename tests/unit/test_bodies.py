"""The bodies of messages on the wire: reports and rounds."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.wire import REPORT
from trainer.coordination.orders import ExampleOffer, OwnRound, Round, RowLosses, StepMeasurements, join_measurements
from trainer.coordination.passes import RowSums
from trainer.server.rounds import BODY_BYTES
from trainer.transport.bodies.reports import (
    most_report_bytes,
    pack_report,
    pack_reports,
    report_bytes,
    unpack_report,
    unpack_reports,
)
from trainer.transport.bodies.rounds import pack_own_rounds, pack_rounds, unpack_own_rounds, unpack_rounds
from trainer.transport.malformed import MalformedMessageError
from trainer.worker.neighbour_replica import NeighbourReplica
from trainer.worker.round_history import RoundHistory


def test_a_report_is_the_same_on_the_other_side() -> None:
    for report in (
        StepMeasurements(1, 0.5, 1, 0.01),
        StepMeasurements(7, -1.5, 3, 2.0, 0.25, RowSums(2**64 - 1, 3, 1)),
    ):
        assert unpack_report(pack_report(report)) == report
    assert pack_report(StepMeasurements(1, 0.5, 1, 0.01)) == REPORT


def test_a_report_carries_the_ids_of_examples_for_others() -> None:
    plain = StepMeasurements(1, 0.5, 1, 0.01)
    offered = plain._replace(offer=ExampleOffer(3, (2**62, -5)))
    assert len(pack_report(offered)) == report_bytes(offered) == most_report_bytes(0, 2)
    reports = (offered, plain, offered, offered)
    assert unpack_reports(pack_reports(reports)) == reports
    assert unpack_rounds(pack_rounds([Round(True, reports)]), 4) == [Round(True, reports)]
    assert unpack_own_rounds(pack_own_rounds([OwnRound(9, offered, (4,))])) == [OwnRound(9, offered, (4,))]
    body = pack_report(offered)
    for count, epoch in ((3, 3), (0, 3), (-2, 3), (2, -1)):
        with pytest.raises(MalformedMessageError):
            unpack_report(body[:-24] + struct.pack("<ii", count, epoch) + body[-16:])


def test_a_worker_waits_before_its_rounds_exceed_a_message() -> None:
    """Rounds with the losses of rows are long; without losses, the limit on their number is reached first."""
    rows = RowLosses(np.arange(1 << 16), np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.bool_))
    long = StepMeasurements(1 << 16, 0.5, 1, 0.01, row_losses=rows)
    assert len(pack_report(long)) == report_bytes(long) == most_report_bytes(1 << 16)
    assert len(pack_report(long._replace(row_losses=None))) == most_report_bytes(0)
    shared = RoundHistory(2)
    shared.rounds = [Round(False, (long, long))] * 8
    assert not shared.is_full(0)
    shared.rounds *= 2
    assert shared.is_full(0)
    own = SimpleNamespace(copies={}, rounds=[OwnRound(0, long)] * 16)
    must_wait = vars(NeighbourReplica)["must_wait"].fget  # of the class, because a whole replica needs a network
    assert not must_wait(own)
    own.rounds += own.rounds[:8]
    assert must_wait(own)
    assert len(pack_rounds(shared.rounds)) < BODY_BYTES


def test_losses_of_rows_are_the_same_on_the_other_side() -> None:
    """Also of a mini-batch without rows, between other reports, and in rounds of both kinds."""
    plain = StepMeasurements(1, 0.5, 1, 0.01)
    rows = RowLosses(np.array([2**40, 3]), np.array([0.25, 1.5], np.float32), np.array([True, False]))
    nothing = RowLosses(*(np.empty(0, column.dtype) for column in rows))
    long = StepMeasurements(2, 0.875, 1, 0.5, 0.25, RowSums(7, 3, 1), rows)
    mixed = join_measurements([long, plain, long])  # plain: of other workers' examples, whose losses do not count
    assert (mixed.examples, len(mixed.row_losses or ()), mixed.row_losses and len(mixed.row_losses.ids)) == (5, 3, 4)
    reports = (long, mixed, plain._replace(examples=0, row_losses=nothing), plain, mixed, long)

    def text(each: StepMeasurements) -> str:
        rows = [(column.dtype, column.tolist()) for column in each.row_losses or ()]
        return f"{each._replace(row_losses=None)} {rows}"

    expected = [text(each) for each in reports]
    assert [text(each) for each in unpack_reports(pack_reports(reports))] == expected
    parts = [Round(flag, reports[begin : begin + 2]) for begin, flag in ((0, True), (2, False), (4, True))]
    rounds = unpack_rounds(pack_rounds(parts), 2)
    assert [text(each) for round in rounds for each in round.reports] == expected
    assert [round.snapshot for round in rounds] == [True, False, True]
    own = unpack_own_rounds(pack_own_rounds([OwnRound(9, each, (4, 2)) for each in reports]))
    assert [text(round.report) for round in own] == expected
    assert {(round.sent_bytes, round.changed) for round in own} == {(9, (4, 2))}
    for unpack_all in (lambda data: unpack_rounds(data, 2), unpack_reports, unpack_own_rounds):
        with pytest.raises(MalformedMessageError):
            unpack_all(pack_reports(reports)[:-1])
