"""The state of server 0 while all servers hold the same generation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.coordination.convergence import Convergence
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.membership import WorkerPhase
from trainer.leader.server_gossip import ServerGossip
from trainer.leader.snapshots import Snapshots
from trainer.leader.status import describe_loss, progress_status
from trainer.runlog.journal import Journal
from trainer.transport.status import RunStatus


@dataclass(frozen=True)
class Training:
    """The state of a generation. A roll-back discards it.

    Attributes:
        coordinator: decides on gradients and workers.
        convergence: the test by which --tolerance ends the run.
        journal: writes the events and pushes of this generation to the log.
        snapshots: the checkpoints that are being written.
        gossip: the rounds in which workers exchange examples; None if they do not.
    """

    coordinator: Coordinator
    convergence: Convergence
    journal: Journal
    snapshots: Snapshots
    gossip: ServerGossip | None = None

    @property
    def has_whole_checkpoint(self) -> bool:
        """Return whether the checkpoint of the present version is complete."""
        return self.snapshots.newest == self.coordinator.version

    @property
    def is_at_stage_end(self) -> bool:
        """Return whether the stage has ended and the run has not."""
        return self.coordinator.has_ended_stage and not self.coordinator.finished

    @property
    def diverged(self) -> str | None:
        """Why the run has diverged, in words; None if it has not."""
        bad = self.coordinator.diverged
        return describe_loss(bad, f"at version {bad.version}") if bad else self.snapshots.divergence

    def status(self, now: float, *, is_complete: bool) -> RunStatus:
        """Return the status for supervisors.

        now: the leader's clock in seconds; is_complete: whether all files that end the run are written."""
        coordinator = self.coordinator
        in_phase = coordinator.membership.in_phase
        alive = coordinator.num_workers - in_phase[WorkerPhase.ABSENT]
        return replace(
            progress_status(coordinator, self.journal, self.journal.seconds(now)),
            # The supervisor ends all servers of a finished run, so the final checkpoint must be complete before.
            finished=coordinator.finished and (self.diverged is not None or is_complete),
            diverged=self.diverged,
            trained=coordinator.finished,
            remaining=alive - in_phase[WorkerPhase.FINISHED],
            alive=alive,
        )
