"""The turns of workers and the schedule of checkpoints, without a coordinator."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from trainer.coordination.barriers import Barriers
from trainer.coordination.budget import Budget, Position
from trainer.coordination.ledger import GradientLedger, make_record
from trainer.coordination.membership import Membership, WorkerPhase
from trainer.coordination.orders import Reply, StepMeasurements
from trainer.coordination.run_view import RunView
from trainer.coordination.snapshot_schedule import SnapshotSchedule
from trainer.coordination.turns import Turns
from trainer.protocols import PROTOCOLS
from trainer.protocols.base import Gradient

WAIT_S = 10.0
MEASURED = StepMeasurements(2, 0.5, 1, 0.1)


class Run:
    """The turns of a run and its members, whose steps a test counts itself."""

    def __init__(
        self,
        protocol: str = "asp",
        workers: int = 3,
        stop: Literal["global", "local"] = "global",
        barriers: tuple[int, ...] = (),
        **parameters: Any,
    ) -> None:
        self.budget = Budget(workers, 4, 2, stop, Position())
        self.membership = Membership({}, workers)
        chosen = PROTOCOLS[protocol](**parameters)
        self.ledger = GradientLedger(workers, in_worker_order=chosen.in_worker_order)
        view = RunView(self.budget, self.membership, self.ledger, 0.0)
        self.turns = Turns(chosen, self.budget, self.membership, view, Barriers(barriers), WAIT_S)

    def join(self, *workers: int, now: float = 0.0) -> None:
        for worker in workers:
            self.membership.move(self.membership.members[worker], WorkerPhase.JOINING)
            self.turns.note_join(self.membership.members[worker], now)

    def finish_step(self, worker: int, *, is_applied: bool = True) -> None:
        """Count a worker's step, and make the update of its gradient if that is applied."""
        member = self.membership.members[worker]
        self.ledger.add((Gradient(worker, member.clock, member.pulled), MEASURED))
        self.membership.tick(member, 1)
        opens = is_applied and self.turns.next_barrier.note(member.clock - 1, member.clock)
        self.turns.await_turn(member)
        if is_applied:
            self.update(opens_barrier=opens)

    def update(self, *, opens_barrier: bool = False) -> None:
        gradients = len(self.ledger.close())
        self.budget.use(gradients, gradients)
        self.turns.note_update(opens_barrier=opens_barrier)

    def next_starts(self) -> list[int]:
        return [worker for worker, _, _ in self.turns.take_ready()[0]]


def test_a_run_starts_with_all_workers_or_after_a_wait() -> None:
    run = Run()
    run.join(0, now=5.0)
    run.join(2, now=14.0)
    assert not run.turns.start(14.9)
    assert run.next_starts() == []
    assert run.turns.start(15.0)
    assert run.turns.started_at == 15.0
    assert run.next_starts() == [0, 2]
    run.join(1, now=20.0)
    assert run.next_starts() == [1], "the run has started"
    whole = Run()
    whole.join(2, 0, 1)
    assert whole.turns.start(0.0)
    assert whole.next_starts() == [0, 1, 2], "in the order of workers"


def test_a_worker_starts_by_the_condition_of_its_protocol() -> None:
    """Under bsp a worker waits for the next version; a worker that was lost meanwhile is not released."""
    run = Run("bsp")
    run.join(0, 1, 2)
    run.turns.start(0.0)
    run.next_starts()
    for worker in range(3):
        run.finish_step(worker, is_applied=False)
    assert not run.turns.has_ready
    run.membership.move(run.membership.members[1], WorkerPhase.ABSENT)
    run.update()
    assert run.turns.has_ready
    assert run.turns.take_ready() == ((Reply(0, 0, 1), Reply(2, 0, 1)), ())
    assert run.membership.members[0].pulled == 1


def test_a_fast_worker_starts_once_the_slowest_one_is_near() -> None:
    run = Run("ssp", workers=2, staleness_bound=1)
    run.join(0, 1)
    run.turns.start(0.0)
    run.next_starts()
    run.finish_step(0)
    assert run.next_starts() == [0]
    run.finish_step(0)
    assert run.next_starts() == [], "it is 2 steps ahead"
    run.finish_step(1)
    assert run.next_starts() == [0, 1]


def test_a_barrier_opens_when_all_workers_are_at_it() -> None:
    run = Run(barriers=(2,))
    run.join(0, 1, 2)
    run.turns.start(0.0)
    run.next_starts()
    for worker in (0, 1, 0, 2, 1):
        run.finish_step(worker)
    assert run.next_starts() == [2], "workers 0 and 1 wait at step 2"
    run.finish_step(2)
    assert run.next_starts() == [0, 1, 2]


def test_a_worker_ends_after_its_own_steps_or_with_the_run() -> None:
    run = Run(stop="local")
    run.join(0, 1, 2)
    run.turns.start(0.0)
    run.next_starts()
    for _ in range(4):
        run.finish_step(1)
    assert run.turns.take_ready()[1] == (Reply(1, 0, 4),)
    run.finish_step(0, is_applied=False)
    run.turns.end()
    assert run.turns.are_over
    assert run.turns.take_ready() == ((), (Reply(0, 0, 1),)), "worker 2 computes and ends once it has pushed"
    run.finish_step(2, is_applied=False)
    assert run.turns.take_ready() == ((), (Reply(2, 0, 1),))


def test_a_worker_ends_once_its_last_gradient_is_applied() -> None:
    run = Run(stop="local", workers=1)
    run.join(0)
    run.turns.start(0.0)
    run.next_starts()
    member = run.membership.members[0]
    member.unapplied = 4
    member.clock = 3
    run.finish_step(0, is_applied=False)
    assert run.turns.take_ready() == ((), ())
    member.unapplied = 0
    run.update()
    assert run.turns.take_ready() == ((), (Reply(0, 0, 4),))


@pytest.mark.parametrize("at_epochs", [True, False])
def test_checkpoints_are_due_at_epochs_and_on_request(at_epochs: bool) -> None:
    """A request without an update since the last checkpoint is void, except at the end."""
    schedule = SnapshotSchedule(3, at_epochs=at_epochs)
    assert not schedule.take_due(4, ends_epoch=False, is_last=False)
    assert schedule.take_due(5, ends_epoch=True, is_last=False) == at_epochs
    schedule.is_wanted = True
    assert schedule.take_due(6, ends_epoch=False, is_last=False)
    assert not schedule.is_wanted
    schedule.is_wanted = True
    assert not schedule.take_due(6, ends_epoch=False, is_last=False)
    assert not schedule.is_wanted, "one request is answered once"
    assert not schedule.take_due(6, ends_epoch=False, is_last=True)
    schedule.is_wanted = True
    assert schedule.take_due(6, ends_epoch=False, is_last=True)


@pytest.mark.parametrize(("accepted", "staleness"), [(True, 2), (False, 3)])
def test_the_own_update_adds_no_staleness(accepted: bool, staleness: int) -> None:
    entry = Gradient(1, 8, 4), MEASURED
    record = make_record(entry, 7, accepted=accepted)
    assert (record.worker, record.clock, record.version, record.version_pulled) == (1, 8, 7, 4)
    assert record.staleness == staleness
