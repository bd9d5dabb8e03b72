"""The result of a run: its log without void events and pushes, summarised for result.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.json_values import build, parse, parse_object
from trainer.checkpoints.slice_file import json_header
from trainer.checkpoints.state import RunState
from trainer.config import SEPARATOR
from trainer.exchange.parameter_server import ParameterServer
from trainer.home.place import Place
from trainer.run_files import BEST, BEST_OF, METRICS, MODEL, PUSHES, RESULT
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent, GivenUpEvent
from trainer.runlog.kinds.run import (
    ConvergedEvent,
    EarlyStopEvent,
    EndEvent,
    RestartEvent,
    RollbackEvent,
    StageEvent,
    StartEvent,
)
from trainer.runlog.kinds.training import EpochEvent, PassEvent
from trainer.runlog.read import best, evaluations_of, read_events, read_pushes, surviving_events
from trainer.sampling.mixture import cohort_plans, is_mix, parse_mix, rows_by_source
from trainer.stages import START

if TYPE_CHECKING:
    import pandas as pd

E = TypeVar("E", bound=LogEvent)
ROLES = ("worker", "server", "evaluator")
# The columns of pushes that ``summarise`` needs.
SUMMARISED = ("version", "worker", "clock", "staleness", "examples", "accepted")
REPORTED = (*SUMMARISED, "seconds", "loss")  # the columns that the report needs


@dataclass(frozen=True)
class Result:
    """The result of a run, as in result.json. None for values that were not measured or are not finite."""

    output: Place  # the run's folder
    protocol: str
    model: str
    seed: int
    num_workers: int
    num_servers: int
    converged: bool  # whether the tolerance ended the run before its budget was spent
    cause: str | None  # finished, interrupted or failed; None while it runs
    updates: int
    examples: int  # in accepted gradients
    seconds: float | None  # training time over all starts
    images_per_second: float | None
    final_accuracy: float | None  # evaluation rows, last evaluation
    final_loss: float | None
    best_accuracy: float | None  # evaluation rows, best evaluation
    best_loss: float | None
    best_epoch: float | None
    train_accuracy: float | None  # a sample of training rows, last evaluation
    train_loss: float | None
    learned: bool | None  # whether the last evaluation's loss on training rows is below the loss of guessing
    running_train_accuracy: float | None  # mean over the last complete epoch, of its training steps
    running_train_loss: float | None
    staleness: dict[str, Any]  # mean, max, and histogram, of accepted gradients
    rejected: int  # gradients
    passes: dict[str, Any]  # complete passes of all workers, passes with the expected fingerprint, last fingerprint
    restarts: dict[str, int]  # by role
    rollbacks: int
    class_accuracy: list[float | None] | None = None  # by class, of the final model; None for a class without rows
    class_rows: list[int] | None = None  # evaluation rows by class
    class_names: list[str] = field(default_factory=list)  # by class; empty if the shard set names none
    weakest_accuracy: float | None = None  # of the evaluation rows in the weakest tenth of the classes, at least one
    neighbourhood_accuracy: list[float | None] | None = None  # by neighbourhood, as class_accuracy
    neighbourhood_rows: list[int] | None = None  # evaluation rows by neighbourhood
    weakest_neighbourhoods_accuracy: float | None = None  # as weakest_accuracy, of the neighbourhoods
    confusion: list[list[int]] | None = None  # evaluation rows by class and predicted class, up to 100 classes
    evaluations_given_up: int = 0  # checkpoints that were deleted for space before they were evaluated
    stages: list[dict[str, Any]] = field(default_factory=list)  # exchange, protocol, first_epoch from 0, reason
    early_stop: dict[str, Any] | None = None  # why the run ended early: epoch, patience, best_epoch, ...; else None
    mixture: list[dict[str, Any]] | None = None  # with --mix, per shares in force: first_step, sets; else None
    simulated: dict[str, Any] | None = None  # settings of the virtual cluster, for virtual-time runs
    error: str | None = None  # error message of a failed run

    def events(self) -> list[LogEvent]:
        """Return the events that no roll-back or restart has made void, in order."""
        return surviving_events(read_events(self.output / METRICS))

    def pushes(self) -> pd.DataFrame:
        """Return the pushed gradients that no roll-back or restart has made void, one per row."""
        return read_pushes(self.output / PUSHES)

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the final model's arrays by their names in its state_dict, in the order of its layers."""
        from safetensors.numpy import load

        arrays = load((self.output / MODEL).read_bytes())  # unordered, unlike the offsets in the header
        header, _ = json_header(self.output / MODEL)
        names = header.keys() - {"__metadata__"}
        return {name: arrays[name] for name in sorted(names, key=lambda name: list(header[name]["data_offsets"]))}


