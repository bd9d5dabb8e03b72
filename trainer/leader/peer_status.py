"""The status of a run whose workers keep models of their own, on real processes and in virtual time."""

from __future__ import annotations

from dataclasses import replace

from trainer.coordination.peer_progress import PeerProgress
from trainer.leader.status import describe_loss, progress_status
from trainer.runlog.journal import Journal
from trainer.transport.status import RunStatus


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
    remaining = 0 if trained else present
    status = progress_status(progress, journal, seconds)
    return replace(status, remaining=remaining, alive=present, trained=trained, finished=finished, diverged=diverged)


def describe_divergence(progress: PeerProgress) -> str | None:
    """Return in words which loss is not finite, or None if none is."""
    bad = progress.diverged
    return describe_loss(bad, f"in round {bad.clock}") if bad else None
