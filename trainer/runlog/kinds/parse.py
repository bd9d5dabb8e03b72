"""Every kind of event by its name, and the event of a line of the log."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from types import NoneType
from typing import Any, get_type_hints

from pipeline.core.json_values import fits
from trainer.runlog.kinds.base import HEAD, Kind, LogEvent, OtherEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent, GivenUpEvent, HoldoutEvent
from trainer.runlog.kinds.peers import ConsensusEvent, GossipEvent, LinkEvent, NewcomerEvent, PoolEvent
from trainer.runlog.kinds.run import (
    ConvergedEvent,
    EarlyStopEvent,
    EndEvent,
    GenerationEvent,
    RestartEvent,
    RollbackEvent,
    StageEvent,
    StartEvent,
    WarningEvent,
)
from trainer.runlog.kinds.training import AppendedEvent, EpochEvent, LoadedEvent, PassEvent, TrainEvent

MOST_WORKERS = 1 << 16
WORKER = {"index", "clock", "images", "step_s"}  # the keys of a worker in a train event
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
    if isinstance(event, EvaluationEvent) and not event.has_complete_counts():
        raise ValueError("its counts by class or neighbourhood are incomplete")
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
