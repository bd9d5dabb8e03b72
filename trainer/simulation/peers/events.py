"""The events and the state of virtual workers that keep models of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from trainer.checkpoints.slice_file import Float32s
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.simulation.network import Link


class PeerEventKind(IntEnum):
    """The kind of an event. Of events of one worker at the same time, the lower kind comes first."""

    BEGIN = 0  # a worker begins its round with the model of a checkpoint or of another worker
    FINISH = 1  # its gradient is computed
    ARRIVE = 2  # a neighbour's model has arrived
    DIE = 3
    JOIN = 4
    CRASH = 5  # of the leader
    RECOVER = 6


class PeerPhase(IntEnum):
    """The phase of a worker; from BEGINNING on, it holds a model."""

    ABSENT = 0
    JOINING = 1  # waits until another worker begins the round in which it joins
    BEGINNING = 2  # a BEGIN event is due, or its death, before the checkpoint from which the run resumes
    COMPUTING = 3
    WAITING = 4  # for models of neighbours
    DONE = 5


@dataclass(order=True, slots=True)
class PeerEvent:
    """An event of the queue.

    Attributes:
        time: virtual seconds.
        worker: its index; -1 for the leader.
        kind: see PeerEventKind.
        sender: of a model that arrives.
        round: of that model.
        lives: see PeerQueue, of the worker and of the sender when the event was queued.
        model: the model that arrives, or with which the worker begins.
        away_s: seconds until the restart, of DIE and CRASH.
    """

    time: float
    worker: int
    kind: PeerEventKind
    sender: int = -1
    round: int = 0
    lives: tuple[int, int] = field(default=(0, 0), compare=False)
    model: Float32s | None = field(default=None, compare=False)
    away_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class VirtualPeer:
    """The state of a worker. All times are virtual seconds.

    Attributes:
        replica: its model and momentum. The values are replaced in every round and never changed, because messages to
            neighbours refer to them.
        link: its connection.
        phase: see PeerPhase.
        step_start, step_end: of its step.
        inbox: models of neighbours that it has not used yet, by round and neighbour.
        back_at: end of the latest scripted absence.
    """

    replica: ParameterSlice
    link: Link
    phase: PeerPhase = PeerPhase.ABSENT
    step_start: float = 0.0
    step_end: float = 0.0
    inbox: dict[int, dict[int, Float32s]] = field(default_factory=dict)
    back_at: float = 0.0
