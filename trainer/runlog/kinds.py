"""The kinds of events in metrics.jsonl. ``event_from_json`` reads one, ``trainer.runlog.events.log_event`` writes one.

Keys that this version does not know are ignored, and so are values that no reader uses: see the rule in
pipeline.core.json_values. The order of the keys in the file is the writer's."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType
from typing import Any, get_type_hints

from pipeline.core.json_values import fits

MOST_WORKERS = 1 << 16
WORKER = {"index", "clock", "images", "step_s"}  # the keys of a worker in a train event
HEAD = ("event", "time", "version", "generation")  # the keys that any event may have


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """An event of a run.

    Attributes:
        kind: its name in the file, under the key ``event``.
        time: when it was logged (seconds since 1970); virtual seconds in virtual time.
        version: the version of the parameters that it is about; None if it is about none.
        generation: the generation that it belongs to; None if it does not say so.
    """

    kind: str = field(default="", init=False)
    time: float | None = None
    version: int | None = None
    generation: int | None = None

    def version_or_zero(self) -> int:
        return self.version or 0

    def resumes_from(self) -> int | None:
        """Return the version from which the run continues, if this event makes later versions void; None otherwise."""
        return None


@dataclass(frozen=True, kw_only=True)
class StartEvent(LogEvent):
    """A start of the run.

    Attributes:
        config: the configuration in JSON.
        plan: the trainer.plan.RunPlan in JSON; None in older logs.
        versions: versions of libraries.
        made: time, command and host of the start.
        resumed_from: version of the checkpoint from which it continues, None for a new run.
        simulated: settings of the virtual cluster, for virtual-time runs.
    """

    kind: str = field(default="start", init=False)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    made: dict[str, str] = field(default_factory=dict)
    resumed_from: int | None = None
    simulated: dict[str, Any] | None = None

    def resumes_from(self) -> int | None:
        return self.resumed_from or 0


@dataclass(frozen=True, kw_only=True)
class GenerationEvent(LogEvent):
    """The servers have loaded the checkpoint of a version, which begins a generation.

    models: workers whose models the checkpoint has, in an exchange among neighbours; None in others, and older logs."""

    kind: str = field(default="generation", init=False)
    version: int = field()
    generation: int = field()
    models: list[int] | None = None

    def resumes_from(self) -> int | None:
        return self.version


@dataclass(frozen=True, kw_only=True)
class LoadedEvent(LogEvent):
    """A worker has read its rows.

    Attributes:
        worker: its number.
        rows, bytes: number of the rows, and the size of their images.
        load_s: seconds.
        mapped: whether the images are in memory-mapped files instead of its memory.
    """

    kind: str = field(default="loaded", init=False)
    worker: int = 0
    rows: int | None = None
    bytes: int = 0
    load_s: float = 0.0
    mapped: bool = False


@dataclass(frozen=True, kw_only=True)
class AppendedEvent(LogEvent):
    """A worker has adopted rows that were appended to a growing set.

    Attributes:
        worker: its number.
        turn, position: number of the first pass that includes them, and the first example of that pass.
        rows: rows of the worker from now on.
        set_generation: generation of the shard set.
        load_s: seconds.
    """

    kind: str = field(default="appended", init=False)
    worker: int = 0
    turn: int = 0
    position: int = 0
    rows: int | None = None
    set_generation: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainEvent(LogEvent):
    """A summary of about one second: means over the gradients that were accepted since the last one.

    Attributes:
        loss, accuracy: per example; None if none was accepted, and without an accuracy.
        seconds: training time so far.
        version: updates so far.
        accepted: accepted gradients so far.
        epoch: global epochs so far.
        learning_rate: the single-process rate.
        images_per_s: examples of accepted gradients per second.
        staleness_mean, staleness_max: in versions; None if none was accepted.
        workers: an object for each worker that has pushed: index, clock, images, and step_s (mean seconds per step).
    """

    kind: str = field(default="train", init=False)
    version: int = field()
    loss: float | None
    accuracy: float | None
    seconds: float
    accepted: int = 0
    epoch: float
    learning_rate: float | None
    images_per_s: float | None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    workers: list[Any]


@dataclass(frozen=True, kw_only=True)
class EpochEvent(LogEvent):
    """The end of a global epoch. seconds: training time; loss, accuracy: means over the accepted examples."""

    kind: str = field(default="epoch", init=False)
    epoch: float | None = None
    seconds: float | None = None
    loss: float | None = None
    accuracy: float | None = None


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


@dataclass(frozen=True, kw_only=True)
class PassEvent(LogEvent):
    """All workers have ended passes over their rows.

    Attributes:
        first, last: numbers of the passes, from 1.
        seconds: training time.
        fingerprint: of the rows that were trained in these passes, hexadecimal.
        expected: the same by the shard set; None if that is unknown.
    """

    kind: str = field(default="pass", init=False)
    first: int
    last: int
    seconds: float | None = None
    fingerprint: str
    expected: str | None


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(LogEvent):
    """The evaluation of a checkpoint.

    Attributes:
        version, generation: the checkpoint. Older logs lack the generation.
        epoch, seconds: global epochs and training time of the checkpoint.
        loss, accuracy: on the evaluation rows.
        l2: the L2 term in the losses; 0 in older logs, None if it is not finite.
        rows: number of these rows.
        train_loss, train_accuracy: on a sample of training rows.
        learned: whether train_loss is below the loss of guessing; None if that is unknown.
        final: whether the checkpoint is the last one of the run.
        class_rows, class_correct: [K], evaluation rows and correct predictions by class; only of a final checkpoint.
        neighbourhood_rows, neighbourhood_correct: the same by neighbourhood; None if the set keeps no model of them.
        class_names: [K], of the classes; None if the shard set names none, or for another checkpoint.
        confusion: [K][K], evaluation rows by class and predicted class; also only for up to 100 classes.
    """

    kind: str = field(default="eval", init=False)
    version: int = field()
    epoch: float | None = None
    seconds: float | None = None
    loss: float | None = None
    l2: float | None = 0.0
    accuracy: float | None = None
    rows: int | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None
    learned: bool | None = None
    final: bool | None = None
    class_rows: list[int] | None = None
    class_correct: list[int] | None = None
    neighbourhood_rows: list[int] | None = None
    neighbourhood_correct: list[int] | None = None
    class_names: list[str] | None = None
    confusion: list[list[int]] | None = None

    def loss_alone(self) -> float:
        """Return the loss on the evaluation rows without the L2 term; NaN if it is no number."""
        return math.nan if self.loss is None or self.l2 is None else self.loss - self.l2


@dataclass(frozen=True, kw_only=True)
class HoldoutEvent(LogEvent):
    """The loss of a checkpoint on training rows that are held out, by which a rule decides about a switch.

    Attributes:
        version, generation: the checkpoint.
        epoch, seconds: number of the epoch that it ends; its training time.
        loss: on the held-out rows, without the L2 term.
        rows: number of these rows.
    """

    kind: str = field(default="holdout", init=False)
    version: int = field()
    epoch: float
    seconds: float | None = None
    loss: float | None
    rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class GivenUpEvent(LogEvent):
    """The checkpoint of a version was deleted for space before it was evaluated."""

    kind: str = field(default="given_up", init=False)


@dataclass(frozen=True, kw_only=True)
class RestartEvent(LogEvent):
    """A process was started again. role: worker, server, evaluator or fork server; index: its number; cause: in words."""

    kind: str = field(default="restart", init=False)
    role: str
    index: int
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class RollbackEvent(LogEvent):
    """All servers have returned to a checkpoint. from_version, to_version: the versions; cause: in words."""

    kind: str = field(default="rollback", init=False)
    from_version: int
    to_version: int
    cause: str | None = None

    def resumes_from(self) -> int | None:
        return self.to_version


@dataclass(frozen=True, kw_only=True)
class StageEvent(LogEvent):
    """A stage of a run with a switch begins.

    Attributes:
        stage: its number, from 0.
        exchange, protocol: names.
        version, epoch, seconds: updates, global epochs and training time of the checkpoint with which it begins.
        learning_rate, momentum: the single-process rate at the start of the schedule; the coefficient.
        reason: why it begins, in words.
    """

    kind: str = field(default="stage", init=False)
    version: int = field()
    stage: int
    exchange: str
    protocol: str
    epoch: float
    seconds: float
    learning_rate: float | None = None
    momentum: float | None = None
    reason: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(LogEvent):
    """A line that the terminal shows too."""

    kind: str = field(default="warning", init=False)
    message: str


@dataclass(frozen=True, kw_only=True)
class ConvergedEvent(LogEvent):
    """The tolerance has ended the run. accepted: accepted gradients so far; seconds: training time."""

    kind: str = field(default="converged", init=False)
    accepted: int = 0
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EarlyStopEvent(LogEvent):
    """The evaluations have ended the run before its budget was spent.

    Attributes:
        version, epoch, seconds: of the last checkpoint.
        patience, min_delta: the options.
        best_epoch: the epoch of the last improvement; None if no loss was finite.
        best_loss: the loss on the evaluation rows after that epoch, without the L2 term.
    """

    kind: str = field(default="early_stop", init=False)
    version: int = field()
    epoch: int
    seconds: float | None = None
    patience: int
    min_delta: float = 0.0
    best_epoch: int | None = None
    best_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class EndEvent(LogEvent):
    """A start of the run has ended.

    Attributes:
        cause: finished, interrupted or failed.
        seconds: training time.
        updates: the version; older logs have it under this name alone.
        error: the error message of a failed run.
    """

    kind: str = field(default="end", init=False)
    cause: str | None = None
    seconds: float | None = None
    updates: int | None = None
    error: str | None = None

    def version_or_zero(self) -> int:
        return self.version if self.version is not None else self.updates or 0


@dataclass(frozen=True, kw_only=True)
class OtherEvent(LogEvent):
    """An event of a kind that this version does not know. values: its other values, as in the file."""

    kind: str = field()
    values: dict[str, Any] = field(default_factory=dict)


Kind = type[LogEvent]
_TYPED: tuple[Kind, ...] = (
    StartEvent,
    GenerationEvent,
    LoadedEvent,
    AppendedEvent,
    TrainEvent,
    EpochEvent,
    ConsensusEvent,
    NewcomerEvent,
    LinkEvent,
    GossipEvent,
    PoolEvent,
    PassEvent,
    EvaluationEvent,
    HoldoutEvent,
    GivenUpEvent,
    RestartEvent,
    RollbackEvent,
    StageEvent,
    WarningEvent,
    ConvergedEvent,
    EarlyStopEvent,
    EndEvent,
)
KINDS: dict[str, Kind] = {str(kind.kind): kind for kind in _TYPED}


@cache
def _schema(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return (key, type, whether it is required) of each key of a kind."""
    hints = get_type_hints(kind)
    return tuple(
        (item.name, hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
        if item.init
    )


def event_from_json(values: object) -> LogEvent:
    """Return the event of a line's JSON value.

    Raises ValueError with the first key that is missing or of another type."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        raise ValueError("it names no event")
    kind = KINDS.get(values["event"])
    if kind is None:
        rest = {key: value for key, value in values.items() if key not in HEAD}
        return OtherEvent(kind=values["event"], values=rest, **_checked(LogEvent, values))
    event = kind(**_checked(kind, values))
    # A hostile number of workers would make a report allocate memory for each.
    if isinstance(event, StartEvent) and not _is_count((event.plan or {}).get("num_workers", 0)):
        raise ValueError("'plan' has an impossible number of workers")
    if isinstance(event, TrainEvent) and not all(map(_is_worker, event.workers)):
        raise ValueError("'workers' has an entry that is none")
    return event


def _checked(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a kind's keys. Raises ValueError if one is missing or of another type."""
    arguments = {}
    for key, hint, required in _schema(kind):
        if key in values:
            if not fits(values[key], hint):
                raise ValueError(f"{key!r} is {str(values[key])[:80]!r}")
            arguments[key] = values[key]
        elif required:
            raise ValueError(f"it lacks {key!r}")
    return arguments


def _is_worker(values: object) -> bool:
    """Return whether an entry of a train event's workers is valid. Hand-written for speed: a day's log has millions."""
    return (
        type(values) is dict
        and values.keys() >= WORKER
        and all(type(value) in (int, float, NoneType) for value in values.values())
        and _is_count(values["index"])
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_WORKERS
