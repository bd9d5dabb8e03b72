"""The messages of a run and their wire format. Nothing is ever unpickled.

A message is a head of a fixed size for its kind, followed by its bodies: raw floats, a report or JSON. The class of a
kind has the fields of its head, and its docstring names the bodies.

Fields that several messages share: worker and server are the index of the sender or of the addressee; session grows
with every join of a worker and every start of a server; generation grows with every roll-back; clock is the number of a
worker's step; version is the number of updates that the parameters contain."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from trainer.coordination.orders import ExampleOffer, OwnRound, Round, RowLosses, StepMeasurements
from trainer.coordination.passes import RowSums

MAGIC = b"PS2"
JSON_LIMIT_BYTES = 1 << 20
MOST_ROUNDS_BYTES = 16 << 20  # of the rounds that a worker keeps for server 0 before it waits

# --- from workers to servers ------------------------------------------------------------------------------------------


class Join(NamedTuple):
    """A worker asks to take part. To all servers. Body: an introduction, with the handle of its shared memory if any.

    Attributes:
        session: grows with every join of the worker.
    """

    worker: int
    session: int


class Push(NamedTuple):
    """A worker hands over its gradient. To all servers. Bodies: its report; the server's part, float32.

    Attributes:
        generation: grows with every roll-back.
        clock: number of the worker's step.
        in_memory: whether the gradient is in the memory that worker and server share; the second body is empty then.
    """

    worker: int
    session: int
    generation: int
    clock: int
    in_memory: bool


class GiveUp(NamedTuple):
    """A worker has given up a step, because its gradient would be refused. To server 0. Body: its report."""

    worker: int
    session: int
    clock: int


class Heartbeat(NamedTuple):
    """A worker is alive. To server 0, on a connection of its own, so that it can overtake the join request.

    Attributes:
        joined: whether all servers have answered the session's join request.
    """

    worker: int
    session: int
    joined: bool


# --- from servers to server 0 -----------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """A server announces itself. Body: an introduction. session: grows with every start of the server."""

    server: int
    session: int


class JoinReceipt(NamedTuple):
    """A server has a worker's join request."""

    server: int
    generation: int
    worker: int
    session: int


class GradientReceipt(NamedTuple):
    """A server has its part of a worker's gradient."""

    server: int
    generation: int
    worker: int
    session: int
    clock: int


class LoadReceipt(NamedTuple):
    """A server has loaded the checkpoint of a generation."""

    server: int
    generation: int


class WriteReceipt(NamedTuple):
    """A server has written its slice of a checkpoint, or failed to.

    Attributes:
        order: number of the order that asked for it.
        outcome: a checkpoints.write.WriteOutcome.
    """

    server: int
    generation: int
    order: int
    outcome: int


# --- from supervisors to server 0, and its replies --------------------------------------------------------------------


class AskStatus(NamedTuple):
    """A supervisor asks for the run's status. Body: an introduction."""


class WorkerLoss(NamedTuple):
    """A supervisor's worker has ended. Body: an introduction."""

    worker: int


class End(NamedTuple):
    """A supervisor is about to stop the run, which needs a checkpoint. Body: an introduction."""


class StatusReply(NamedTuple):
    """The reply to AskStatus. Body: the status in JSON."""


class EndReply(NamedTuple):
    """The reply to End. Body: the status in JSON, whose version the checkpoint will have at least."""


class Refusal(NamedTuple):
    """Server 0's reply to an introduction of another run. Body: the essentials of its own.

    Attributes:
        session: of the refused process; 0 for a supervisor.
    """

    session: int


# --- from servers to workers ------------------------------------------------------------------------------------------


class Parameters(NamedTuple):
    """A worker's next step. Body: the server's part of the parameters, float32.

    Attributes:
        clock: number of the step.
        version: of the parameters.
        in_memory: whether they are in the memory that worker and server share; the body is empty then, or the handle of
            the server's pipe.
    """

    worker: int
    session: int
    generation: int
    clock: int
    version: int
    in_memory: bool


class Stop(NamedTuple):
    """A worker has nothing left to do. Fields as in Parameters."""

    worker: int
    session: int
    generation: int
    clock: int
    version: int


class Cancel(NamedTuple):
    """A worker may give up its step ``clock``, because its gradient will be refused."""

    worker: int
    session: int
    clock: int


