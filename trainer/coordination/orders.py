"""What the coordinator says: orders to the servers, and records for the run's log."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainer.coordination.passes import Seen


class Measured(NamedTuple):
    """A worker's measurements of a step: mean loss, correct predictions, seconds of the step (waiting for its mini-batch
    included), the seconds that another thread spent on making the mini-batch, and its rows, where they are hashed."""

    examples: int
    loss: float
    correct: int
    seconds: float
    read_s: float = 0.0
    seen: Seen | None = None


class Record(NamedTuple):
    """One pushed gradient in the run's log; staleness = version it was applied to - version it was computed at."""

    version: int
    worker: int
    clock: int
    version_pulled: int
    staleness: int
    measured: Measured
    accepted: bool


class Reply(NamedTuple):
    """A worker that is answered: its session, and the clock of the step that it starts or would start."""

    worker: int
    session: int
    clock: int


class Share(NamedTuple):
    """A gradient that is added to the next update's sum, with its factor."""

    worker: int
    clock: int
    weight: float


class Order(NamedTuple):
    """What every server does next, in this order: add the gradients of ``shares`` to the sum of the next update; make the
    update with ``learning_rate`` where that is given; write ``snapshot``; answer the workers of ``unblocked`` with the
    parameters and those of ``stop`` with none. Those of ``cancelled`` are told to give up their step."""

    sequence: int
    version: int
    shares: tuple[Share, ...] = ()
    learning_rate: float | None = None
    unblocked: tuple[Reply, ...] = ()
    stop: tuple[Reply, ...] = ()
    cancelled: tuple[Reply, ...] = ()
    snapshot: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Order:
        """Raises TypeError or KeyError for what is not an order."""
        replies = {name: tuple(Reply(*reply) for reply in values[name]) for name in ("unblocked", "stop", "cancelled")}
        return cls(**values | replies | {"shares": tuple(Share(*share) for share in values["shares"])})
