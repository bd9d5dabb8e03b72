"""Events of workers with models of their own, and of examples that workers exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.runlog.kinds.base import LogEvent


@dataclass(frozen=True, kw_only=True)
class ConsensusEvent(LogEvent):
    """All workers that keep models of their own have reached the end of an epoch.

    Attributes:
        epoch, seconds: number of the epoch; training time.
        distance: root of the mean squared distance of the models' parameters from their mean.
        sent_bytes: bytes that all workers have sent since the start of the run.
        replicas: number of the models.
    """

    kind: str = field(default="consensus", init=False)
    epoch: float
    seconds: float | None = None
    distance: float | None
    sent_bytes: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class NewcomerEvent(LogEvent):
    """A worker that was lost takes part again, with another worker's model.

    Attributes:
        version: with which it begins; in older logs one more.
        worker, source: the worker; the one whose model it got.
        round: its first round.
    """

    kind: str = field(default="newcomer", init=False)
    version: int = field()
    worker: int
    source: int
    round: int


@dataclass(frozen=True, kw_only=True)
class LinkEvent(LogEvent):
    """A worker stops to average with a neighbour that was lost, or begins again.

    Attributes:
        version: of the end of the round.
        worker, neighbour: the worker; the neighbour whose models it uses or does not use.
        round: the first round with a link between them of which this is true.
        used: whether it uses them.
    """

    kind: str = field(default="link", init=False)
    version: int = field()
    worker: int
    neighbour: int
    round: int
    used: bool


@dataclass(frozen=True, kw_only=True)
class GossipEvent(LogEvent):
    """A round in which workers exchange examples is complete, or known again after a roll-back.

    Attributes:
        version: of the first update that its examples can be in; among neighbours the complete rounds of the run.
        round: its number, from 1.
        ids: by worker, the ids of its examples.
    """

    kind: str = field(default="gossip", init=False)
    version: int = field()
    round: int
    ids: dict[str, list[int]]


@dataclass(frozen=True, kw_only=True)
class PoolEvent(LogEvent):
    """A worker gets the examples of all others.

    Attributes:
        version: as of GossipEvent.
        worker: its number.
        round: number of their round.
        clock: its first step with them.
        first: its first step with examples of any round.
    """

    kind: str = field(default="pool", init=False)
    version: int = field()
    worker: int
    round: int
    clock: int
    first: int
