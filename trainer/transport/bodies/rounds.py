"""The wire format of the rounds that a worker reports to server 0."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from trainer.coordination.orders import OwnRound, Round
from trainer.transport.bodies.reports import pack_report, pack_reports, unpack_report_at
from trainer.transport.malformed import MalformedMessageError

MOST_ROUNDS_BYTES = 16 << 20  # of the rounds that a worker keeps for server 0 before it waits
_OWN_ROUND = struct.Struct("<QI")


def pack_rounds(rounds: Sequence[Round]) -> bytes:
    return b"".join(bytes([each.snapshot]) + pack_reports(each.reports) for each in rounds)


def unpack_rounds(body: bytes | memoryview, num_workers: int) -> list[Round]:
    """Return the completed rounds in the body of a join request or of a RoundReport.

    num_workers: the number of reports per round. Raises MalformedMessageError."""
    rounds = []
    at = 0
    # A report says how long it is, so the next one is found only after it is parsed.
    while at < len(body):
        snapshot = bool(body[at])
        at += 1
        reports = []
        for _ in range(num_workers):
            report, at = unpack_report_at(body, at)
            reports.append(report)
        rounds.append(Round(snapshot, tuple(reports)))
    return rounds


def pack_own_rounds(rounds: Sequence[OwnRound]) -> bytes:
    return b"".join(
        _OWN_ROUND.pack(each.sent_bytes, len(each.changed))
        + struct.pack(f"<{len(each.changed)}I", *each.changed)
        + pack_report(each.report)
        for each in rounds
    )


def unpack_own_rounds(body: bytes | memoryview) -> list[OwnRound]:
    """Parse the rounds of one worker. Raises MalformedMessageError."""
    rounds = []
    at = 0
    # One after the other, because their sizes differ.
    try:
        while at < len(body):
            sent_bytes, count = _OWN_ROUND.unpack_from(body, at)
            at += _OWN_ROUND.size
            changed = struct.unpack_from(f"<{count}I", body, at)
            report, at = unpack_report_at(body, at + 4 * count)
            rounds.append(OwnRound(sent_bytes, report, changed))
    except struct.error:
        raise MalformedMessageError(f"rounds of {len(body)} bytes") from None
    return rounds
