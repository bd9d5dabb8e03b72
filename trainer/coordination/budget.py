"""How far a run has come, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Position:
    """How far the run has come: what has been applied. All of it is in every checkpoint.

    clocks: by worker, gradients that were applied or refused; memory: the protocol's, in plain JSON; passes: what
    trainer.coordination.passes remembers; epoch_sums: what trainer.coordination.epoch_sums does."""

    version: int = 0
    accepted: int = 0
    examples: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, Any] = field(default_factory=dict)
    epoch_sums: dict[str, Any] = field(default_factory=dict)


@dataclass
class Budget:
    """steps: of each worker, in all. Under stop="global" n times so many accepted gradients end the run, under "local"
    every worker ends after its own."""

    num_workers: int
    steps: int
    steps_per_epoch: int
    stop: Literal["global", "local"] = "global"
    position: Position = field(default_factory=Position)
    through: int = 0  # workers that have done their own steps

    @property
    def total(self) -> int:
        """Accepted gradients of a whole run under stop="global"."""
        return self.steps * self.num_workers

    @property
    def epoch(self) -> float:
        """Global epoch: accepted gradients / (n * mini-batches per epoch)."""
        return self.position.accepted / (self.num_workers * self.steps_per_epoch)

    def room(self, wanted: int) -> int:
        """How many gradients the next update takes: the last one no more than are left."""
        return wanted if self.stop == "local" else max(0, min(wanted, self.total - self.position.accepted))

    def is_through(self, clock: int) -> bool:
        """Whether a worker at that clock has done its own steps, where those count."""
        return self.stop == "local" and clock >= self.steps

    def is_spent(self) -> bool:
        if self.stop == "local":
            return self.through == self.num_workers
        return self.position.accepted >= self.total

    def use(self, gradients: int, examples: int) -> int | None:
        """Count an update; returns the number of the epoch that it completes, if any."""
        before = int(self.epoch)
        self.position.version += 1
        self.position.accepted += gradients
        self.position.examples += examples
        return int(self.epoch) if int(self.epoch) > before else None
