"""The status of a run as its progress and its log have it, and divergence in words, with and without servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.coordination.orders import Record
from trainer.coordination.peer_progress import PeerProgress
from trainer.runlog.events import write_refused_lines
from trainer.runlog.journal import Journal, Progress
from trainer.transport.status import RunStatus

MEASURED = ("loss", "accuracy", "images_per_s", "staleness_mean", "staleness_max")


def with_log(status: RunStatus, root: Path) -> RunStatus:
    """Return a status that is finished only when the log has all its lines, after another attempt to write them.

    root: the folder of the log."""
    try:
        write_refused_lines(root)
    except OSError as error:
        return replace(status, finished=False, trouble=status.trouble or f"the log was not written: {error}")
    return status


def progress_status(progress: Progress, journal: Journal, seconds: float) -> RunStatus:
    """Return the status of a run in training, without the numbers of its workers that are there.

    progress, journal: of the run; seconds: training time."""
    measured: dict[str, Any] = {key: journal.summary.get(key) for key in MEASURED}
    budget = progress.budget
    # The callers know when files that end the run are written, and which workers are there.
    return RunStatus(
        ready=True,
        finished=False,
        diverged=None,
        version=budget.position.version,
        accepted=budget.position.accepted,
        total=budget.total,
        epoch=budget.epoch,
        epochs=budget.epochs,
        seconds=seconds,
        num_workers=progress.num_workers,
        **measured,
    )


def describe_loss(record: Record, place: str) -> str:
    """Return in words that the loss of a gradient is not finite. place: where, such as "at version 3"."""
    loss = f"the loss of worker {record.worker} is {record.measured.loss}"
    if not record.version_pulled:  # it was computed with the initial parameters
        return f"{loss} before any update: check the model's initial parameters and the rows of this worker"
    return f"{loss} {place}; lower --learning-rate"


def peer_status(
    progress: PeerProgress,
    journal: Journal,
    present: int,
    seconds: float,
    *,
    trained: bool,
    finished: bool,
    diverged: str | None,
) -> RunStatus:
    """Return the status of a run whose workers keep models of their own, as server 0 reports it to a supervisor.

    Args:
        progress, journal: of the run.
        present: number of its members.
        seconds: training time.
        trained, finished, diverged: see RunStatus.
    """
    # Every member has the same rounds left, so the members that remain are all or none.
    remaining = 0 if trained else present
    status = progress_status(progress, journal, seconds)
    return replace(status, remaining=remaining, alive=present, trained=trained, finished=finished, diverged=diverged)


def describe_not_finite(version: int, subject: str = "the parameters") -> str:
    """Return why a run has diverged whose parameters are not finite. subject: whose parameters."""
    return f"{subject} are no finite numbers at version {version}; lower --learning-rate"


def describe_divergence(progress: PeerProgress) -> str | None:
    """Return in words which loss is not finite, or None if none is."""
    bad = progress.diverged
    return describe_loss(bad, f"in round {bad.clock}") if bad else None