class Rejoin(NamedTuple):
    """A worker must join again, because the session is no member, or the servers rolled back.

    Attributes:
        later_session: a later session of this worker that the server knows, which its next one must exceed; else 0.
        joined: False in the reply to a heartbeat whose ``joined`` is False.
    """

    worker: int
    session: int
    later_session: int = 0
    joined: bool = True


# --- from server 0 to servers -----------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A server must load the checkpoint of a version, and start a generation with it.

    Attributes:
        stage: number of the stage in which the run continues.
    """

    generation: int
    version: int
    stage: int


class Execute(NamedTuple):
    """A server must execute the next order. Body: the order in JSON."""

    generation: int


# --- between workers that exchange among themselves, and server 0 -----------------------------------------------------


class PeerJoin(NamedTuple):
    """A worker has left its view and asks to take part in the next. To server 0. Bodies: an introduction; its rounds.

    The introduction has the address at which other workers reach it, and the snapshots of which it keeps a copy. The
    rounds are those that server 0 has not settled, up to the version that the worker holds.

    Attributes:
        process: a random number of the worker's process.
        number: of the Regroup that this answers, 0 before the first.
        generation: of the model that the worker holds.
        holds: version of that model plus one; 0 for none.
    """

    worker: int
    process: int
    number: int
    generation: int
    holds: int


class PeerBeat(NamedTuple):
    """A worker is alive. To server 0, on a connection of its own. number: of its view; version: of its model."""

    worker: int
    process: int
    number: int
    version: int


class RoundReport(NamedTuple):
    """The reports of the last rounds up to a version. To server 0. Bodies: none; the rounds.

    Attributes:
        number: of the view; among neighbours the session of the sender.
    """

    worker: int
    process: int
    number: int
    version: int


class CopyReceipt(NamedTuple):
    """A worker has written the checkpoint of a version, or failed to. outcome: a checkpoints.write.WriteOutcome."""

    worker: int
    process: int
    generation: int
    version: int
    outcome: int


class LinkLoss(NamedTuple):
    """A worker's connection to another worker broke, so that messages of the view may be lost. To server 0."""

    worker: int
    process: int
    number: int


class Regroup(NamedTuple):
    """A worker must leave its view and answer with a PeerJoin of this number. From server 0."""

    number: int


class Replacement(NamedTuple):
    """A later process has taken the place of this one, which must end. From server 0."""

    process: int


class PeerView(NamedTuple):
    """The members of the next rounds, and the model with which they begin. From server 0. Body: members and progress.

    Attributes:
        number: grows with every view, and every Regroup before it.
        generation: grows with every roll-back.
        version: of the model with which all members begin.
    """

    number: int
    generation: int
    version: int


class WriteCopy(NamedTuple):
    """A worker must write its copy of a snapshot as a checkpoint. From server 0."""

    generation: int
    version: int


class Settlement(NamedTuple):
    """Server 0 has the rounds up to a version. Body: the versions of which workers must keep a copy."""

    generation: int
    version: int


class WantSnapshot(NamedTuple):
    """The next round must end with a snapshot. From server 0 to worker 0, whose sums tell all others.

    Attributes:
        wish: grows with every snapshot that is wanted, so that a repeated message does not cause another one.
    """

    number: int
    wish: int


class RunEnd(NamedTuple):
    """The run is over. From server 0."""

    number: int


class GradientPiece(NamedTuple):
    """A worker's gradient in the range of the addressee. Bodies: the worker's report; the elements, float32.

    Attributes:
        version: of the parameters at which it was computed.
        in_memory: whether the elements are in the memory of the sender, or a collective transfers them; the second body
            is empty then.
    """

    number: int
    version: int
    worker: int
    in_memory: bool


class RangeSum(NamedTuple):
    """The sum of all gradients in the range of the sender. Bodies: the reports of all workers; the elements, float32.

    Attributes:
        version: of the parameters at which the gradients were computed.
        in_memory: as in GradientPiece.
        snapshot: whether the round ends with a snapshot; decided by worker 0.
    """

    number: int
    version: int
    worker: int
    in_memory: bool
    snapshot: bool


class StoreEntry(NamedTuple):
    """An entry in the store of a view's process group, where its members find each other. Bodies: its key; its value."""

    number: int


