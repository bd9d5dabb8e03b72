"""The summary of a run for its report: how it ended, unusual events, and the headline figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.reporting.page import plain
from trainer.report.history import Incident, of_kind
from trainer.report.terminal import duration, percent
from trainer.runlog.read import Event

ENDINGS: Mapping[str | None, tuple[str, str]] = {
    "finished": ("better", "Finished"),
    "interrupted": ("worse", "Interrupted; go on with --resume"),
    "failed": ("worse", "Failed"),
    None: ("", "Not at its end: it is still running, or was ended from outside"),
}


class Finding(NamedTuple):
    """A sentence about a run. level: the style sheet's class: better, worse or none."""

    level: str
    text: str


class Figure(NamedTuple):
    """A row of the table of headline figures."""

    name: str
    value: str
    meaning: str


def compact(value: object) -> object:
    """Return a list, such as one number per worker, as short text in which equal neighbours are counted."""
    if not isinstance(value, list):
        return value
    runs = [(entry, len(list(equal))) for entry, equal in groupby(value)]
    return ", ".join(f"{count} x {plain(entry)}" if count > 1 else plain(entry) for entry, count in runs) or "none"


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration by the names of its flags, without values that are not set."""
    found: dict[str, Any] = {}
    for part, values in config.items():
        for key, value in values.items():
            found[part if key == "name" else key] = value
    return {key: value for key, value in found.items() if value is not None}


def describe_incident(incident: Incident) -> dict[str, Any]:
    """Return an incident as a row of the table of incidents."""
    event = incident.event
    if event["event"] == "restart":
        what = f"{event['role']} {event['index']} restarted"
    elif event["event"] == "rollback":
        what = f"rolled back from version {event['from_version']:,} to {event['to_version']:,}"
    else:
        what = "warning"
    cause = str(event.get("cause") or event.get("message") or "-")
    return {"after": duration(incident.seconds), "epoch": incident.epoch, "what": what, "cause": cause}


def findings(events: Sequence[Event], live: Sequence[Event], summary: Mapping[str, Any]) -> list[Finding]:
    """Return how the run ended, and everything unusual about it.

    Args:
        events: all events of the log.
        live: the events that roll-backs and restarts have not voided.
        summary: of trainer.runlog.result.
    """
    level, ending = ENDINGS.get(summary["cause"], ("worse", f"Ended: {summary['cause']}"))
    trains = of_kind(live, "train")
    stands = f", at epoch {trains[-1]['epoch']:.2f}" if trains else ""
    found = [Finding(level, f"{ending}{stands}, after {duration(summary['seconds'])} of training.")]
    if summary["error"]:
        found.append(Finding("worse", f"The cause: {summary['error']}"))
    lost = next((event for event in trains if _is_lost(event)), None)
    if lost:
        text = f"The loss is no finite number from epoch {lost['epoch']:.2f} (version {lost['version']:,}) on."
        found.append(Finding("worse", text))
    # None means that this is unknown.
    if summary["learned"] is False:
        found.append(
            Finding("worse", "Nothing was learned: the loss on training rows is no lower than that of guessing.")
        )
    counts = Counter(event["role"] for event in of_kind(events, "restart"))
    if counts:
        roles = ", ".join(f"{count} of {'an' if role == 'evaluator' else 'a'} {role}" for role, count in counts.items())
        found.append(Finding("worse", f"Restarts: {roles}. Causes are listed under Incidents."))
    rollbacks = of_kind(events, "rollback")
    if rollbacks:
        undone = sum(event["from_version"] - event["to_version"] for event in rollbacks)
        found.append(Finding("worse", f"Rollbacks: {len(rollbacks)}, which took back {undone:,} updates."))
    found += _of_passes(summary)
    if summary["evaluations_given_up"]:
        text = (
            f"Not evaluated: {summary['evaluations_given_up']} ends of epochs, which waited too long for the evaluator."
        )
        found.append(Finding("worse", text))
    if not of_kind(live, "eval"):
        found.append(Finding("", "Nothing has been evaluated."))
    return found


def _is_lost(train: Event) -> bool:
    """True if the loss is not a finite number although gradients were accepted."""
    if train["loss"] is None:  # JSON has no NaN; only accepted gradients have a staleness
        return train["staleness_mean"] is not None
    return not np.isfinite(train["loss"])


def _of_passes(summary: Mapping[str, Any]) -> list[Finding]:
    passes = summary["passes"]
    rejected = summary["rejected"]
    whole = passes["whole"]
    missed = passes["whole"] - passes["true"]
    if not whole or passes["expected"] is None:
        return []
    if not missed:
        each = "in the one pass" if whole == 1 else f"in each of {whole} passes"
        text = f"Every row of the set was trained once {each} over it: their fingerprint is the manifest's."
        return [Finding("better", text)]
    why = f"{rejected:,} gradients were refused" if rejected else "a worker that came late skipped mini-batches"
    text = f"Not every row of the set was trained once in {missed} of {whole} passes over it: {why}."
    return [Finding("worse" if not rejected else "", text)]


def headline(summary: Mapping[str, Any]) -> list[Figure]:
    """Return the headline figures with their meanings."""
    staleness = summary["staleness"]
    epoch = summary["best_epoch"]
    restarts = summary["restarts"]
    best = "no evaluation yet" if epoch is None else f"of all evaluations; after epoch {epoch:.4g}"
    return [
        Figure("final accuracy", percent(summary["final_accuracy"]), "evaluation images, last evaluation"),
        Figure("final loss", plain(summary["final_loss"]), "evaluation images, last evaluation"),
        Figure("best accuracy", percent(summary["best_accuracy"]), best),
        Figure("best loss", plain(summary["best_loss"]), "of the same evaluation"),
        Figure("training accuracy", percent(summary["train_accuracy"]), "some training images, last evaluation"),
        Figure("training loss", plain(summary["train_loss"]), "some training images, last evaluation"),
        Figure(
            "running accuracy", percent(summary["running_train_accuracy"]), "mean of the last whole epoch as it went"
        ),
        Figure("running loss", plain(summary["running_train_loss"]), "mean of the last whole epoch as it went"),
        Figure("images/s", plain(summary["images_per_second"]), "training images of accepted gradients"),
        Figure("duration", duration(summary["seconds"]), "of training, without work that was taken back"),
        Figure("updates", plain(summary["updates"]), f"from {plain(summary['examples'])} training images"),
        Figure("staleness, mean", plain(staleness["mean"]), "versions between a worker's pull and its update"),
        Figure("staleness, most", plain(staleness["max"]), "the same, of the gradient that came latest"),
        Figure("rejected gradients", plain(summary["rejected"]), "computed in vain"),
        Figure("restarts", plain(sum(restarts.values())), ", ".join(f"{n} {role}" for role, n in restarts.items())),
        Figure("rollbacks", plain(summary["rollbacks"]), "of all servers to a checkpoint"),
    ]


def title(summary: Mapping[str, Any], num_workers: int) -> str:
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{summary['model']} by {str(summary['protocol']).upper()}, {workers}"
