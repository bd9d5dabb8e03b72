"""The leader of an exchange without servers: decides which workers take part, and keeps the run's log and checkpoints.

Workers exchange among themselves and report completed rounds. The leader passes their reports to a coordinator of the
exchange's protocol, so that log, epochs and checkpoints are as in a run with servers. Within a view it passes on a round
only once all members have completed it. Otherwise the log could have a round whose model was lost with the only worker that
had it. When a worker is lost or started again, all workers leave their view. Once all have asked to join the next one, they
begin with the model of the highest version, whose rounds are passed on then. If no worker has a model, if the one with this
model is lost before the others have copied it, or if a snapshot that must be written is lost, they begin with the newest
checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainer.checkpoints.read import read_state
from trainer.checkpoints.write import WriteOutcome
from trainer.config import Config, RunFacts
from trainer.coordination.orders import Order, Round
from trainer.home.folders import Folders
from trainer.leader.background import CallQueue
from trainer.leader.leader import Leader
from trainer.leader.process_table import ProcessTable
from trainer.leader.training import Training
from trainer.leader.worker_messages import FromWorker, SendToWorker, introduction_of, reach_of
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.bodies.rounds import unpack_rounds
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import CopyReceipt, PeerView, Settlement, WantSnapshot, WriteCopy
from trainer.transport.messages.gossip import PeerOffer, PoolRequest
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.neighbours import ReplicaCopy
from trainer.transport.messages.peers import LinkLoss, PeerBeat, PeerJoin, Regroup, RoundReport, RunEnd

logger = logging.getLogger(__name__)


@dataclass
class JoinRequest:
    """A worker's join request for the next view.

    Attributes:
        process: a random number that identifies the worker's process.
        version: of its model, -1 if it has none of the present generation.
        introduction: address, host and memory, as other workers need them.
        copies: versions of which it keeps a snapshot.
        rounds: its last rounds, up to its version, that the leader has not settled.
    """

    process: int
    version: int
    introduction: Mapping[str, Any]
    copies: frozenset[int]
    rounds: list[Round] = field(default_factory=list)


@dataclass
class OpenView:
    """The present view.

    Attributes:
        message, body: what all members were sent.
        members: their join requests, by worker.
        completed: by worker, the number of rounds that it has completed.
    """

    message: PeerView
    body: bytes
    members: list[JoinRequest]
    completed: list[int]


class RoundsLeader(Leader):
    """The control plane of a run without servers.

    Args:
        config, facts, folders: the run.
        send: sends to a worker that has joined.
        work, microseconds: as in Leader.

    Attributes:
        number: of the newest view or Regroup. Each Regroup raises it to at least ``microseconds``, so that a later
            leader does not repeat it.
        view: the present view; None while workers ask to join the next one.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        folders: Folders,
        send: SendToWorker,
        microseconds: Callable[[], int],
        work: CallQueue | None = None,
    ) -> None:
        super().__init__(
            config,
            facts,
            folders,
            self._note_order,
            lambda followers, generation, version, stage: self.loaded(0, generation, self._now),
            read=_refuse_to_read,
            microseconds=microseconds,
            work=work,
        )
        self.send = send
        self.num_servers = 1  # a worker writes the whole model
        self.number = 0
        self.view: OpenView | None = None
        self.requests: dict[int, JoinRequest] = {}
        self.processes = ProcessTable()
        self._rounds: list[tuple[int, Round]] = []  # reported and not yet passed on, with their versions
        self._orders: dict[int, int] = {}  # sequence number of the order for a snapshot, by version
        self._wish = 0
        self._is_wanted = False
        self._is_settled = True
        self._now = 0.0

    # --- views --------------------------------------------------------------------------------------------------------

    def regroup(self, now: float) -> None:
        """Have all workers leave their view and ask to join the next one."""
        self._now = now
        self.number = max(self.number + 1, self.microseconds())
        self.view = None
        self.requests = {}
        if self.training:
            for worker in range(self.facts.num_workers):
                self.training.coordinator.lose(worker)
        for worker in self.processes.current:
            self.send(worker, Regroup(self.number), b"")

    def _keep_ahead_of(self, number: int, now: float) -> None:
        """Regroup under a later number if ``number`` is from an earlier leader whose clock was ahead."""
        if number > self.number:
            self.number = number
            self.regroup(now)

    def hear(self, message: FromWorker, first: Body, last: Body, now: float) -> tuple[Message, bytes] | None:
        """Handle a message of a worker's current process, and return the answer to its connection, if there is one.

        first, last: its first and its last body. Raises MalformedMessageError."""
        self._now = now
        answer: tuple[Message, bytes] | None = None
        match message:
            case PeerJoin():
                introduction = introduction_of(first)
                _check_copies(introduction)
                self.join(message, introduction, unpack_rounds(last, self.facts.num_workers), now)
            case PeerBeat():
                answer = self.beat(message.worker, message.number, now)
            # An earlier view's rounds come again with the join requests.
            case RoundReport(number=self.number) if self.view:
                self.view.completed[message.worker] = message.version
                self.report(message.version, unpack_rounds(last, self.facts.num_workers), now)
            case CopyReceipt():
                if message.outcome not in set(WriteOutcome):
                    raise MalformedMessageError(str(message))
                self.written(message.generation, message.version, WriteOutcome(message.outcome))
            case LinkLoss():
                self.link_lost(message.number, now)
            case ReplicaCopy() | PeerOffer() | PoolRequest():
                raise MalformedMessageError(str(message))
        return answer

    def join(self, join: PeerJoin, introduction: Mapping[str, Any], rounds: list[Round], now: float) -> None:
        """Handle a join request. The view begins once all workers have answered the same Regroup."""
        self._now = now
        worker = join.worker
        self._keep_ahead_of(join.number, now)
        if self._is_over():
            self.send(worker, RunEnd(self.number), b"")
            return
        if self.view:
            if join.number == self.number and self.view.members[worker].process == join.process:
                self.send(worker, self.view.message, self.view.body)  # it was lost
            else:
                self.regroup(now)
            return
        if join.number != self.number:
            self.send(worker, Regroup(self.number), b"")
            return
        # A roll-back has made models of other generations void.
        holds = join.holds - 1 if join.generation == self.generation else -1
        copies = frozenset(introduction["copies"]) if holds >= 0 else frozenset()
        self.requests[worker] = JoinRequest(join.process, holds, introduction, copies, rounds if holds >= 0 else [])
        self._open_view(now)

    def lost(self, worker: int, now: float) -> None:
        """Note that a worker's process has ended or is silent, which makes its join request void."""
        self._now = now
        self.requests.pop(worker, None)
        if self.view:
            self.regroup(now)

    def link_lost(self, number: int, now: float) -> None:
        """Note that a connection between two workers broke. number: of the view, in which messages may be lost."""
        if self.view and number == self.number:
            self.regroup(now)

    def _open_view(self, now: float) -> None:
        """Begin a view once all workers have asked for it and the coordinator has all rounds of the newest model.

        If it cannot have them, the view begins with the newest checkpoint."""
        if len(self.requests) < self.facts.num_workers or not self.training:
            return
        coordinator = self.training.coordinator
        source = max(self.requests, key=lambda worker: (self.requests[worker].version, -worker))
        version = self.requests[source].version
        if version >= 0:
            self._rounds = []  # those of an earlier view, or of a worker that has been lost since, are in no model
            self.report(version, self.requests[source].rounds, now)
        is_held = self._all_copies_are_held()
        if is_held and coordinator.version < version and self.training.snapshots.is_full:
            return  # the next tick tries again, when a checkpoint is written
        # Without a model, only a run that is still at its checkpoint can continue.
        if not is_held or coordinator.version != (self.version if version < 0 else version):
            self.begin_generation("no worker has the newest model, or a snapshot that is to be written")
            version = -1
        if not self.training:
            return  # the checkpoint cannot be read now; the tick tries again
        coordinator = self.training.coordinator
        self._send_view(None if version < 0 else source)
        for worker in range(self.facts.num_workers):
            coordinator.join(0, worker, self.number, now)
            coordinator.alive(worker, self.number, now)  # it may have joined long ago, and waited for a checkpoint
        self._advance(self.training, now)
        for snapshot in self._orders:
            self._request_write(snapshot)

    def _send_view(self, source: int | None) -> None:
        """Send the view to all members. source: the worker that has the model to begin with; None: the checkpoint's."""
        assert self.training
        position = self.training.coordinator.budget.position
        version = position.version
        members = [self.requests[worker] for worker in range(self.facts.num_workers)]
        # Everything that a member needs to continue from this version, so that no worker reads a checkpoint's state.
        clocks = [self.training.coordinator.members[worker].clock for worker in range(self.facts.num_workers)]
        copies = [
            worker for worker, member in self.requests.items() if source is not None and member.version != version
        ]
        body: dict[str, Any] = {
            "members": [{"process": member.process, **reach_of(member.introduction)} for member in members],
            "source": source,
            "copies": sorted(copies),
            "accepted": position.accepted,
            "examples": position.examples,
            "clocks": clocks,
            "until": self.training.coordinator.budget.until,
        }
        if self.training.gossip:
            body["gossip"] = self.training.gossip.rounds.memory
        message = PeerView(self.number, self.generation, version)
        self.view = OpenView(message, pack_json(body), members, [version] * len(members))
        self._rounds = []
        for worker in range(self.facts.num_workers):
            self.send(worker, message, self.view.body)

    def _all_copies_are_held(self) -> bool:
        """Return whether each snapshot that is not written yet is held by a worker that has joined."""
        copied_versions = {version for member in self.requests.values() for version in member.copies}
        if self.training and self._is_trained(self.training):  # the model itself is the last snapshot
            copied_versions |= {member.version for member in self.requests.values()}
        return set(self._orders) <= copied_versions

    # --- rounds -------------------------------------------------------------------------------------------------------

    def report(self, version: int, rounds: list[Round], now: float) -> None:
        """Queue the reports of completed rounds that are new. version: of the model after the last of them."""
        self._now = now
        next_round = self.training.coordinator.version if self.training else 0
        if self._rounds:
            next_round = self._rounds[-1][0] + 1
        self._rounds += [(at, each) for at, each in enumerate(rounds, version - len(rounds)) if at >= next_round]
        self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        """Pass reported rounds to the coordinator as pushes, in the order of workers.

        Passes on nothing while too many checkpoints are being written, as in Leader."""
        while self._rounds and self.training and not self.training.snapshots.is_full:
            version, each = self._rounds[0]
            # If the only worker that has completed it died, its log lines would be those of a lost model.
            if self.view and version >= min(self.view.completed):
                return
            coordinator = self.training.coordinator
            gossip = self.training.gossip
            if version != coordinator.version or coordinator.finished:
                self._rounds = []
                return
            del self._rounds[0]
            if not self.view:  # a report with a join request: the coordinator accepts it from members only
                for worker in range(self.facts.num_workers):
                    coordinator.join(0, worker, self.number, now)
                self._advance(self.training, now)
            # After the step before, which must not have them yet.
            if gossip:
                gossip.rounds.add_offers({worker: report.offer for worker, report in enumerate(each.reports)})
            for worker, measured in enumerate(each.reports):
                if each.snapshot and worker == self.facts.num_workers - 1:
                    self._is_wanted = False
                    coordinator.request_snapshot()  # together with the update that the last report completes
                member = coordinator.members[worker]
                coordinator.push(0, worker, member.session, member.clock, now, measured)
            self._is_settled = False
            self._advance(self.training, now)

    def _note_order(self, followers: object, order: Order) -> None:
        """Have a worker write the snapshot of an order, if it has one. Workers make the updates without orders."""
        if order.snapshot:
            self._orders[order.version] = order.sequence
            self._request_write(order.version)

    def _request_write(self, version: int) -> None:
        """Tell a worker that has a copy of a snapshot to write it: it joined with one, or made one in a round since."""
        if not self.view:
            writers = [worker for worker, request in self.requests.items() if version in request.copies]
        else:
            joined_at = self.view.message.version
            members = enumerate(self.view.members)
            writers = [worker for worker, member in members if version > joined_at or version in member.copies]
            # If no round is left, the model of every member is the last snapshot.
            writers = writers or [0]
        if writers:
            self.send(writers[0], WriteCopy(self.generation, version), b"")

    def written(self, generation: int, version: int, outcome: WriteOutcome) -> None:
        """Note that a worker has written a snapshot, or failed to."""
        sequence = self._orders.pop(version, None) if generation == self.generation else None
        if sequence is not None:
            self.wrote(0, generation, sequence, outcome)
            self._is_settled = False

    # --- time ---------------------------------------------------------------------------------------------------------

    def begin_generation(self, cause: str = "") -> None:
        """Begin a new generation with the newest checkpoint; all models that workers hold are void."""
        self._orders = {}
        self._rounds = []
        for joined in self.requests.values():
            joined.version = -1
            joined.copies = frozenset()
            joined.rounds = []
        super().begin_generation(cause)

    def _enter_next_stage(self) -> None:
        super()._enter_next_stage()
        # A rule that has not decided leaves the run in this stage, with a new generation.
        if not self.has_handed_over:
            self.regroup(self._now)

    def loaded(self, index: int, generation: int, now: float) -> None:
        """Continue the run from its checkpoint. A final checkpoint counts as written, so no worker writes it again."""
        super().loaded(index, generation, now)
        if self.training and self.training.coordinator.finished and read_state(self.checkpoints, self.version).final:
            self.training.snapshots.is_final_whole = True

    def tick(self, now: float) -> None:
        """Handle everything that is due by time: silent workers, checkpoints, log lines, and messages to repeat."""
        self._now = now
        super().tick(now)
        # Each of these messages may have been lost with a connection, and repeating it does no harm.
        for version in self._orders:
            self._request_write(version)
        if not self.view:
            self._open_view(now)
        else:
            self._pass_on(now)
        if not self.training or not self.view:
            return
        if self._is_over():
            for worker in range(self.facts.num_workers):
                self.send(worker, RunEnd(self.number), b"")
            return
        if self._is_wanted:
            self.send(0, WantSnapshot(self.number, self._wish), b"")
        if not self._is_settled:
            self._is_settled = True
            pending = pack_json({"pending": sorted(self._orders)})
            for worker in range(self.facts.num_workers):
                self.send(worker, Settlement(self.generation, self.training.coordinator.version), pending)

    def keep(self, now: float) -> None:
        """Write the log lines that are due, and request the checkpoint if one is: the snapshot of a coming round."""
        training = self.training
        if not training:
            return
        if self._is_trained(training):
            super().keep(now)
            return
        if now - self._snapshot_at >= self.config.run.checkpoint_every_s and not training.snapshots.under_way:
            self._want_snapshot(now)
        self._advance(training, now)
        if self.training is training:
            training.journal.flush(now)

    def end(self, now: float) -> None:
        """Have a checkpoint written, because the supervisor is about to stop the run."""
        if self.training and self._is_trained(self.training):
            super().end(now)
        elif self.training:
            self._want_snapshot(now)

    def _is_trained(self, training: Training) -> bool:
        """Return whether the run or its stage has no rounds left."""
        return training.coordinator.finished or training.coordinator.has_ended_stage

    def _want_snapshot(self, now: float) -> None:
        """Ask worker 0 to end its next round with a snapshot. The wish stands until a round with one is reported.

        ``_wish`` numbers the wishes, so that worker 0 makes one snapshot however often it gets the message."""
        self._snapshot_at = now
        if not self._is_wanted:
            self._is_wanted = True
            self._wish += 1
        if self.view:
            self.send(0, WantSnapshot(self.number, self._wish), b"")

    def _lose_silent(self, training: Training, now: float, timeout_s: float) -> None:
        if not self.view:
            return
        for worker in training.coordinator.membership.silent(now, timeout_s):
            logger.warning(f"worker {worker} has sent no heartbeat for {timeout_s:g} s")
            self.lost(worker, now)

    def beat(self, worker: int, number: int, now: float) -> tuple[Message, bytes] | None:
        """Note a heartbeat of a worker's current process, and return the message that it should already have, or None.

        The answer makes up for a Regroup, a view or a RunEnd that was lost. number: of the worker's view."""
        self._keep_ahead_of(number, now)
        if self.training and self.view:
            self.training.coordinator.alive(worker, self.number, now)
        if self._is_over():
            return RunEnd(self.number), b""
        if not self.view:
            return (Regroup(self.number), b"") if number < self.number else None
        if self.view.members[worker].process != self.processes.current[worker]:
            return Regroup(self.number), b""
        return (self.view.message, self.view.body) if number < self.number else None

    def _is_over(self) -> bool:
        return self.status(self._now).finished


def _refuse_to_read() -> NoReturn:
    raise AssertionError("there is no --tolerance")


def _check_copies(introduction: Mapping[str, Any]) -> None:
    copies = introduction.get("copies")
    if not isinstance(copies, list) or not all(isinstance(version, int) for version in copies):
        raise MalformedMessageError("the copies of a worker")