class ModelCopy(NamedTuple):
    """The model with which a view begins, to a member that lacks it. Bodies: values and momentum, float32.

    Among neighbours it is for a single worker, and an empty momentum is 0.

    Attributes:
        number: of the view; among neighbours the session of the addressee.
    """

    number: int
    version: int


class NeighbourView(NamedTuple):
    """The workers of a run in which each has a model of its own. From server 0. Body: members, and the plan of links.

    Attributes:
        number: grows with every view.
    """

    number: int
    generation: int


class RoundGrant(NamedTuple):
    """The rounds below ``until`` may begin. From server 0. Body: versions of which it needs or has models, and pools.

    Attributes:
        number: of the view that belongs to it.
        received: one more than the rounds of the addressee that server 0 has; 0 if it does not know of a first model.
    """

    number: int
    generation: int
    until: int
    received: int


class NeighbourModel(NamedTuple):
    """A worker's model in a round, to its neighbours in that round. Body: the parameters, float32.

    Attributes:
        session: of the sender.
    """

    session: int
    worker: int
    round: int


class ReplicaCopy(NamedTuple):
    """A worker's model at a version, for a checkpoint. To server 0. Bodies: values and momentum, float32."""

    worker: int
    process: int
    session: int
    version: int


class ChangeStage(NamedTuple):
    """A worker must leave its exchange, because the run is in another stage. From server 0.

    Attributes:
        stage: number of that stage.
    """

    stage: int


class GossipOffer(NamedTuple):
    """A worker's examples for all others. To server 0. Body: the examples.

    Attributes:
        epoch: the worker's epoch by whose losses they were selected.
    """

    worker: int
    session: int
    epoch: int


class GossipPool(NamedTuple):
    """The examples of all workers, before the parameters of the step that uses them. From server 0. Body: examples.

    Attributes:
        round: number of their round; 0 for none.
        clock: that step.
        first: the worker's first step with examples of others.
        own_begin, own_end: the places of the worker's own examples, so that one body serves all workers.
    """

    worker: int
    session: int
    round: int
    clock: int
    first: int
    own_begin: int
    own_end: int


class PeerOffer(NamedTuple):
    """The examples that a worker gives before a step, if workers have models of their own. To server 0. Body: examples.

    Attributes:
        session: of the sender.
        epoch: the worker's epoch by whose losses they were selected.
    """

    worker: int
    process: int
    session: int
    epoch: int


class PoolRequest(NamedTuple):
    """A worker needs the pools of the last rounds, from ``round`` on. To server 0, which sends a GossipPool for each.

    Attributes:
        session: of the sender.
    """

    worker: int
    process: int
    session: int
    round: int


class GossipContent(NamedTuple):
    """The examples that a worker gives before a step, to another worker, before its gradient. Body: the examples.

    Attributes:
        version: of the parameters of that step.
    """

    number: int
    version: int
    worker: int


Message = (
    Join
    | Push
    | GiveUp
    | Heartbeat
    | Hello
    | JoinReceipt
    | GradientReceipt
    | LoadReceipt
    | WriteReceipt
    | AskStatus
    | WorkerLoss
    | End
    | StatusReply
    | EndReply
    | Refusal
    | Parameters
    | Stop
    | Cancel
    | Rejoin
    | Load
    | Execute
    | PeerJoin
    | PeerBeat
    | RoundReport
    | CopyReceipt
    | LinkLoss
    | Regroup
    | Replacement
    | PeerView
    | WriteCopy
    | Settlement
    | WantSnapshot
    | RunEnd
    | GradientPiece
    | RangeSum
    | ModelCopy
    | ChangeStage
    | StoreEntry
    | NeighbourView
    | RoundGrant
    | NeighbourModel
    | ReplicaCopy
    | GossipOffer
    | GossipPool
    | GossipContent
    | PeerOffer
    | PoolRequest
)
TWO_BODIES = (Push, PeerJoin, RoundReport, GradientPiece, RangeSum, ModelCopy, StoreEntry, ReplicaCopy)
KINDS: tuple[type[Message], ...] = get_args(Message)  # the code of a kind is its place
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_FORMATS = {int: "q", bool: "?"}
_HEADS = [struct.Struct("<3sB" + "".join(map(_FORMATS.__getitem__, get_type_hints(kind).values()))) for kind in KINDS]
_REPORT = struct.Struct("<iidddQQiiii")
_ROW_COLUMNS = (np.dtype("<i8"), np.dtype("<f4"), np.dtype("?"))  # of RowLosses
_ROW_BYTES = sum(dtype.itemsize for dtype in _ROW_COLUMNS)
NO_ROWS = -1  # the number of rows of a report without their losses
NO_OFFER = -1  # the number of ids of a report without examples for others
_ID = np.dtype("<i8")
_OWN_ROUND = struct.Struct("<QI")
_NO_PASSES = RowSums(0, 0, -1)  # stands for None on the wire


