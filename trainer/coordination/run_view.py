"""The state of a run, as its protocol reads it."""

from __future__ import annotations

from trainer.coordination.budget import Budget
from trainer.coordination.ledger import GradientLedger
from trainer.coordination.membership import Membership


class RunView:
    """The state of a run that a protocol may read (trainer.protocols.base.View).

    ``time``: seconds of training over all starts of the run, set by Coordinator.advance; all else is always current."""

    def __init__(self, budget: Budget, membership: Membership, ledger: GradientLedger, seconds: float) -> None:
        self.num_workers = budget.num_workers
        self.time = seconds
        self.position = budget.position
        self.memory = budget.position.memory
        self._members = membership.members
        self._clocks = membership.clocks
        self.slowest = self._clocks.least
        self.fastest = self._clocks.greatest
        self.slowest_worker = self._clocks.slowest_worker
        self.contributes = ledger.contributes

    @property
    def version(self) -> int:
        return self.position.version

    def clock(self, worker: int) -> int:
        return self._members[worker].clock
