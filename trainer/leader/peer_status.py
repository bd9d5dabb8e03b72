"""The status of a run whose workers keep models of their own, on real processes and in virtual time."""

from __future__ import annotations

from typing import Any

from trainer.coordination.peer_progress import PeerProgress
from trainer.runlog.journal import Journal
from trainer.transport.status import RunStatus

MEASURED = ("loss", "accuracy", "images_per_s", "staleness_mean", "staleness_max")


def status_of(
    progress: PeerProgress,
    journal: Journal,
    present: int,
    seconds: float,
    *,
    trained: bool,
    finished: bool,
    diverged: str | None,
) -> RunStatus:
    """Return the status that server 0 reports to a supervisor.

    Args:
        progress, journal: of the run.
        present: number of its members.
        seconds: training time.
        trained, finished, diverged: see RunStatus.
    """
    # Every member has the same rounds left, so the members that remain are all or none.
    position = progress.budget.position
    measured: dict[str, Any] = {key: journal.summary.get(key) for key in MEASURED}
    return RunStatus(
        ready=True,
        finished=finished,
        diverged=diverged,
        trained=trained,
        version=position.version,
        accepted=position.accepted,
        total=progress.budget.total,
        epoch=progress.budget.epoch,
        epochs=progress.budget.epochs,
        seconds=seconds,
        remaining=0 if trained else present,
        alive=present,
        num_workers=progress.num_workers,
        **measured,
    )


def describe_divergence(progress: PeerProgress) -> str | None:
    """Return in words which loss is not finite, or None if none is."""
    bad = progress.diverged
    if bad and not bad.clock:
        return (
            f"the loss of worker {bad.worker} is {bad.measured.loss} before any update: check the model's"
            " initial parameters and the rows of this worker"
        )
    if bad:
        return f"the loss of worker {bad.worker} is {bad.measured.loss} in round {bad.clock}; lower --learning-rate"
    return None
