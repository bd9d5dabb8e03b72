"""The wire format of reports: the measurements of workers' steps."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.coordination.orders import ExampleOffer, RowLosses, StepMeasurements
from trainer.coordination.passes import RowSums
from trainer.transport.malformed import MalformedMessageError

_REPORT = struct.Struct("<iidddQQiiii")
_ROW_COLUMNS = (np.dtype("<i8"), np.dtype("<f4"), np.dtype("?"))  # of RowLosses
_ROW_BYTES = sum(dtype.itemsize for dtype in _ROW_COLUMNS)
NO_ROWS = -1  # the number of rows of a report without their losses
NO_OFFER = -1  # the number of ids of a report without examples for others
_ID = np.dtype("<i8")
_NO_PASSES = RowSums(0, 0, -1)  # stands for None on the wire


def pack_report(report: StepMeasurements) -> bytes:
    """Return a report as the body of a message.

    After its numbers come ids, losses and hits of the rows, and the ids of examples for others, if it has them."""
    rows = report.row_losses
    offer = report.offer
    head = _REPORT.pack(
        report.examples,
        report.correct,
        report.loss,
        report.seconds,
        report.read_s,
        *(report.seen or _NO_PASSES),
        len(rows.ids) if rows else NO_ROWS,
        len(offer.ids) if offer else NO_OFFER,
        offer.epoch if offer else 0,
    )
    # Almost all reports are as short as this.
    if rows is None and offer is None:
        return head
    columns: list[Any] = [*(rows or ()), np.array(offer.ids if offer else (), _ID)]
    return b"".join((head, *columns))  # joins the memory of the arrays


def unpack_report(body: bytes | memoryview) -> StepMeasurements:
    """Parse a report. Raises MalformedMessageError."""
    report, end = unpack_report_at(body, 0)
    if end != len(body):
        raise MalformedMessageError(f"a report of {len(body)} bytes")
    return report


def unpack_report_at(body: bytes | memoryview, at: int) -> tuple[StepMeasurements, int]:
    """Parse the report that begins at a byte, and return it with its end. Raises MalformedMessageError."""
    begin = at + _REPORT.size
    try:
        examples, correct, loss, seconds, read_s, *hashes, rows, offered, epoch = _REPORT.unpack_from(body, at)
    except struct.error:
        raise MalformedMessageError(f"a report in {len(body) - at} bytes") from None
    row_sums = RowSums(*hashes) if hashes[-1] >= 0 else None
    row_losses = offer = None
    if rows != NO_ROWS:
        row_losses, begin = _unpack_rows(body, begin, rows, examples)
    if offered != NO_OFFER:
        # Before any copy, as for the rows.
        end = begin + offered * _ID.itemsize
        if offered < 1 or epoch < 0 or end > len(body):
            raise MalformedMessageError(f"{offered} examples in {len(body) - at} bytes")
        offer = ExampleOffer(epoch, tuple(np.frombuffer(body, _ID, offered, begin).tolist()))
        begin = end
    return StepMeasurements(examples, loss, correct, seconds, read_s, row_sums, row_losses, offer), begin


def _unpack_rows(body: bytes | memoryview, begin: int, rows: int, examples: int) -> tuple[RowLosses, int]:
    """Parse the losses of rows that begin at a byte, as read-only columns of a copy, and return them with their end.

    Raises MalformedMessageError. examples: of the mini-batch."""
    end = begin + rows * _ROW_BYTES
    # Before any copy, because a stranger's number may be anything.
    # A push of several mini-batches has no losses of those with other workers' examples.
    if rows > examples or rows < 0 or end > len(body):
        raise MalformedMessageError(f"losses of {rows} rows in {len(body) - begin} bytes")
    content = bytes(body[begin:end])
    columns: list[Any] = []
    place = 0
    for dtype in _ROW_COLUMNS:
        columns.append(np.frombuffer(content, dtype, rows, place))
        place += rows * dtype.itemsize
    return RowLosses(*columns), end


def report_bytes(report: StepMeasurements) -> int:
    """Return the length of a packed report."""
    rows = len(report.row_losses.ids) if report.row_losses else 0
    return most_report_bytes(rows, len(report.offer.ids) if report.offer else 0)


def most_report_bytes(rows: int, offered: int = 0) -> int:
    """Return the length of a packed report.

    rows: of its mini-batch, if it has their losses; offered: number of examples that the worker gives to others."""
    return _REPORT.size + rows * _ROW_BYTES + offered * _ID.itemsize


def pack_reports(reports: Sequence[StepMeasurements]) -> bytes:
    return b"".join(map(pack_report, reports))


def unpack_reports(body: bytes | memoryview) -> tuple[StepMeasurements, ...]:
    """Parse reports. Raises MalformedMessageError."""
    reports = []
    at = 0
    # One after the other, because their sizes differ.
    while at < len(body):
        report, at = unpack_report_at(body, at)
        reports.append(report)
    return tuple(reports)
