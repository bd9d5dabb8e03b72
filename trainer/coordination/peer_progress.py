"""The progress of a run whose workers keep models of their own: rounds, members, and the log's records by round.

Pure: no sockets, no clock. A worker is in its round k from the end of its round k-1, independent of other workers. Round
k of the run is complete when all members have completed it, and the version of the run is the number of its complete
rounds. All cost per step is O(log N)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.coordination.budget import Budget
from trainer.coordination.clocks import Clocks
from trainer.coordination.epoch_sums import EpochSums
from trainer.coordination.orders import Record, StepMeasurements
from trainer.coordination.passes import Passes, RowSums


@dataclass
class RoundBudget(Budget):
    """A budget in rounds: a worker that is absent from a round does not make up for it."""

    @property
    def epoch(self) -> float:
        """Rounds / rounds per epoch."""
        return self.cohort.epochs(self.position.version, self.steps_per_epoch)

    def is_spent(self) -> bool:
        return self.has_ended or self.position.version >= self.steps


@dataclass(slots=True)
class PeerMember:
    """A worker in the progress of a run.

    Attributes:
        clock: the round that it computes, or the first one that it will compute; of an absent worker the first one that it
            has missed.
        first: the first round that it takes part in.
        is_in: whether it is a member, so that the run and its neighbours wait for it.
    """

    clock: int = 0
    first: int = 0
    is_in: bool = False


class PeerProgress:
    """Counts the rounds of all workers.

    Args:
        budget: the length of the run and its position.
        rate: rate(epoch) is the learning rate divided by the number of workers, as for Coordinator.
        rows_of_batch: rows_of_batch(worker, round) returns the rows of a mini-batch that is not computed, or None if
            there are no rows.

    Attributes:
        members: by number of the worker.
        completed: measurements of the last complete round, by worker.
        boundary: the epoch that the last complete round ended, or None.
        epoch_means: mean loss and accuracy of the last epoch that ended.
        records: gradients of complete rounds that the log does not have yet, sorted by round and worker.
        diverged: the gradient whose loss is not finite, or None.
    """

    def __init__(
        self,
        budget: RoundBudget,
        rate: Callable[[float], float],
        rows_of_batch: Callable[[int, int], RowSums | None],
    ) -> None:
        self.budget = budget
        self.rate = rate
        clocks = budget.position.clocks
        self.members = [PeerMember(clocks.get(worker, 0)) for worker in range(budget.num_workers)]
        self.passes = Passes(budget.num_workers, budget.position.passes)
        self.epoch_sums = EpochSums(budget.position.epoch_sums)
        self.epoch_means: dict[str, Any] = {}
        self.completed: dict[int, StepMeasurements] = {}
        self.boundary: int | None = None
        self.records: list[Record] = []
        self.diverged: Record | None = None
        self.started = False
        self._rows_of_batch = rows_of_batch
        self._clocks = Clocks()
        self._started_clocks = Clocks()  # without newcomers that wait for their model
        self._count = 0
        self._completed: dict[int, dict[int, StepMeasurements]] = {}  # by round and worker; not yet in the log

    @property
    def num_workers(self) -> int:
        return self.budget.num_workers

    @property
    def version(self) -> int:
        return self.budget.position.version

    @property
    def finished(self) -> bool:
        """Return whether all rounds are complete or the run has diverged."""
        return self.budget.is_spent() or self.diverged is not None

    def begin(self, worker: int) -> None:
        """Make a worker a member from the present version on, as at the start of the run."""
        self._enter(worker, self.version)
        self.start_round(worker)

    @property
    def furthest(self) -> int:
        """The greatest round that a member has begun; 0 without members."""
        return self._clocks.greatest()

    @property
    def furthest_started(self) -> int:
        """The greatest round that a member with a model has begun; 0 without any.

        A newcomer without a model counts for ``furthest`` with the round before its first one."""
        return self._started_clocks.greatest()

    def admit(self, worker: int, horizon: int | None = None) -> int | None:
        """Make a worker a member from the first round that no member has begun, and return that round.

        So no member has used or skipped its model in that round, and all its neighbours count on it from there on. The
        round before it is complete only once the worker has started. Returns None if some member has begun the last
        round of the run, or if there is no member.

        horizon: the first round that no member can have begun (default: all rounds that were begun are known here)."""
        first = self.furthest + 1 if horizon is None else horizon
        if not self._count or first > self.budget.steps:
            return None
        self._enter(worker, first)
        return first

    def _enter(self, worker: int, first: int) -> None:
        member = self.members[worker]
        self._count += not member.is_in
        member.clock = member.first = first
        member.is_in = True
        self._clocks.put(worker, first - 1)
        self.started = True

    def start_round(self, worker: int) -> None:
        """Note that a worker has a model for its first round, and begins it."""
        self._clocks.put(worker, self.members[worker].clock)
        self._started_clocks.put(worker, self.members[worker].clock)

    def leave(self, worker: int) -> None:
        """Remove a worker, for which the run no longer waits. The rounds that it has completed count."""
        member = self.members[worker]
        self._count -= member.is_in
        member.is_in = False
        self._clocks.remove(worker)
        self._started_clocks.remove(worker)

    def takes_part(self, worker: int, round: int) -> bool:
        """Return whether a worker's neighbours may wait for its model of a round that is not complete."""
        member = self.members[worker]
        return member.is_in and member.first <= round

    def finish(self, worker: int, measured: StepMeasurements) -> None:
        """Note that a worker has completed its round, and is in the next one.

        A loss that is not finite ends the run as diverged."""
        member = self.members[worker]
        round = member.clock
        if not abs(measured.loss) < float("inf"):
            self.diverged = Record(self.version, worker, round, round, 0, measured, accepted=False)
        self._completed.setdefault(round, {})[worker] = measured
        member.clock += 1
        self._clocks.put(worker, member.clock)
        self._started_clocks.put(worker, member.clock)

    def complete_round(self) -> bool:
        """Complete the next round of the run, and return whether it was complete."""
        round = self.version
        if self.finished or not self._count or self._clocks.least() <= round:
            return False
        completed = self.completed = self._completed.pop(round, {})
        for worker in sorted(completed):
            measured = completed[worker]
            # Models of the same round are mixed, so a gradient is never stale.
            self.records.append(Record(round + 1, worker, round, round, 0, measured, accepted=True))
            self.epoch_sums.add(measured)
            if measured.seen:
                self.passes.use(worker, measured.seen)
        # A pass over the rows ends for an absent worker too, or all later passes would seem to lack rows.
        for worker in range(self.num_workers):
            if worker not in completed and (rows := self._rows_of_batch(worker, round)):
                self.passes.miss(worker, rows)
        examples = sum(measured.examples for measured in completed.values())
        self.boundary = self.budget.use(len(completed), examples)
        if self.boundary is not None:
            self.epoch_means = self.epoch_sums.end()
        return True