def read_result(output: Place) -> Result:
    """Read the result of an ended run. Raises OSError if there is none, DataError if it is damaged."""
    try:
        return build(Result, parse_object((output / RESULT).read_bytes()) | {"output": output})
    except ValueError as error:
        raise DataError(f"{output / RESULT} is damaged ({error}); train with --resume to write it again") from None


def best_of(state: RunState, model: bytes) -> bytes:
    """Return the content of best.json, which names the checkpoint of best.safetensors and is written after it.

    model: the content of best.safetensors. Its digest reveals a kill between the two writes."""
    about = {"version": state.version, "generation": state.generation, "epoch": state.epoch}
    return (json.dumps(about | {"digest": _digest(model)}) + "\n").encode()


def _digest(model: bytes) -> str:
    """Return 32 hex digits of a file's SHA-256, enough to distinguish models. 64 would look like a run's token."""
    return sha256(model).hexdigest()[:32]


def is_best_of(output: Place, evaluation: EvaluationEvent) -> bool:
    """Return whether best.safetensors is the model of an evaluation.

    Reads the whole model only if best.json names the version and generation of the evaluation."""
    try:
        about = parse_object((output / BEST_OF).read_bytes())
    except FileNotFoundError:
        about = _older_about(output / BEST)
    except ValueError:
        return False
    # First the comparison that need not read the model.
    if (about.get("version"), about.get("generation")) != (evaluation.version, evaluation.generation):
        return False
    try:
        digest = about.get("digest")
        return digest is None or digest == _digest((output / BEST).read_bytes())
    except FileNotFoundError:
        return False


