"""The progress of a run, and its planned length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.coordination.cohorts import FIRST, Cohort


@dataclass
class Position:
    """The progress of a run, as every checkpoint contains it.

    Attributes:
        version: updates so far.
        accepted: gradients of mini-batches in those updates; a push under downpour sums several.
        examples: examples of those gradients.
        clocks: applied and refused gradients by worker.
        memory: state of the protocol, in plain JSON.
        passes: state of trainer.coordination.passes.
        epoch_sums: state of trainer.coordination.epoch_sums.
        gossip: state of trainer.gossip.rounds.
        stragglers: state of trainer.coordination.stragglers.
        converged_steps: steps per worker of the run if the tolerance has ended it here; None if it has not.
    """

    version: int = 0
    accepted: int = 0
    examples: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, Any] = field(default_factory=dict)
    epoch_sums: dict[str, Any] = field(default_factory=dict)
    gossip: dict[str, Any] = field(default_factory=dict)
    stragglers: dict[str, Any] = field(default_factory=dict)
    converged_steps: int | None = None


@dataclass
class Budget:
    """The planned length of a run and its position.

    Attributes:
        num_workers: n.
        steps: steps per worker in the whole run.
        steps_per_epoch: steps per worker in an epoch.
        stop: "global" ends the run after n * steps accepted gradients; "local" ends each worker after its own steps.
        position: progress so far.
        through: workers that have done their own steps.
        until: accepted gradients at which the present stage of the run ends; None if it ends with the run.
        cohort: the workers of this part of the run, and the progress with which they began.
        has_ended: whether the run ends at its position although steps are left.
    """

    num_workers: int
    steps: int
    steps_per_epoch: int
    stop: Literal["global", "local"] = "global"
    position: Position = field(default_factory=Position)
    through: int = 0
    until: int | None = None
    cohort: Cohort = FIRST
    has_ended: bool = False

    @property
    def total(self) -> int:
        """Accepted gradients of the whole run under stop="global"."""
        return self.cohort.total(self.steps, self.num_workers)

    @property
    def epoch(self) -> float:
        """Global epoch: accepted gradients / (n * mini-batches per epoch)."""
        gradients = self.cohort.gradients(self.position.accepted, self.num_workers)
        return gradients / (self.num_workers * self.steps_per_epoch)

    @property
    def epochs(self) -> float:
        """The length of the run in global epochs."""
        return self.cohort.epochs(self.steps, self.steps_per_epoch)

    @property
    def whole_epochs(self) -> int | None:
        """The number of global epochs, None within an epoch."""
        return int(self.epoch) if self.epoch == int(self.epoch) else None

    def next_update_size(self, update_size: int) -> int:
        """Return the number of gradients of the next update: ``update_size``, or the rest of the budget if that is less.

        Under stop="local" the run has no common budget, because every worker ends after its own steps. An update never
        crosses ``until``, the end of a stage. 0 if nothing is left.

        update_size: gradients that the protocol wants in an update."""
        accepted = self.position.accepted
        limits = [update_size]
        if self.stop == "global":
            limits.append(self.total - accepted)
        if self.until is not None:
            limits.append(self.until - accepted)
        return max(0, min(limits))

    def is_stage_spent(self) -> bool:
        """Return whether the present stage ends here and another one follows."""
        return self.until is not None and self.position.accepted >= self.until and not self.is_spent()

    def is_through(self, clock: int) -> bool:
        """Return whether a worker at a clock has done its own steps; always False under stop="global"."""
        return self.stop == "local" and clock >= self.steps

    def is_spent(self) -> bool:
        if self.has_ended:
            return True
        if self.stop == "local":
            return self.through == self.num_workers
        return self.position.accepted >= self.total

    def use(self, gradients: int, examples: int) -> int | None:
        """Count an update and return the number of the epoch that it completes, or None.

        gradients: gradients of mini-batches in the update; examples: examples of all of them."""
        before = int(self.epoch)
        self.position.version += 1
        self.position.accepted += gradients
        self.position.examples += examples
        return int(self.epoch) if int(self.epoch) > before else None