class MalformedMessageError(ValueError):
    """A message that no peer of this version sends."""


def pack(message: Message) -> bytes:
    """Return the head of a message."""
    code = _CODES[type(message)]
    return _HEADS[code].pack(MAGIC, code, *message)


def unpack(head: bytes | memoryview) -> Message:
    """Parse the head of a message. No field is negative. Raises MalformedMessageError."""
    message, end = unpack_at(head, 0)
    if end != len(head):
        raise MalformedMessageError(f"a head of {len(head)} bytes for {type(message).__name__}")
    return message


def unpack_at(data: bytes | memoryview, at: int) -> tuple[Message, int]:
    """Parse the head that begins at a byte, and return it with its end. Raises MalformedMessageError."""
    try:
        code = data[at + 3]
        head = _HEADS[code]
        magic, _, *values = head.unpack_from(data, at)
    except (IndexError, struct.error):
        raise MalformedMessageError(f"a head of {len(data) - at} bytes") from None
    # Numbers, sessions and generations count up from 0, so that receivers need to check upper bounds only.
    if magic != MAGIC or (values and min(values) < 0):
        raise MalformedMessageError(f"a head {bytes(data[at : at + head.size]).hex()}")
    return KINDS[code]._make(values), at + head.size


def num_frames(message: Message) -> int:
    """Return the number of frames of a message: its head and its bodies, of which there is one even if it is empty."""
    return 3 if isinstance(message, TWO_BODIES) else 2


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
    ids = np.array(offer.ids if offer else (), _ID).tobytes()
    return b"".join((head, *(column.tobytes() for column in rows or ()), ids))


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
    row_sums = RowSums(*hashes)
    report = StepMeasurements(examples, loss, correct, seconds, read_s, row_sums if row_sums.passes >= 0 else None)
    if rows != NO_ROWS:
        row_losses, begin = _unpack_rows(body, begin, rows, examples)
        report = report._replace(row_losses=row_losses)
    if offered != NO_OFFER:
        # Before any copy, as for the rows.
        end = begin + offered * _ID.itemsize
        if offered < 1 or epoch < 0 or end > len(body):
            raise MalformedMessageError(f"{offered} examples in {len(body) - at} bytes")
        report = report._replace(offer=ExampleOffer(epoch, tuple(np.frombuffer(body, _ID, offered, begin).tolist())))
        begin = end
    return report, begin


def _unpack_rows(body: bytes | memoryview, begin: int, rows: int, examples: int) -> tuple[RowLosses, int]:
    """Parse the losses of rows that begin at a byte, as copies, and return them with their end.

    Raises MalformedMessageError. examples: of the mini-batch."""
    end = begin + rows * _ROW_BYTES
    # Before any copy, because a stranger's number may be anything.
    # A push of several mini-batches has no losses of those with other workers' examples.
    if rows > examples or rows < 0 or end > len(body):
        raise MalformedMessageError(f"losses of {rows} rows in {len(body) - begin} bytes")
    columns: list[Any] = []
    for dtype in _ROW_COLUMNS:
        columns.append(np.frombuffer(body, dtype, rows, begin).copy())
        begin += rows * dtype.itemsize
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


def pack_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(data: bytes | memoryview, most_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """Parse a JSON object of at most ``most_bytes``. Raises MalformedMessageError."""
    if len(data) > most_bytes:
        raise MalformedMessageError(f"{len(data)} bytes of JSON")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise MalformedMessageError("no JSON") from None
    if not isinstance(value, dict):
        raise MalformedMessageError("no JSON object")
    return value
