"""The order of events: who takes part, which gradients are complete, which update comes next, who may go on.

Server 0 owns one coordinator. It turns arrivals into a sequence of orders that every server, itself included, carries
out one by one: so all slices have the same version whenever anybody reads them, a checkpoint is one state of one
moment, and a protocol decides once for all servers. A gradient exists when every server holds its part; what a worker
that died half-way left at some of them is never used. No sockets, no clock of its own: tests drive it in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from trainer.protocols.base import Gradient, Protocol, View


class Phase(Enum):
    """Where a worker stands. ABSENT: never seen, or lost. FINISHED: has done all its steps."""

    ABSENT = "absent"
    JOINING = "joining"
    READY = "ready"
    COMPUTING = "computing"
    PUSHED = "pushed"
    FINISHED = "finished"


@dataclass(frozen=True)
class Measured:
    """A worker's measurements of a step: mean loss, correct predictions, seconds of the step (waiting for its mini-batch
    included), and the seconds that another thread spent on making the mini-batch."""

    examples: int
    loss: float
    correct: int
    seconds: float
    read_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """One pushed gradient in the run's log; staleness = version it was applied to - version it was computed at."""

    version: int
    worker: int
    clock: int
    version_pulled: int
    staleness: int
    measured: Measured
    accepted: bool


@dataclass(frozen=True)
class Order:
    """What every server does next, in this order: apply the ``accepted`` gradients (worker, weight), write ``snapshot``,
    answer ``unblocked`` workers (worker, session, clock) with the parameters and those of ``stop`` with none."""

    sequence: int
    version: int
    learning_rate: float = 0.0
    accepted: tuple[tuple[int, float], ...] = ()
    unblocked: tuple[tuple[int, int, int], ...] = ()
    stop: tuple[tuple[int, int, int], ...] = ()
    snapshot: dict[str, Any] | None = None


@dataclass
class Member:
    """A worker as the coordinator knows it; ``held_by``: the servers that hold its join, or its gradient."""

    phase: Phase = Phase.ABSENT
    session: int = 0
    clock: int = 0
    pulled: int = 0
    held_by: set[int] = field(default_factory=set)
    measured: Measured | None = None
    seen: float = 0.0


@dataclass
class Position:
    """How far the run has come: what has been applied. All of it is in every checkpoint."""

    version: int = 0
    accepted: int = 0
    examples: int = 0
    clocks: dict[int, int] = field(default_factory=dict)


