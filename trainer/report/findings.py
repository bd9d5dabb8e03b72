"""The summary of a run for its report: how it ended, unusual events, and the headline figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.reporting.page import plain
from trainer.exchange.parameter_server import ParameterServer
from trainer.report.history import Incident, select_kind
from trainer.report.progress import number
from trainer.report.terminal import duration, percent, stop_reason
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.peers import ConsensusEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent, WarningEvent
from trainer.runlog.kinds.training import EpochEvent, TrainEvent

ENOUGH_ROWS = 10  # of a neighbourhood whose accuracy is named
ENDINGS: Mapping[str | None, tuple[str, str]] = {
    "finished": ("better", "Finished"),
    "interrupted": ("worse", "Interrupted; --resume continues it"),
    "failed": ("worse", "Failed"),
    None: ("", "Unfinished: it is still running, or it was killed"),
}


class RunFinding(NamedTuple):
    """A sentence about a run. level: the style sheet's class: better, worse or none."""

    level: str
    text: str


class GroupAccuracy(NamedTuple):
    """A row of the table of classes, or of neighbourhoods: its name or number, evaluation rows, and their accuracy."""

    name: str
    rows: int
    accuracy: float


class MixtureRow(NamedTuple):
    """A row of the table of a mixture: a set while its share does not change.

    Attributes:
        first_step: the first step with this share.
        name: address of the set.
        asked: the share that was asked for.
        rows: rows of the set in accepted gradients.
        share: their share of all rows in accepted gradients; None without any.
    """

    first_step: int
    name: str
    asked: float
    rows: int
    share: float | None


class Figure(NamedTuple):
    """A row of the table of headline figures."""

    name: str
    value: str
    meaning: str


def describe_incident(incident: Incident) -> dict[str, Any]:
    """Return an incident as a row of the table of incidents."""
    event = incident.event
    if isinstance(event, RestartEvent):
        description = f"{event.role} {event.index} restarted"
    elif isinstance(event, RollbackEvent):
        description = f"rolled back from version {event.from_version:,} to {event.to_version:,}"
    else:
        description = "warning"
    cause = event.message if isinstance(event, WarningEvent) else event.cause
    return {"after": duration(incident.seconds), "epoch": incident.epoch, "what": description, "cause": cause or "-"}


def findings(live: Sequence[LogEvent], summary: Mapping[str, Any]) -> list[RunFinding]:
    """Return how the run ended, and everything unusual about it.

    Args:
        live: the events that roll-backs and restarts have not voided.
        summary: the content of result.json.
    """
    level, ending = ENDINGS.get(summary["cause"], ("worse", f"Ended: {summary['cause']}"))
    trains = select_kind(live, TrainEvent)
    # The last summary of a short run can be older than the end of its last epoch.
    ends = [event.epoch for event in select_kind(live, EpochEvent) if event.epoch is not None]
    epochs = [*ends, trains[-1].epoch] if trains else ends
    stands = f" at epoch {max(epochs):.2f}" if epochs else ""
    result = [
        *_result(summary),
        RunFinding(level, f"{ending}{stands} after {duration(summary['seconds'])} of training."),
    ]
    if summary["error"]:
        result.append(RunFinding("worse", f"Cause: {summary['error']}"))
    if summary.get("early_stop"):
        result.append(RunFinding("", f"Stopped early {stop_reason(summary['early_stop'])}."))
    result += _describe_stages(summary)
    diverged_event = next((event for event in trains if _is_lost(event)), None)
    if diverged_event:
        place = f"epoch {diverged_event.epoch:.2f} (version {diverged_event.version:,})"
        text = f"Diverged: the loss is not a finite number from {place}."
        result.append(RunFinding("worse", text))
    # None means that this is unknown.
    if summary["learned"] is False:
        result.append(
            RunFinding(
                "worse", "Nothing was learned: the loss on training images is no lower than the loss of guessing."
            )
        )
    counts = Counter(event.role for event in select_kind(live, RestartEvent))
    if counts:
        names = {"evaluator": "the evaluator"}
        roles = ", ".join(f"{count} of {names.get(role, f'{role}s')}" for role, count in counts.items())
        result.append(RunFinding("worse", f"Restarts: {roles}. The table of incidents lists the causes."))
    rollbacks = select_kind(live, RollbackEvent)
    if rollbacks:
        undone = sum(event.from_version - event.to_version for event in rollbacks)
        result.append(RunFinding("worse", f"Rollbacks: {len(rollbacks)}, which undid {undone:,} updates."))
    result += _describe_passes(summary)
    if summary["evaluations_given_up"]:
        count = summary["evaluations_given_up"]
        text = f"Planned evaluations that are missing: {count}. Their checkpoints waited too long for the evaluator."
        result.append(RunFinding("worse", text))
    if not select_kind(live, EvaluationEvent):
        result.append(RunFinding("", "No checkpoint has been evaluated."))
    return result


