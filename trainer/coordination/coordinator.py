"""The coordinator: decides which gradients are complete, which update is next, and which workers start their next step.

Server 0 owns one coordinator. It turns events into a sequence of orders, which every server, including server 0,
executes in sequence. All slices therefore have the same version at the same order, a checkpoint is consistent, and the
protocol decides once for all servers. A gradient counts once every server holds its part of it; the parts of a worker
that died while it pushed are never used. The coordinator has neither sockets nor a clock, so that tests and
``trainer.simulate`` can drive it in virtual time. An event costs O(log N) for N workers, an update O(its gradients),
or O(N) if its protocol cancels steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

from trainer.coordination.barriers import Barriers
from trainer.coordination.budget import Budget
from trainer.coordination.epoch_sums import EpochSums
from trainer.coordination.ledger import Entry, GradientLedger, make_record
from trainer.coordination.membership import Member, Membership, WorkerPhase
from trainer.coordination.orders import Decision, Order, Record, Reply, Share, Snapshot, StepMeasurements
from trainer.coordination.passes import Passes
from trainer.coordination.run_view import RunView
from trainer.coordination.snapshot_schedule import SnapshotSchedule
from trainer.coordination.stragglers import StragglerRule, StragglerWatch
from trainer.coordination.turns import Turns
from trainer.coordination.weights import Weights
from trainer.protocols.base import Gradient, Protocol

NO_BARRIERS = Barriers()


class Coordinator:
    """Turns events of workers and servers into orders.

    Args:
        protocol: decides which gradients are used and which workers wait.
        budget: the length of the run and its position.
        rate: rate(epoch) is the learning rate per gradient of an update, a/n.
        num_servers: servers that must hold a gradient or join request before it counts.
        start_wait_s: how long the first worker waits for the others at the start (seconds).
        by_examples, usual_batch: by_examples and usual of Weights.
        epoch_snapshots: whether to write a checkpoint at the end of every epoch.
        seconds: training time before this start, from which the time that protocols see continues.
        straggler_rule: ends the stage before its planned end; None for no rule.
        barriers: steps before which workers wait for each other, besides the protocol's conditions.

    Attributes:
        after_update: called after each update, before a checkpoint of it copies the position; None for nothing.

    In its methods ``now`` is the caller's clock in seconds, ``server`` and ``worker`` are numbers, and ``session`` grows
    with every join of the worker; a message with an older one is from a process that was replaced.
    """

    def __init__(
        self,
        protocol: Protocol,
        budget: Budget,
        *,
        rate: Callable[[float], float],
        num_servers: int = 1,
        start_wait_s: float = 60.0,
        by_examples: bool = False,
        usual_batch: float | None = None,
        epoch_snapshots: bool = True,
        seconds: float = 0.0,
        straggler_rule: StragglerRule | None = None,
        barriers: Barriers = NO_BARRIERS,
    ) -> None:
        assert not (barriers.clocks and protocol.refuses_gradients), "a refused gradient never counts as applied"
        self.protocol = protocol
        self.budget = budget
        self.rate = rate
        self.num_servers = num_servers
        self.membership = Membership(budget.position.clocks, budget.num_workers)
        self.members = self.membership.members
        self.barriers = barriers
        self.ledger = GradientLedger(budget.num_workers, in_worker_order=protocol.in_worker_order)
        self.view = RunView(budget, self.membership, self.ledger, seconds)
        self.turns = Turns(protocol, budget, self.membership, self.view, barriers, start_wait_s)
        self.size = protocol.update_size(budget.num_workers)  # number of gradients of an update
        self._next_update_size = budget.next_update_size(self.size)  # less at the end of a run
        self.weights = Weights(protocol, budget.num_workers, by_examples=by_examples, usual=usual_batch)
        self.passes = Passes(budget.num_workers, budget.position.passes)
        self.epoch_sums = EpochSums(budget.position.epoch_sums)
        self.stragglers = StragglerWatch(straggler_rule, budget.num_workers, budget.position.stragglers)
        self.epoch_means: dict[str, float | None] = {}  # of the last epoch that ended
        self._ended_epoch: int | None = None
        self.records: list[Record] = []  # used and refused gradients that the log does not have yet
        self.sequence = 0  # of the last order
        self.has_ended_stage = False  # no gradient is used any more: another coordinator leads the next stage
        self.after_update: Callable[[], None] | None = None
        self.diverged: Record | None = None  # the gradient whose loss is not finite
        self._seconds = seconds
        self._snapshots = SnapshotSchedule(budget.position.version, at_epochs=epoch_snapshots)
        for member in self.members:
            self._note_through(member)
        if budget.is_spent():
            self._finish()

    @property
    def num_workers(self) -> int:
        return self.budget.num_workers

    @property
    def version(self) -> int:
        return self.budget.position.version

    @property
    def started(self) -> bool:
        return self.turns.started_at is not None

    @property
    def finished(self) -> bool:
        """Return whether no gradient is used any more, because the run has ended."""
        return self.turns.are_over

    # --- events -------------------------------------------------------------------------------------------------------

    def join(self, server: int, worker: int, session: int, now: float) -> None:
        """Note that a server holds a worker's join request.

        Once all servers hold it, the worker waits for its next step. A later session of a worker replaces an earlier
        one, whose gradient is dropped unless it is already in a sum. A request of an older session, or of a worker that
        has joined already, changes nothing."""
        member = self.members[worker]
        if session < member.session:
            return
        if session > member.session or member.phase is WorkerPhase.ABSENT:
            self._withdraw(member)
            member.session = session
            self.membership.move(member, WorkerPhase.JOINING)
        if member.phase is not WorkerPhase.JOINING:
            return
        member.held_by.add(server)
        self.membership.hear(worker, now)
        if len(member.held_by) == self.num_servers:
            if self.started:  # otherwise at the clock of the checkpoint
                member.clock = self._clock_on_joining(member.clock)
                self._note_through(member)
            self.turns.note_join(member, now)

    def push(
        self, server: int, worker: int, session: int, clock: int, now: float, measured: StepMeasurements | None = None
    ) -> bool:
        """Note that a server holds its part of a gradient. Once all servers hold it, the gradient can be used.

        Returns False if the gradient is not the one that the worker computes now: it was pushed before the worker was
        lost, or in an earlier run of the servers. The worker must then join again.

        clock: number of the step; measured: its measurements, which server 0 adds; None from other servers."""
        member = self.members[worker]
        if not member.computes(session, clock):
            return False
        member.held_by.add(server)
        member.measured = measured or member.measured
        self.membership.hear(worker, now)
        if len(member.held_by) == self.num_servers:
            assert member.measured, "server 0 holds a gradient only with what was measured"
            self.membership.move(member, WorkerPhase.PUSHED)
            self._arrive(Gradient(worker, clock, member.pulled), member.measured)
        return True

    def give_up(self, worker: int, session: int, clock: int, now: float, measured: StepMeasurements) -> bool:
        """Note that a worker has stopped computing a step because its gradient would come too late for its update.

        The step counts as a refused gradient: the log records it, the worker's clock advances, and the worker is queued
        for its next step. After the end of the run the worker is only told to end. Returns False, with no effect, if
        the worker does not compute this step: it was lost meanwhile, or ``session`` or ``clock`` are of an earlier
        process or run of the servers. The worker must then join again. clock, measured: as of ``push``."""
        member = self.members[worker]
        if not member.computes(session, clock):
            return False
        self.membership.hear(worker, now)
        if self.finished:  # after the end nothing is counted, as for a push
            self.turns.await_turn(member)
        else:
            self._refuse((Gradient(worker, clock, member.pulled), measured))
        return True

    def alive(self, worker: int, session: int, now: float) -> bool:
        """Note a heartbeat. Returns False if the worker was lost or has another session, so that it must join again."""
        member = self.members[worker]
        if session != member.session or member.phase is WorkerPhase.ABSENT:
            return False
        if member.phase is not WorkerPhase.FINISHED:
            self.membership.hear(worker, now)
        return True

    def lose(self, worker: int) -> None:
        """Remove a worker, with its gradient if that is not in a sum yet. Other workers no longer wait for its clock.

        A worker that has finished stays finished."""
        member = self.members[worker]
        self._withdraw(member)
        if member.phase is not WorkerPhase.FINISHED:
            self.membership.move(member, WorkerPhase.ABSENT)

    def lose_silent(self, now: float, timeout_s: float) -> list[int]:
        """Remove every worker not heard of for ``timeout_s`` seconds, as ``lose`` does, and return their numbers."""
        silent = self.membership.silent(now, timeout_s)
        for worker in silent:
            self.lose(worker)
        return silent

    def request_snapshot(self) -> None:
        """Have the next order write a checkpoint if there was an update since the last one."""
        self._snapshots.is_wanted = True

    def converge(self) -> None:
        """End the run before its budget is spent. Gradients that arrive later are not used."""
        self.budget.position.converged_steps = self.budget.steps
        self._finish()

    def diverge(self) -> None:
        """End the run without a checkpoint, because its parameters are not finite. All workers are released to end."""
        self._snapshots.is_wanted = False
        self._end()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> Iterator[Decision]:
        """Yield the decisions that are possible now, in the order in which all servers must execute their orders.

        One decision can make the next one possible, for example an update that leaves gradients for another one. The
        caller may stop after any of them; the next call continues. now: time (seconds)."""
        # Protocols read ``view.time`` to measure the pace of workers: seconds of training over all starts of the run.
        if self.turns.started_at is not None:
            self.view.time = self._seconds + now - self.turns.started_at
        while decision := self._next(now):
            yield decision
            if not (self.ledger.waiting or self.turns.has_ready or self._snapshots.is_wanted or decision.order.stop):
                return  # the next decision needs another event

    def take_ended_epoch(self) -> int | None:
        """Return the number of the epoch that ended since the last call, whose means are ``epoch_means``, or None."""
        epoch, self._ended_epoch = self._ended_epoch, None
        return epoch

    def _next(self, now: float) -> Decision | None:
        """Return the next decision, or None if nothing can be done before another event or another time.

        Its order sums the gradients that have arrived, makes the update if that is complete, writes a checkpoint if one
        is due, and answers the workers that may continue."""
        entries = self._sum() if self.ledger.waiting and not self.finished else []
        shares = self._shares(entries) if entries else ()
        rate = boundary = None
        scale = 1.0
        cancelled: tuple[Reply, ...] = ()
        if self.ledger.summed and self._is_complete():
            # Before the update, which advances the epoch and empties the ledger. Both are needed here.
            rate = self.rate(self.budget.epoch)
            scale = self.weights.correction(self.ledger.examples())
            boundary = self._update()
            if self.after_update:
                self.after_update()
            self._look_for_straggler()
            cancelled = self._cancelled()
        if self.budget.is_spent() and not self.finished:
            self._finish()
        if self.budget.is_stage_spent() and not (self.finished or self.has_ended_stage):
            self.has_ended_stage = self._snapshots.is_wanted = True
        # After the update, so that the workers that waited for it pull its result with this order.
        unblocked, stop = self._answer(now)
        snapshot = self._snapshot(boundary)
        if not (shares or rate is not None or unblocked or stop or snapshot):
            return None
        self.sequence += 1
        order = Order(
            self.sequence, self.version, shares, rate, scale, unblocked, stop, cancelled, snapshot is not None
        )
        return Decision(order, snapshot)

    def _arrive(self, gradient: Gradient, measured: StepMeasurements) -> None:
        """Queue a gradient, which all servers hold, for an update. A loss that is not finite ends the run as diverged.

        After the end of the run the gradient is not used, and its worker is told when it may end."""
        if self.finished:
            self.turns.await_turn(self.members[gradient.worker])
        elif abs(measured.loss) < float("inf"):
            self.ledger.arrive(gradient, measured)
        else:  # the gradient of an infinite or NaN loss would make all parameters NaN
            self.diverged = make_record((gradient, measured), self.version, accepted=False)
            self._end()

    def _sum(self) -> list[Entry]:
        """Move the gradients that can be summed now from the waiting ones into the next update, and return them.

        Gradients that the protocol does not admit are refused on the way. The workers of all of them are queued for
        their next steps."""
        missing = self._next_update_size - len(self.ledger.summed)
        # With these weights each factor depends on the sizes of all mini-batches in the update, so none is summed
        # before the last one that can still come has arrived.
        if self.weights.holds and len(self.ledger.waiting) < missing and not self.membership.all_wait_for_an_update():
            return []
        entries: list[Entry] = []
        while len(entries) < missing and (entry := self.ledger.take(self._is_finished)):
            if not self.protocol.admit(entry[0], self.view):
                self._refuse(entry)
                continue
            entries.append(entry)
            self.ledger.add(entry)
            member = self.members[entry[0].worker]
            member.unapplied += self._steps(entry)
            self._done_with(member)
        return entries

    def _shares(self, entries: list[Entry]) -> tuple[Share, ...]:
        """Return the factors of the gradients that are added to the sum now. entries: the result of ``_sum``."""
        version = self.version
        factors = self.weights.factors(
            [version - gradient.version for gradient, _ in entries],
            [entry[1].examples / self._steps(entry) for entry in entries],
        )
        return tuple(
            Share(worker, clock, factor) for ((worker, clock, _), _), factor in zip(entries, factors, strict=True)
        )

    def _steps(self, entry: Entry) -> int:
        """Return the number of mini-batches whose gradients a pushed gradient sums."""
        return self.steps_of_push(entry[0].clock)

    def steps_of_push(self, clock: int) -> int:
        """Return how many steps of a worker, from a step on, its next push sums; none of them is after a barrier.

        clock: number of that step."""
        return self.barriers.steps_before(clock, self.protocol.local_steps(clock))

    def _is_complete(self) -> bool:
        """Return whether the next update has its gradients, or no worker is left that could push one for it."""
        if self.finished:
            return False
        if len(self.ledger.summed) >= self._next_update_size:
            return True
        return not self.ledger.waiting and self.membership.all_wait_for_an_update()

    def _update(self) -> int | None:
        """Count an update and return the number of the epoch that it completes, or None."""
        version = self.version + 1
        entries = self.ledger.close()
        steps = sum(map(self._steps, entries))
        boundary = self.budget.use(steps, sum(measured.examples for _, measured in entries))
        # The last update of a run may have room for fewer gradients.
        self._next_update_size = self.budget.next_update_size(self.size)
        opens_barrier = False
        for entry in entries:
            self.records.append(make_record(entry, version, accepted=True))
            self.epoch_sums.add(entry[1])
            if entry[1].seen:
                self.passes.use(entry[0].worker, entry[1].seen)
            member = self.members[entry[0].worker]
            before = member.clock - member.unapplied
            member.unapplied -= self._steps(entry)
            opens_barrier |= self.turns.next_barrier.note(before, member.clock - member.unapplied)
            self._note_through(member)
        self.stragglers.add((gradient.worker, measured) for gradient, measured in entries)
        if boundary is not None:
            self.epoch_means = self.epoch_sums.end()
            self._ended_epoch = boundary
        self.turns.note_update(opens_barrier=opens_barrier)
        return boundary

    def _look_for_straggler(self) -> None:
        """End the stage with the present update if a worker is a straggler, unless the stage or the run ends here anyway."""
        budget = self.budget
        if not (budget.is_spent() or budget.is_stage_spent()) and self.stragglers.look():
            budget.until = budget.position.accepted
            self._next_update_size = budget.next_update_size(self.size)

    def _cancelled(self) -> tuple[Reply, ...]:
        """Return the workers that still compute a step for the update that was just made, to be told to give it up.

        Empty if the protocol has no micro-batches, between which alone a worker can give up."""
        if self.protocol.parts_of_a_step() == 1:
            return ()
        return tuple(
            m.reply() for m in self.members if m.phase is WorkerPhase.COMPUTING and m.pulled == self.version - 1
        )

    def _refuse(self, entry: Entry) -> None:
        """Log a gradient as refused, and let its worker continue. Its rows do not count as trained in their pass."""
        self.records.append(make_record(entry, self.version, accepted=False))
        if entry[1].seen:
            self.passes.miss(entry[0].worker, entry[1].seen)
        self._done_with(self.members[entry[0].worker])

    def _done_with(self, member: Member) -> None:
        """Count a worker's gradient as used or refused, and queue the worker for its next step."""
        self.membership.tick(member, self.steps_of_push(member.clock))
        self.protocol.pushed(member.index, self.view)
        self._note_through(member)
        self.turns.await_turn(member)

    def _answer(self, now: float) -> tuple[tuple[Reply, ...], tuple[Reply, ...]]:
        """Return the workers that start a step now, and the workers that have done their last step."""
        has_started = self.finished or self.turns.start(now)
        if not has_started or (self.has_ended_stage and not self.finished):  # workers join the next stage
            return (), ()
        return self.turns.take_ready()

    def _is_finished(self, worker: int) -> bool:
        return self.members[worker].phase is WorkerPhase.FINISHED

    def _note_through(self, member: Member) -> None:
        """Count a worker once when all its own steps are done and applied. Never happens under stop="global"."""
        if not member.is_through and not member.unapplied and self.budget.is_through(member.clock):
            member.is_through = True
            self.budget.through += 1

    def _snapshot(self, boundary: int | None) -> Snapshot | None:
        """Return the progress for the checkpoint that this order writes, or None for no checkpoint.

        boundary: the number of the epoch that the order completes, or None."""
        is_last = self.finished or self.has_ended_stage
        # The last checkpoint of the run or of a stage is tried again until it is whole. A start of a run that has ended
        # writes it again.
        if is_last and boundary is None and self._snapshots.is_wanted:
            boundary = self.budget.whole_epochs
        if not self._snapshots.take_due(self.version, ends_epoch=boundary is not None, is_last=is_last):
            return None
        position = self.budget.position
        position.clocks = {member.index: self._clock_on_resuming(member) for member in self.members}
        # The run continues while the checkpoint is written.
        frozen = deepcopy(position)
        return Snapshot(frozen, self.budget.epoch, boundary, self.finished and self.diverged is None)

    def _clock_on_resuming(self, member: Member) -> int:
        """Return the clock at which a worker continues if the run resumes from the checkpoint that is written now.

        Gradients that are in a sum but not in an update are computed again. A worker that is not a member gets the
        clock at which the protocol lets it rejoin."""
        clock = member.clock - member.unapplied
        is_away = member.phase in (WorkerPhase.ABSENT, WorkerPhase.JOINING)
        return self._clock_on_joining(clock) if is_away else clock

    def _clock_on_joining(self, clock: int) -> int:
        """Return the clock at which a lost worker continues: before a barrier its own, as no step may be left out."""
        has_barrier = self.barriers.first_after(clock) is not None
        return clock if has_barrier else self.protocol.clock_on_joining(clock, self.view)

    def _withdraw(self, member: Member) -> None:
        """Drop a worker's gradient unless it is in a sum, and forget which servers hold it or a join request."""
        self.ledger.withdraw(member.index)
        member.held_by = set()

    def _finish(self) -> None:
        """End the training and request the final checkpoint."""
        self._snapshots.is_wanted = True
        self._end()

    def _end(self) -> None:
        """End the run. Gradients that are not in a sum are dropped, and workers that compute end once they have pushed."""
        for member in self.members:
            if member.phase is WorkerPhase.PUSHED:
                self._withdraw(member)
                self.membership.move(member, WorkerPhase.READY)
        self.turns.end()
