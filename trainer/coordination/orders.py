"""The results of the coordinator: orders to the servers, and records for the run's log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.coordination.budget import Position
from trainer.coordination.passes import RowSums


class RowLosses(NamedTuple):
    """The losses of the rows of a mini-batch at the parameters with which its gradient was computed.

    Attributes:
        ids: int64 [B].
        losses: float32 [B], without the L2 term.
        correct: bool [B], whether the prediction was correct.
    """

    ids: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float32]
    correct: npt.NDArray[np.bool_]


class ExampleOffer(NamedTuple):
    """The examples that a worker gives to all others before a step, by their ids.

    Attributes:
        epoch: the worker's epoch by whose losses they were selected.
        ids: of the examples, in their order.
    """

    epoch: int
    ids: tuple[int, ...]


class StepMeasurements(NamedTuple):
    """A worker's measurements of one step.

    Attributes:
        examples: size of the mini-batch.
        loss: mean over the examples.
        correct: number of correct predictions.
        seconds: time of the step, including the wait for its mini-batch.
        read_s: time that the loader's thread spent on the mini-batch.
        seen: fingerprint of the mini-batch, if rows are hashed.
        row_losses: losses of its rows, if the run keeps them.
        offer: the examples that the worker gave before the step, if the report carries them.
    """

    examples: int
    loss: float
    correct: int
    seconds: float
    read_s: float = 0.0
    seen: RowSums | None = None
    row_losses: RowLosses | None = None
    offer: ExampleOffer | None = None


def join_measurements(reports: Sequence[StepMeasurements]) -> StepMeasurements:
    """Return the measurements of a worker's consecutive steps in one report, with the mean of their times.

    reports: at least one."""
    if len(reports) == 1:
        return reports[0]
    examples = sum(report.examples for report in reports)
    row_sums = [report.seen for report in reports if report.seen]
    row_losses = [report.row_losses for report in reports if report.row_losses]
    return StepMeasurements(
        examples,
        # Without examples, all of these losses are 0.
        sum(report.loss * report.examples for report in reports) / max(1, examples),
        sum(report.correct for report in reports),
        sum(report.seconds for report in reports) / len(reports),
        sum(report.read_s for report in reports) / len(reports),
        reduce(RowSums.followed_by, row_sums) if row_sums else None,
        RowLosses(*map(np.concatenate, zip(*row_losses, strict=True))) if row_losses else None,
    )


class Round(NamedTuple):
    """A completed round of an exchange among workers.

    Attributes:
        snapshot: whether it ended with a snapshot on request.
        reports: one per worker, in the order of workers.
    """

    snapshot: bool
    reports: tuple[StepMeasurements, ...]


class OwnRound(NamedTuple):
    """A completed round of one worker, which has a model of its own.

    Attributes:
        sent_bytes: bytes of models that it sent to other workers.
        report: its measurements.
        changed: neighbours whose models it uses again, or no longer, from this round on.
    """

    sent_bytes: int
    report: StepMeasurements
    changed: tuple[int, ...] = ()


class Record(NamedTuple):
    """A pushed gradient in the run's log.

    Attributes:
        version: updates so far, with the one that applies the gradient if it is accepted.
        worker, clock: the worker and its step.
        version_pulled: version of the parameters with which it was computed.
        staleness: updates between version_pulled and the update that applies it, or the present if it is refused.
        measured: the worker's measurements of the step.
        accepted: whether it is in an update, rather than refused.
    """

    version: int
    worker: int
    clock: int
    version_pulled: int
    staleness: int
    measured: StepMeasurements
    accepted: bool


class Reply(NamedTuple):
    """The answer to a worker: its session, and the clock of its next step."""

    worker: int
    session: int
    clock: int


class Share(NamedTuple):
    """A gradient that is added to the sum of the next update.

    Attributes:
        worker, clock: the worker and its step.
        weight: the factor of the gradient in the sum (see Weights).
    """

    worker: int
    clock: int
    weight: float


class Order(NamedTuple):
    """The next step of every server, in this order: shares, update, snapshot, answers to workers.

    Attributes:
        sequence: number of the order, without gaps.
        version: number of updates after the order.
        shares: gradients that are added to the sum of the next update.
        learning_rate: of the update that is made now; None for no update.
        scale: the factor of its sum of gradients, besides the learning rate (see Weights.correction).
        snapshot: whether the server writes its slice, for a checkpoint of this version.
        unblocked: workers that are answered with the parameters.
        stop: workers that are told to end.
        cancelled: workers that are told to give up their step.
    """

    sequence: int
    version: int
    shares: tuple[Share, ...] = ()
    learning_rate: float | None = None
    scale: float = 1.0
    unblocked: tuple[Reply, ...] = ()
    stop: tuple[Reply, ...] = ()
    cancelled: tuple[Reply, ...] = ()
    snapshot: bool = False

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Order:
        """Parse an order. Raises TypeError or KeyError if it is malformed."""
        replies = {name: tuple(Reply(*reply) for reply in values[name]) for name in ("unblocked", "stop", "cancelled")}
        return cls(**values | replies | {"shares": tuple(Share(*share) for share in values["shares"])})


@dataclass(frozen=True)
class Snapshot:
    """The progress of a run at a checkpoint, which only server 0 needs.

    Attributes:
        position: a copy that later orders do not change.
        epoch: global epochs so far.
        epoch_boundary: E if this is the end of epoch E.
        final: whether the run ends here.
    """

    position: Position
    epoch: float
    epoch_boundary: int | None
    final: bool


class Decision(NamedTuple):
    """An order to all servers and, for a checkpoint, the progress that server 0 writes beside the slices."""

    order: Order
    snapshot: Snapshot | None