def describe_classes(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the classes that the final model recognises least and best; "" if they were not counted.

    summary: the content of result.json."""
    accuracy = {number: share for number, share in enumerate(summary["class_accuracy"] or ()) if share is not None}
    if len(accuracy) < 2:
        return ""
    order = sorted(accuracy, key=lambda number: accuracy[number])
    weakest = summary["weakest_accuracy"]
    # A class without a name is called by its number.
    names = {number: name for number, name in enumerate(summary["class_names"]) if name}
    least = ", ".join(
        f"{names.get(number, number)} ({percent(accuracy[number])})" for number in order[: min(3, len(order) - 1)]
    )
    return (
        "Share of the rows of a class that the final model recognises: least for"
        f" {least}, most for {names.get(order[-1], order[-1])}"
        f" ({percent(accuracy[order[-1]])}). Accuracy on the weakest tenth of the classes: {percent(weakest)}."
    )


def describe_neighbourhoods(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the neighbourhoods that the final model recognises least; "" if they were not counted.

    summary: the content of result.json."""
    shares = enumerate(summary["neighbourhood_accuracy"] or ())
    accuracy = {number: share for number, share in shares if share is not None}
    if len(accuracy) < 2:
        return ""
    counts = summary["neighbourhood_rows"]
    # The accuracy of a few rows says little.
    candidates = [number for number in accuracy if counts[number] >= ENOUGH_ROWS] or list(accuracy)
    lowest = min(candidates, key=lambda number: accuracy[number])
    rows = counts[lowest]
    return (
        "Accuracy on the weakest tenth of the neighbourhoods:"
        f" {percent(summary['weakest_neighbourhoods_accuracy'])}, lowest in neighbourhood {lowest}"
        f" ({percent(accuracy[lowest])} of {rows:,} {'row' if rows == 1 else 'rows'})."
    )


def mixture_rows(summary: Mapping[str, Any]) -> list[MixtureRow]:
    """Return the rows of the table of a mixture; none for a run of one set. summary: the content of result.json."""
    return [
        MixtureRow(part["first_step"], each["shards"], each["asked"], each["rows"], each["share"])
        for part in summary["mixture"] or ()
        for each in part["sets"]
    ]


def weakest_groups(summary: Mapping[str, Any], kind: str, names: Sequence[str] = ()) -> list[GroupAccuracy]:
    """Return the classes or neighbourhoods with evaluation rows in order of rising accuracy.

    Args:
        summary: the content of result.json.
        kind: ``class`` or ``neighbourhood``.
        names: by number; one without a name is called by its number.
    """
    called = dict(enumerate(names))
    counted = zip(summary[f"{kind}_rows"] or (), summary[f"{kind}_accuracy"] or (), strict=False)
    groups = [
        GroupAccuracy(called.get(number) or str(number), rows, share)
        for number, (rows, share) in enumerate(counted)
        if share is not None
    ]
    return sorted(groups, key=lambda group: group.accuracy)


def describe_consensus(live: Sequence[LogEvent]) -> str:
    """Return a sentence on how far the workers' own models are apart; "" if they have none.

    live: the events that roll-backs and restarts have not voided."""
    events = select_kind(live, ConsensusEvent)
    if not events:
        return ""
    last = events[-1]
    return (
        "Every worker has a model of its own, and evaluations are of the mean of all models. After epoch"
        f" {last.epoch:.4g} the {last.replicas:,} models are {number(last.distance, '.4g')} from their mean (root of the"
        f" mean squared distance). All workers together have sent {last.sent_bytes / 1e6:,.4g} MB."
    )


def _describe_stages(summary: Mapping[str, Any]) -> list[RunFinding]:
    """Return a sentence on each stage of a run with a switch. summary: the content of result.json."""
    stages = summary["stages"]
    return [
        RunFinding(
            "",
            f"Stage {number}, from epoch {stage['first_epoch']:.4g} on: {stage['protocol']} by {stage['exchange']}"
            f" ({stage['reason']}).",
        )
        for number, stage in enumerate(stages, 1)
        if len(stages) > 1
    ]


def _result(summary: Mapping[str, Any]) -> list[RunFinding]:
    """Return a sentence on the last and the best evaluation of a run; empty before the first evaluation.

    It is about accuracies or, for real targets, about losses. summary: the content of result.json."""
    epoch = summary["best_epoch"]
    if epoch is None:
        return []
    if summary["final_accuracy"] is None:
        # Real targets have no accuracy.
        losses = f"{plain(summary['final_loss'])}; the lowest is {plain(summary['best_loss'])}, after epoch {epoch:.4g}"
        return [RunFinding("", f"Evaluation loss at the last evaluation: {losses}.")]
    best = "which is the best of the run"
    if summary["best_accuracy"] != summary["final_accuracy"]:
        best = f"the best is {percent(summary['best_accuracy'])}, after epoch {epoch:.4g}"
    train = summary["train_accuracy"]
    beside = "" if train is None else f" On training images it is {percent(train)}."
    text = (
        f"Accuracy on evaluation images at the last evaluation: {percent(summary['final_accuracy'])}, {best}.{beside}"
    )
    return [RunFinding("", text)]


def _is_lost(train: TrainEvent) -> bool:
    """True if the loss is not a finite number although gradients were accepted."""
    if train.loss is None:  # JSON has no NaN; only accepted gradients have a staleness
        return train.staleness_mean is not None
    return not np.isfinite(train.loss)


def _describe_passes(summary: Mapping[str, Any]) -> list[RunFinding]:
    """Return the result of the data check: did every pass that all workers completed train every row once?

    Empty without a completed pass, or if the set has no fingerprint to compare with."""
    passes = summary["passes"]
    rejected = summary["rejected"]
    whole = passes["whole"]
    missed = passes["whole"] - passes["true"]
    if not whole or passes["expected"] is None:
        return []
    if not missed:
        each = "the pass" if whole == 1 else f"each of the {whole} passes"
        text = f"Data check: in {each} that all workers completed, every row was trained exactly once."
        return [RunFinding("better", text)]
    why = "a worker that joined late skipped mini-batches, or a change of workers left out the rest of old passes"
    if rejected:
        why = f"{rejected:,} gradients were rejected"
    text = (
        f"Data check: in {missed} of {whole} passes that all workers completed, not every row was trained once: {why}."
    )
    # A protocol rejects gradients on purpose; rows that are missing for another reason are a loss of training data.
    return [RunFinding("worse" if not rejected else "", text)]


def headline(summary: Mapping[str, Any]) -> list[Figure]:
    """Return the rows of the table of headline figures. summary: the content of result.json."""
    staleness = summary["staleness"]
    epoch = summary["best_epoch"]
    restarts = summary["restarts"]
    best = "no evaluation yet" if epoch is None else f"of all evaluations; after epoch {epoch:.4g}"
    return [
        Figure("final accuracy", percent(summary["final_accuracy"]), "evaluation images, last evaluation"),
        Figure("final loss", plain(summary["final_loss"]), "evaluation images, last evaluation"),
        Figure("best accuracy", percent(summary["best_accuracy"]), best),
        # Not the lowest loss of the run: both best figures describe the same model, best.safetensors.
        Figure("best loss", plain(summary["best_loss"]), "of the same evaluation"),
        Figure("training accuracy", percent(summary["train_accuracy"]), "a sample of training images, last evaluation"),
        Figure("training loss", plain(summary["train_loss"]), "a sample of training images, last evaluation"),
        Figure(
            "running accuracy",
            percent(summary["running_train_accuracy"]),
            "mean over the mini-batches of the last whole epoch",
        ),
        Figure(
            "running loss", plain(summary["running_train_loss"]), "mean over the mini-batches of the last whole epoch"
        ),
        Figure("images/s", plain(summary["images_per_second"]), "training images of accepted gradients"),
        Figure("duration", duration(summary["seconds"]), "of training, without updates that a rollback undid"),
        Figure("updates", plain(summary["updates"]), f"from {plain(summary['examples'])} training images"),
        Figure(
            "staleness, mean",
            plain(staleness["mean"]),
            "updates by other workers between a worker's pull and its own update",
        ),
        Figure("staleness, most", plain(staleness["max"]), "of the most stale gradient"),
        Figure("rejected gradients", plain(summary["rejected"]), "computed but not applied"),
        Figure("restarts", plain(sum(restarts.values())), ", ".join(f"{n} {role}" for role, n in restarts.items())),
        Figure("rollbacks", plain(summary["rollbacks"]), "of all servers to a checkpoint"),
    ]


def title(summary: Mapping[str, Any], num_workers: int) -> str:
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    # The protocol says nothing where workers exchange among themselves.
    names = [
        stage["protocol" if stage["exchange"] == ParameterServer.name else "exchange"] for stage in summary["stages"]
    ]
    return f"{summary['model']} by {', then '.join(str(name).upper() for name in names or [summary['protocol']])}, {workers}"
