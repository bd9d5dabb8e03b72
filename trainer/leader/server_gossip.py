"""The exchange of examples in a run with servers, as server 0 leads it: rounds are completed, logged and sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.coordination.coordinator import Coordinator
from trainer.coordination.membership import WorkerPhase
from trainer.coordination.orders import Order
from trainer.gossip.rounds import Examples, GossipRounds, Pool
from trainer.runlog.events import log_event


class ServerGossip:
    """The rounds of examples in one generation.

    Args:
        log: folder of the log.
        coordinator: of the generation; its position has the state of the rounds.
        send_pool: see Leader.
        earlier: of the generation before, whose examples are still known here; None if there is none.
    """

    def __init__(
        self,
        log: Path,
        coordinator: Coordinator,
        send_pool: Callable[[int, int, Pool], None],
        earlier: ServerGossip | None,
    ) -> None:
        self.log = log
        self.coordinator = coordinator
        self.send_pool = send_pool
        self.rounds = GossipRounds(coordinator.budget.position.gossip)
        if earlier:
            self.rounds.recall(earlier.rounds)
        # The log may have it as of a version that is void now.
        if self.rounds.number:
            self._log_round()
        # In the middle of a step, a worker that repeats it would already have the examples that others have after it.
        if coordinator.protocol.reproducible:
            coordinator.after_update = self._complete_round

    def add(self, worker: int, session: int, epoch: int, examples: Examples) -> bool:
        """Add examples of a worker, and return whether they count; see Leader.offered."""
        is_current = session == self.coordinator.members[worker].session
        return is_current and len(examples.ids) > 0 and self.rounds.add(worker, epoch, examples)

    def complete_round(self) -> None:
        """Complete the round if all workers that take part have given their examples, unless only an update may do so."""
        if not self.coordinator.after_update:
            self._complete_round()

    def _complete_round(self) -> None:
        """Complete the round if all workers that take part have given their examples.

        Workers that have done their last step take no part, nor lost ones unless the protocol waits for their gradients."""
        if not self.rounds.contributors:
            return
        coordinator = self.coordinator
        away = [WorkerPhase.FINISHED] + ([] if coordinator.protocol.reproducible else [WorkerPhase.ABSENT])
        in_phase = coordinator.membership.in_phase
        # The counts come first: most gradients find the round far from complete.
        if self.rounds.contributors < coordinator.num_workers - sum(in_phase[phase] for phase in away):
            return
        if self.rounds.complete({member.index for member in coordinator.members if member.phase not in away}):
            self._log_round()

    def send_pools(self, order: Order) -> None:
        """Send and log the examples of others that workers use from the steps of an order on."""
        for worker, session, clock in order.unblocked:
            pool = self.rounds.next_pool(worker, session, clock)
            if pool is None:
                continue
            # An empty pool too, because the worker may still have one of a version that is void.
            self.send_pool(worker, session, pool)
            if pool.round:
                place = {"version": self.coordinator.version + 1, "worker": worker, "round": pool.round}
                log_event(self.log, "pool", **place, clock=pool.clock, first=pool.first)

    def _log_round(self) -> None:
        """Log the ids of the last complete round. After a roll-back to this version, the line is void."""
        version = self.coordinator.version + 1
        log_event(self.log, "gossip", version=version, round=self.rounds.number, ids=self.rounds.ids)