class Coordinator:
    """rate(epoch) is the whole factor of a summed gradient (a/n); steps: each worker's steps in all, and
    n times that many accepted gradients end the run under stop="global". by_examples: an update of several gradients
    weighs each by its number of examples, so that it is the mean over all of them. epoch_snapshots: a checkpoint is
    written at the end of every epoch."""

    def __init__(
        self,
        protocol: Protocol,
        *,
        num_workers: int,
        num_servers: int,
        steps: int,
        steps_per_epoch: int,
        rate: Callable[[float], float],
        stop: Literal["global", "local"] = "global",
        start_wait_s: float = 60.0,
        by_examples: bool = False,
        epoch_snapshots: bool = True,
        progress: Position | None = None,
    ) -> None:
        self.protocol, self.num_workers, self.num_servers = protocol, num_workers, num_servers
        self.steps, self.steps_per_epoch, self.rate, self.stop = steps, steps_per_epoch, rate, stop
        self.start_wait_s, self.by_examples, self.epoch_snapshots = start_wait_s, by_examples, epoch_snapshots
        self.progress = progress or Position()
        clocks = self.progress.clocks
        self.members = [Member(clock=clocks.get(worker, 0)) for worker in range(num_workers)]
        self.waiting: list[Gradient] = []
        self.records: list[Record] = []
        self.sequence = 0
        self.started = False
        self.finished = False
        self.diverged: Record | None = None
        self._first_join: float | None = None
        self._snapshot_wanted = False
        self._snapshot_version = self.progress.version
        if self._budget_spent():
            self._finish()

    @property
    def epoch(self) -> float:
        """Global epoch: accepted gradients / (n * mini-batches per epoch)."""
        return self.progress.accepted / (self.num_workers * self.steps_per_epoch)

    def join(self, server: int, worker: int, session: int, now: float) -> None:
        """A server holds a worker's join request. A later session of the same worker replaces the earlier one."""
        member = self.members[worker]
        if session < member.session:
            return
        if session > member.session or member.phase is Phase.ABSENT:
            self._withdraw(worker)
            member.session, member.phase = session, Phase.JOINING
        if member.phase is not Phase.JOINING:
            return
        member.held_by.add(server)
        member.seen = now
        if len(member.held_by) == self.num_servers:
            member.clock = self.protocol.clock_on_joining(member.clock, self._view())
            member.phase = Phase.READY
            self._first_join = now if self._first_join is None else self._first_join

    def push(
        self, server: int, worker: int, session: int, clock: int, now: float, measured: Measured | None = None
    ) -> bool:
        """A server holds its part of a gradient; server 0 adds what was measured. False: not of a step that is being
        waited for (from before the worker was lost, or from a run before this one)."""
        member = self.members[worker]
        if session != member.session or member.phase is not Phase.COMPUTING or clock != member.clock:
            return False
        member.held_by.add(server)
        member.measured = measured or member.measured
        member.seen = now
        if len(member.held_by) == self.num_servers:
            member.phase = Phase.PUSHED
            self.waiting.append(Gradient(worker, clock, member.pulled))
        return True

    def alive(self, worker: int, session: int, now: float) -> bool:
        """A heartbeat. False if this session does not take part, so the worker must join again."""
        member = self.members[worker]
        if session != member.session or member.phase is Phase.ABSENT:
            return False
        member.seen = now
        return True

    def lose(self, worker: int) -> None:
        """The worker is gone: what it pushed and no update has used goes with it, and nobody waits for its clock."""
        self._withdraw(worker)
        if self.members[worker].phase is not Phase.FINISHED:
            self.members[worker].phase = Phase.ABSENT

    def lose_silent(self, now: float, timeout_s: float) -> list[int]:
        """Lose every worker that gave no heartbeat for so long; returns them."""
        idle = (Phase.ABSENT, Phase.FINISHED)
        silent = [w for w, m in enumerate(self.members) if m.phase not in idle and now - m.seen > timeout_s]
        for worker in silent:
            self.lose(worker)
        return silent

    def request_snapshot(self) -> None:
        """The next order writes a checkpoint, if an update was made since the last."""
        self._snapshot_wanted = True

    def advance(self, now: float) -> Iterator[Order]:
        """Everything that can be decided now, order by order: what carrying out one shows may decide the next."""
        while order := self._next(now):
            yield order

    def converge(self) -> None:
        """The run has reached its end before its budget: gradients that are on their way are not used any more."""
        self._finish()

    def _next(self, now: float) -> Order | None:
        for gradient in [g for g in self.waiting if not self.protocol.admit(g, self._view())]:
            self._retire(gradient, accepted=False)
        take = self._take()
        rate = self.rate(self.epoch)
        weights = self._weights(take)
        boundary = self._use(take) if take else None
        unblocked, stop = self._unblocked(now)
        snapshot = self._snapshot(boundary)
        if not (take or unblocked or stop or snapshot):
            return None
        self.sequence += 1
        return Order(self.sequence, self.progress.version, rate, weights, unblocked, stop, snapshot)

    def _take(self) -> list[Gradient]:
        if self.finished or not self.waiting:
            return []
        broken = [g for g in self.waiting if not _is_finite(self.members[g.worker].measured)]
        if broken:  # a gradient of a loss that is no number would end every parameter
            self.diverged = self._record(broken[0], accepted=False)
            self.finished = True
            return []
        return list(self.protocol.take(self._view()))

    def _weights(self, take: Sequence[Gradient]) -> tuple[tuple[int, float], ...]:
        examples = [measured.examples if (measured := self.members[g.worker].measured) else 0 for g in take]
        mean = max(1, sum(examples)) / max(1, len(take))
        return tuple(
            (
                g.worker,
                self.protocol.weight(self.progress.version - g.version) * (count / mean if self.by_examples else 1),
            )
            for g, count in zip(take, examples, strict=True)
        )

    def _use(self, take: Iterable[Gradient]) -> int | None:
        """Count an update; returns the number of the epoch that it completes, if any."""
        before = int(self.epoch)
        for gradient in take:
            self._retire(gradient, accepted=True)
        self.progress.version += 1
        if self._budget_spent():
            self._finish()
        return int(self.epoch) if int(self.epoch) > before else None

    def _retire(self, gradient: Gradient, *, accepted: bool) -> None:
        self.waiting.remove(gradient)
        member = self.members[gradient.worker]
        record = self._record(gradient, accepted)
        self.records.append(record)
        member.clock += 1
        member.phase = Phase.READY
        if accepted:
            self.progress.accepted += 1
            self.progress.examples += record.measured.examples

    def _record(self, gradient: Gradient, accepted: bool) -> Record:
        measured = self.members[gradient.worker].measured
        assert measured, "server 0 holds a gradient only with what was measured"
        version = self.progress.version
        staleness = version - gradient.version
        return Record(
            version + accepted, gradient.worker, gradient.clock, gradient.version, staleness, measured, accepted
        )

    def _unblocked(self, now: float) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]:
        unblocked, stop = [], []
        for worker, member in enumerate(self.members):
            entry = (worker, member.session, member.clock)
            over = self.finished or (self.stop == "local" and member.clock >= self.steps)
            if over and member.phase in (Phase.READY, Phase.PUSHED):
                member.phase = Phase.FINISHED
                stop.append(entry)
            elif member.phase is Phase.READY and self._may_start(now) and self.protocol.may_go(worker, self._view()):
                unblocked.append(entry)
                member.phase, member.held_by, member.measured = Phase.COMPUTING, set(), None
                member.pulled = self.progress.version
        return tuple(unblocked), tuple(stop)

    def _may_start(self, now: float) -> bool:
        """All workers begin together, unless one keeps the others waiting for too long; BSP needs it anyway."""
        if not self.started:
            all_here = all(member.phase is not Phase.ABSENT for member in self.members)
            all_here = all_here and all(member.phase is not Phase.JOINING for member in self.members)
            waited = now - self._first_join if self._first_join is not None else 0.0
            self.started = all_here or waited >= self.start_wait_s
        return self.started

    def _snapshot(self, boundary: int | None) -> dict[str, Any] | None:
        wanted = self._snapshot_wanted and (self.finished or self.progress.version != self._snapshot_version)
        self._snapshot_wanted = False
        if (boundary is None or not self.epoch_snapshots) and not wanted:
            return None
        self._snapshot_version = self.progress.version
        self.progress.clocks = {worker: member.clock for worker, member in enumerate(self.members)}
        return {
            "version": self.progress.version,
            "accepted": self.progress.accepted,
            "examples": self.progress.examples,
            "epoch": self.epoch,
            "epoch_boundary": boundary,
            "final": self.finished and self.diverged is None,
            "clocks": {str(worker): clock for worker, clock in self.progress.clocks.items()},
        }

    def _view(self) -> View:
        away = (Phase.ABSENT, Phase.JOINING)
        members = {w: m for w, m in enumerate(self.members) if m.phase is not Phase.FINISHED}
        return View(
            self.progress.version,
            {worker: member.clock for worker, member in members.items()},
            frozenset(worker for worker, member in members.items() if member.phase in away),
            tuple(self.waiting),
        )

    def _withdraw(self, worker: int) -> None:
        self.waiting = [gradient for gradient in self.waiting if gradient.worker != worker]
        self.members[worker].held_by = set()

    def _budget_spent(self) -> bool:
        if self.stop == "local":
            return all(member.clock >= self.steps for member in self.members)
        return self.progress.accepted >= self.steps * self.num_workers

    def _finish(self) -> None:
        self.finished = self._snapshot_wanted = True


def _is_finite(measured: Measured | None) -> bool:
    return measured is None or abs(measured.loss) < float("inf")