def _older_about(path: Place) -> dict[str, Any]:
    """Return the checkpoint of best.safetensors as earlier versions recorded it, in the file itself.

    Empty if there is no file or no such record."""
    try:
        about = parse(json_header(path)[0]["__metadata__"]["trained"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def summarise(events: Sequence[LogEvent], pushes: pd.DataFrame) -> dict[str, Any]:
    """Return the content of result.json: plain JSON, null for values that were not measured or are not finite.

    final_*: the last evaluation. best_*: the best one by checkpoints.state.rank. train_*: training rows in the last
    evaluation. running_train_*: means over the training steps of the last complete epoch. staleness: of accepted
    pushes. images_per_second: over all training time. cause: null until the run has ended."""
    live = surviving_events(events)
    last = next((event for event in reversed(live) if isinstance(event, StartEvent | EndEvent)), None)
    last_event = last if isinstance(last, EndEvent) else EndEvent()
    is_accepted = pushes["accepted"].to_numpy() == 1
    # The version of the last accepted push is the number of updates.
    updates = pushes["version"].to_numpy().max(initial=0, where=is_accepted)
    examples = int(pushes["examples"].to_numpy().sum(where=is_accepted))
    timed = (getattr(event, "seconds", None) for event in live)
    seconds = max((value for value in timed if value is not None), default=None)
    return {
        **_run(live, pushes),
        "converged": _has_converged(live, int(updates)),
        "cause": last_event.cause,
        "updates": int(updates),
        "examples": examples,
        "seconds": _finite(seconds),
        "images_per_second": _finite(examples / seconds) if seconds else None,
        **_accuracy(live),
        "staleness": _staleness(pushes["staleness"].to_numpy()[is_accepted]),
        "rejected": len(pushes) - int(is_accepted.sum()),
        "passes": _passes([event for event in live if isinstance(event, PassEvent)]),
        "restarts": _restarts(events),
        "rollbacks": sum(isinstance(event, RollbackEvent) for event in events),
        "evaluations_given_up": sum(isinstance(event, GivenUpEvent) for event in live),
        "stages": stages(live),
        "early_stop": _early_stop(live),
        "mixture": _mixture(live, pushes, is_accepted),
        "simulated": _last(live, StartEvent()).simulated,
        "error": last_event.error,
    }


def _run(live: Sequence[LogEvent], pushes: pd.DataFrame) -> dict[str, Any]:
    """Return the keys of result.json that identify the run: protocol, model, seed, and numbers of workers and servers.

    The values come from the last ``start`` event; without one they are None, and the workers of the pushes are counted.

    live: the events that count."""
    start = _last(live, StartEvent())
    config = start.config
    plan = start.plan or {}
    return {
        "protocol": config.get("protocol", {}).get("name"),
        "model": config.get("model", {}).get("name"),
        "seed": config.get("run", {}).get("seed"),
        "num_workers": plan.get("num_workers", int(pushes["worker"].nunique())),
        "num_servers": config.get("processes", {}).get("servers"),
    }


def _has_converged(live: Sequence[LogEvent], updates: int) -> bool:
    """Return whether the tolerance has ended a run, which no later start has trained on.

    live: the events that count; updates: of the whole run."""
    # Logs of earlier versions do not name the version.
    converged = [event for event in live if isinstance(event, ConvergedEvent)]
    return any(event.version is None or event.version >= updates for event in converged)


def stages(live: Sequence[LogEvent]) -> list[dict[str, Any]]:
    """Return the stages of a run: exchange, protocol, first_epoch and reason of each.

    first_epoch counts from 0; it has a fraction if the stage begins within an epoch. A run without a switch is one
    stage, which has no event.

    live: the events that count."""
    # A start at the switch logs it once more.
    by_number = {event.stage: event for event in live if isinstance(event, StageEvent)}
    if by_number:
        return [_stage(each.exchange, each.protocol, each.epoch, each.reason) for each in by_number.values()]
    config = _last(live, StartEvent()).config
    names = {part: config.get(part, {}).get("name") for part in ("exchange", "protocol")}
    # Logs from before there were other exchanges do not name theirs.
    return [_stage(names["exchange"] or ParameterServer.name, names["protocol"], 0, START)] if config else []


def _early_stop(live: Sequence[LogEvent]) -> dict[str, Any] | None:
    """Return how the evaluations have ended a run early; None if they have not. live: the events that count."""
    # A later start has trained on, or logged the end again.
    event = next((event for event in reversed(live) if isinstance(event, EarlyStopEvent | StartEvent)), None)
    if not isinstance(event, EarlyStopEvent):
        return None
    keys = ("epoch", "patience", "min_delta", "best_epoch", "best_loss")
    return {key: getattr(event, key) for key in keys}


def _mixture(
    live: Sequence[LogEvent], pushes: pd.DataFrame, is_accepted: npt.NDArray[np.bool_]
) -> list[dict[str, Any]] | None:
    """Return the rows in accepted gradients from each set of a mixture; None for a run of one set.

    An entry per shares in force: first_step, and for each set its address, the share that was asked for, and the rows and
    their share. The rows of a worker are a function of seed, worker and clock, so that they are counted without its draws.

    Args:
        live: the events that count.
        pushes: the pushes that count.
        is_accepted: whether each gradient was accepted.
    """
    start = _last(live, StartEvent())
    data = start.config.get("data", {})
    mix = data.get("mix")
    cohorts = _cohort_batches(live)
    # A log of another version, or a damaged one, may lack them.
    if not mix or not is_mix(mix) or not cohorts:
        return None
    spans = parse_mix(mix)
    counts = np.zeros((len(spans), len(spans[0].shares)), np.int64)
    columns = [pushes[name].to_numpy()[is_accepted].astype(np.int64) for name in ("worker", "clock", "examples")]
    # Sorted once, because a search for the pushes of each worker would read all of them for each.
    order = np.argsort(columns[0], kind="stable")
    columns = [column[order] for column in columns]
    cohort_of_push = np.searchsorted([clock for clock, _ in cohorts], columns[1], side="right") - 1
    for number, (first, batches) in enumerate(cohorts):
        workers, clocks, examples = (column[cohort_of_push == number] for column in columns)
        bounds = np.searchsorted(workers, np.arange(len(batches) + 1)).tolist()
        for worker, (batch_size, begin, end) in enumerate(zip(batches, bounds, bounds[1:], strict=False)):
            plans = cohort_plans(spans, batch_size, start.config["run"]["seed"], worker, clock=first, number=number)
            own = rows_by_source(plans, batch_size, clocks[begin:end] - first, examples[begin:end])
            counts[-len(plans) :] += own
    addresses = data["shards"].split(SEPARATOR)
    return [
        {"first_step": span.clock, "sets": _shares(addresses, span.shares, rows)}
        for span, rows in zip(spans, counts.tolist(), strict=True)
    ]


def _cohort_batches(live: Sequence[LogEvent]) -> list[tuple[int, list[int]]]:
    """Return the first clock of each cohort of a run, and the rows per mini-batch of its workers; empty if some are missing.

    live: the events that count."""
    starts = [event for event in live if isinstance(event, StartEvent)]
    entries = [event.config.get("cohorts", {}).get("entries", []) for event in starts]
    plans = [event.plan or {} for event in starts]
    # The last start with a number of cohorts has trained the last of them.
    batches = {max(1, len(each)): plan.get("worker_batches", []) for each, plan in zip(entries, plans, strict=True)}
    clocks = [entry["clock"] for entry in entries[-1]] or [0] if entries else []
    result = [(clock, batches.get(number, [])) for number, clock in enumerate(clocks, 1)]
    return result if all(own for _, own in result) else []


def _shares(addresses: Sequence[str], shares: Sequence[int], rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return an entry of ``sets`` for each set of a mixture. shares, rows: by set."""
    total = sum(rows)
    return [
        {"shards": address, "asked": share / sum(shares), "rows": count, "share": count / total if total else None}
        for address, share, count in zip(addresses, shares, rows, strict=True)
    ]


def _stage(exchange: str, protocol: str | None, epoch: float, reason: str) -> dict[str, Any]:
    """Return an entry of ``stages``. epoch: with which the stage begins; an int if it is whole."""
    first = int(epoch) if epoch == int(epoch) else epoch
    return {"exchange": exchange, "protocol": protocol, "first_epoch": first, "reason": reason}


def _accuracy(live: Sequence[LogEvent]) -> dict[str, Any]:
    """Return the keys of result.json with losses and accuracies, from evaluations and the last complete epoch.

    None for values that were not measured or are not finite. live: the events that count."""
    evaluated = evaluations_of(live)
    nothing = EvaluationEvent(version=0)
    last = evaluated[-1] if evaluated else nothing
    top = best(evaluated) or nothing
    epoch = _last(live, EpochEvent())
    # A diverged run has NaN and infinite values, which JSON does not allow.
    return {
        "final_accuracy": _finite(last.accuracy),
        "final_loss": _finite(last.loss),
        "class_accuracy": _group_accuracy(last.class_correct, last.class_rows),
        "class_rows": last.class_rows,
        "class_names": last.class_names or [],
        "weakest_accuracy": _weakest_accuracy(last.class_correct, last.class_rows),
        "neighbourhood_accuracy": _group_accuracy(last.neighbourhood_correct, last.neighbourhood_rows),
        "neighbourhood_rows": last.neighbourhood_rows,
        "weakest_neighbourhoods_accuracy": _weakest_accuracy(last.neighbourhood_correct, last.neighbourhood_rows),
        "confusion": last.confusion,
        "best_accuracy": _finite(top.accuracy),
        "best_loss": _finite(top.loss),
        "best_epoch": _finite(top.epoch),
        "train_accuracy": _finite(last.train_accuracy),
        "train_loss": _finite(last.train_loss),
        "learned": last.learned,
        "running_train_accuracy": _finite(epoch.accuracy),
        "running_train_loss": _finite(epoch.loss),
    }


def _group_accuracy(correct: list[int] | None, rows: list[int] | None) -> list[float | None] | None:
    """Return the share of correct predictions by group, None for a group without rows; None if it was not counted."""
    if rows is None or correct is None:
        return None
    return [right / count if count else None for right, count in zip(correct, rows, strict=True)]


def _weakest_accuracy(correct: list[int] | None, rows: list[int] | None) -> float | None:
    """Return the accuracy over all rows of the weakest tenth of the groups with rows, rounded up; None if unknown."""
    counts = zip(correct or (), rows or (), strict=True)
    groups = sorted(((right, count) for right, count in counts if count), key=lambda each: each[0] / each[1])
    weakest = groups[: -(-len(groups) // 10)]
    return sum(right for right, _ in weakest) / sum(count for _, count in weakest) if weakest else None


def _staleness(staleness: npt.NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Return mean, max and histogram of a staleness per push [pushes].

    The histogram has the number of pushes by staleness, ascending; its keys are strings, as JSON requires."""
    values, counts = np.unique(staleness, return_counts=True)
    return {
        "mean": int(staleness.sum()) / len(staleness) if len(staleness) else None,
        "max": int(values[-1]) if len(values) else None,
        "histogram": {str(value): int(count) for value, count in zip(values, counts, strict=True)},
    }


def _passes(whole: list[PassEvent]) -> dict[str, Any]:
    """Return the value of ``passes`` in result.json.

    Keys:
        whole: number of passes that all workers have completed.
        true: number of these passes in which every row was trained exactly once, as the fingerprint shows.
        fingerprint, expected: of the last event, see PassEvent; None without an event.
    """
    last = whole[-1] if whole else None
    return {
        "whole": last.last if last else 0,
        "true": sum(event.last - event.first + 1 for event in whole if event.fingerprint == event.expected),
        "fingerprint": last.fingerprint if last else None,
        "expected": last.expected if last else None,
    }


def _restarts(events: Iterable[LogEvent]) -> dict[str, int]:
    counts = Counter(event.role for event in events if isinstance(event, RestartEvent))
    return {role: counts[role] for role in ROLES}


def _last(events: Sequence[LogEvent], default: E) -> E:
    """Return the last event of the kind of ``default``, which is returned if there is none."""
    return next((event for event in reversed(events) if isinstance(event, type(default))), default)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
