"""The leader of an exchange among neighbours: decides who takes part, and keeps the run's log and checkpoints.

Each worker has a model of its own, so the run continues when a worker is lost: the next view leaves it out, and its
neighbours train without it. Workers begin only rounds below a horizon, which moves ahead of the fastest one. A worker
that joins takes part from the horizon on, with a neighbour's model of that round, so that no member can have begun it
without the newcomer. The restart of the leader rolls the run back to the newest checkpoint. A generation is the time from
a start or roll-back to the next."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from trainer.checkpoints.read import read_state
from trainer.config import Config, RunFacts
from trainer.home.folders import Folders
from trainer.leader.background import AtOnce, CallQueue
from trainer.leader.early_stop import EvaluationWatch, log_early_stop
from trainer.leader.leader import FAR_LOOK_S
from trainer.leader.peer_checkpoints import PeerTimes
from trainer.leader.peer_log import NO_MODEL, log_newcomer
from trainer.leader.peer_members import PeerMembership, add_their_newcomers, source_of_newcomer, view_body
from trainer.leader.peer_training import PeerTraining
from trainer.leader.process_table import ProcessTable
from trainer.leader.replica_writer import ReplicaWriter
from trainer.leader.restore import Restorer
from trainer.leader.silence import PauseWatch
from trainer.leader.status import peer_status
from trainer.leader.worker_messages import FromWorker, SendToWorker, introduction_of
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import ExampleLedger
from trainer.stages import build_stages
from trainer.transport.bodies.examples import unpack_examples
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.bodies.rounds import unpack_own_rounds
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import CopyReceipt
from trainer.transport.messages.gossip import PeerOffer, PoolRequest
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.neighbours import NeighbourView, ReplicaCopy, RoundGrant
from trainer.transport.messages.peers import LinkLoss, ModelCopy, PeerBeat, PeerJoin, Regroup, RoundReport, RunEnd
from trainer.transport.status import NOT_READY, RunStatus

logger = logging.getLogger(__name__)

MOST_REPEATED = 16  # rounds that a report repeats before this server tells the worker that it has them


class NeighbourLeader:
    """The control plane of a run in which each worker has a model of its own.

    Args:
        config, facts, folders: the run.
        send: sends to a worker that has joined.
        microseconds: a clock that is later than at any earlier start, for the numbers of generations and views.
        work: writes checkpoints in the background (default: at once, in the caller's thread).

    Attributes:
        writer: of the checkpoints.
        number: of the newest view.
        members: by worker.
        waiting: process and introduction of workers that asked to join before the run has begun.
        processes: the current processes of all workers.
        training: the present generation; None while no checkpoint is loaded.
        ledger: of the examples of the present generation; None before the first one, or without --example-ledger.
        module, has_handed_over: as of Leader; there is only one stage.
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
        self.config = config
        self.facts = facts
        self.folders = folders
        self.send = send
        self.microseconds = microseconds
        self.writer = ReplicaWriter(folders, work or AtOnce(), by_rule=config.run.patience is not None)
        self.root = folders.checkpoints
        # A look into a store costs requests.
        self.evaluations = EvaluationWatch(config, self.root, 0.0 if folders.is_local else FAR_LOOK_S)
        self.log = folders.work
        self.stage = build_stages(config, facts.num_workers, facts.rows)[0]
        self.has_handed_over = False
        self.generation = 0
        self.number = 0
        self.members: dict[int, PeerMembership] = {}
        self.waiting: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self.processes = ProcessTable()
        self.module: str | None = None
        self.training: PeerTraining | None = None
        self.ledger: ExampleLedger | None = None
        self._snapshot_at = 0.0  # when a snapshot was last asked for
        self._restorer = Restorer(config, folders, microseconds, fingerprint=facts.fingerprint)
        self._pauses = PauseWatch()

    # --- generations --------------------------------------------------------------------------------------------------

    def begin_generation(self, cause: str = "") -> None:
        """Begin a generation at the newest sound checkpoint, for which all workers must join again.

        If files cannot be read or written now, the next tick tries again. Raises DataError if there is no sound checkpoint.

        cause: why the run rolls back, for the log; unused at the start."""
        if self.training:
            self._restorer.leave(self.training.progress.version)
            self.training = None
        if self.ledger:
            self.ledger.discard()
        self.members = {}
        restored = self._restorer.begin_generation(self.generation, cause)
        if restored is None:
            return
        version, self.generation, stop, self.ledger = restored
        self.writer.generation = self.generation  # checkpoints that are still being written are void
        state = read_state(self.root, version)
        workers_with_model = sorted(PeerTimes.from_state(state).begun)
        log_event(self.log, "generation", generation=self.generation, version=version, models=workers_with_model)
        self.evaluations.begin(stop)
        if stop:
            log_early_stop(self.log, stop, state)
        self.training = PeerTraining(self.config, self.facts, self.folders, state, self.writer, self.ledger)

    def regroup(self, now: float) -> None:
        """Begin the work of this process: workers of an earlier server 0 learn from heartbeats that they must join."""
        self._snapshot_at = now
        self.number = self._next_number()

    def _begin(self, training: PeerTraining, now: float) -> None:
        """Begin the rounds of a generation, with all workers that have asked to take part."""
        training.has_begun = True
        for worker in sorted(self.waiting):
            self.number = self._next_number()  # each session has a number of its own
            process, introduction = self.waiting[worker]
            self.members[worker] = PeerMembership(process, self.number, training.version, None, introduction, now)
            training.progress.begin(worker)
        self.waiting = {}
        training.horizon.begin(now)
        self._send_views()
        for worker in self.members:
            self._send_first_model(training, worker)
        self._grant(now)

    def _send_first_model(self, training: PeerTraining, worker: int) -> None:
        """Send a worker its model of the checkpoint with which the generation began."""
        values, momentum = training.first_model(worker)
        session = self.members[worker].session
        self.send(worker, ModelCopy(session, training.version), values.tobytes(), momentum.tobytes())

    def _next_number(self) -> int:
        # No later server 0 may repeat it.
        return max(self.number + 1, self.microseconds())

    def _keep_ahead_of(self, number: int) -> None:
        """Raise the number of the view if ``number`` is from an earlier leader whose clock was ahead."""
        if number > self.number:
            self.number = number + 1
            self._send_views()

    # --- membership ---------------------------------------------------------------------------------------------------

    def hear(self, message: FromWorker, first: Body, last: Body, now: float) -> tuple[Message, bytes] | None:
        """Handle a message of a worker's current process, and return the answer to its connection, if there is one.

        Args:
            message: the message.
            first, last: its first and its last body.
            now: time of the message (seconds).

        Raises:
            MalformedMessageError: the message or a body is invalid.
        """
        member = self.members.get(message.worker)
        if member and member.process == message.process:
            member.last_message_at = now
        match message:
            case PeerJoin():
                self._join(message, introduction_of(first), now)
            case PeerBeat():
                return self._beat(message)
            case RoundReport():
                self._report(message, last, now)
            case ReplicaCopy():
                self._keep_copy(message, first, last, now)
            case PeerOffer():
                self._keep_examples(message, first)
            case PoolRequest():
                self._send_pools(message)
            case LinkLoss():
                pass  # the worker sends its last models again
            case CopyReceipt():
                raise MalformedMessageError(str(message))
        return None

    def _join(self, join: PeerJoin, introduction: Mapping[str, Any], now: float) -> None:
        """Handle a join request: of a new worker, or of a member that lacks its view or its first model."""
        worker = join.worker
        self._keep_ahead_of(join.number)
        if self.training and self.training.is_over:
            self.send(worker, RunEnd(self.number), b"")
            return
        member = self.members.get(worker)
        if member and member.process == join.process:
            if self.training and not member.has_model:
                self.send(worker, *self._view(self.training))
                if member.source is None:
                    self._send_first_model(self.training, worker)
            return
        # Its earlier process has ended, or this one has left a view of an earlier leader.
        if member:
            self._remove({worker}, now)
        if not self.training:
            return
        if self.training.has_begun:
            self._admit(self.training, worker, join.process, introduction, now)
        else:
            self.waiting[worker] = (join.process, introduction)
            self._begin_if_due(self.training, now)

    def _begin_if_due(self, training: PeerTraining, now: float) -> None:
        """Begin the generation once all workers are there, or the wait for missing ones is over."""
        if training.has_begun or not self.waiting:
            return
        if training.begin_at == math.inf:
            training.begin_at = now + self.config.processes.start_wait_s
        if len(self.waiting) == self.facts.num_workers or now >= training.begin_at:
            self._begin(training, now)

    def _admit(
        self, training: PeerTraining, worker: int, process: int, introduction: Mapping[str, Any], now: float
    ) -> None:
        """Make a worker that asked to join a member from the first round that is not yet granted.

        Does nothing if no round is left, or if no member has a model to copy; the worker repeats its request until it
        is answered.

        Args:
            training: the present generation.
            worker: its number.
            process: random number that identifies its process.
            introduction: address, host and memory of its process.
            now: time of the request (seconds).
        """
        first = training.horizon.until
        source = source_of_newcomer(self.members, training.plan, worker, first)
        if source is None or not training.admit(worker):
            return
        self.number = self._next_number()
        self.members[worker] = PeerMembership(process, self.number, first, source, introduction, now)
        # Before any round from the horizon on is granted.
        self._send_views()
        self._grant(now)

    def _remove(self, workers: Iterable[int], now: float) -> None:
        """Continue without some workers, and without newcomers whose first model was to come from one of them.

        If no worker is left that has a model, the run rolls back."""
        leavers = add_their_newcomers(self.members, workers)
        if not leavers or not self.training:
            return
        for worker in leavers:
            del self.members[worker]
            self.training.leave(worker)
        self.number = self._next_number()
        self._send_views()
        # Those that live learn it from this view too, and ask to join again.
        for worker in leavers:
            self.send(worker, Regroup(self.number), b"")
        if not any(member.has_model or member.source is None for member in self.members.values()):
            if not self.training.progress.finished:
                self.begin_generation(NO_MODEL)
            return
        self._advance(now)
        self._grant(now)

    def lost(self, worker: int, now: float) -> None:
        """Note that a worker's process has ended."""
        self.waiting.pop(worker, None)
        self._remove({worker}, now)

    def _beat(self, beat: PeerBeat) -> tuple[Message, bytes] | None:
        """Return the message that the sender of a heartbeat should already have, or None."""
        self._keep_ahead_of(beat.number)
        if self.training and self.training.is_over:
            return RunEnd(self.number), b""
        member = self.members.get(beat.worker)
        if self.training and member and member.process == beat.process:
            return self._view(self.training) if beat.number < self.number else None
        return (Regroup(self.number), b"") if beat.number else None

    def _view(self, training: PeerTraining) -> tuple[NeighbourView, bytes]:
        body = view_body(self.members, training.absent_from, training.version, training.plan)
        return NeighbourView(self.number, self.generation), body

    def _send_views(self) -> None:
        if self.training:
            view = self._view(self.training)
            for worker in self.members:
                self.send(worker, *view)

    def _member_of(self, worker: int, process: int, session: int) -> PeerMembership | None:
        member = self.members.get(worker)
        return member if member and (member.process, member.session) == (process, session) else None

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _report(self, message: RoundReport, body: Body, now: float) -> None:
        """Log the rounds that a worker has completed, and note that it has its first model.

        A worker with a first model or with changed links sends no model until it knows that this server has logged
        them. Its report is therefore answered even if no further rounds are granted. Raises MalformedMessageError."""
        member = self._member_of(message.worker, message.process, message.number)
        rounds = unpack_own_rounds(body)
        training = self.training
        if not member or not training:
            return
        worker = message.worker
        first = message.version - len(rounds)
        repeated = training.progress.members[worker].clock - first
        must_answer = not member.has_model or any(each.changed for each in rounds) or repeated > MOST_REPEATED
        if not member.has_model:
            member.has_model = True
            training.progress.start_round(worker)
            if member.source is not None:
                log_newcomer(self.log, worker, member.source, member.first)
        training.note_rounds(worker, first, rounds)
        self._advance(now)
        # Move the horizon before the fastest worker reaches it, so that it does not have to wait.
        if training.is_horizon_near():
            self._grant(now)
        elif must_answer:
            self._send_grant(training, worker)

    def _keep_copy(self, message: ReplicaCopy, values: Body, momentum: Body, now: float) -> None:
        """Keep a worker's model for a checkpoint.

        Args:
            message: worker and version of the model.
            values, momentum: the model's elements and the momentum of its parameters, float32.
            now: time of the message (seconds).

        Raises:
            MalformedMessageError: the bodies do not have the sizes of a model.
        """
        member = self._member_of(message.worker, message.process, message.session)
        training = self.training
        if not member or not training or message.version <= training.progress.version:
            return
        if (len(values), len(momentum)) != (4 * self.facts.elements, 4 * self.facts.num_parameters):
            raise MalformedMessageError(f"{len(values)} and {len(momentum)} bytes of a model")
        if training.checkpoints.is_due(message.version):
            model = np.frombuffer(values, np.float32), np.frombuffer(momentum, np.float32)
            training.keep_copy(message.version, message.worker, *model, now)
            self._advance(now)

    def _keep_examples(self, message: PeerOffer, body: Body) -> None:
        """Keep the examples that a worker gives to others. Raises MalformedMessageError."""
        gossip = self.training.gossip if self.training else None
        if gossip and self._member_of(message.worker, message.process, message.session):
            gossip.keep(message.worker, message.epoch, unpack_examples(body))

    def _send_pools(self, request: PoolRequest) -> None:
        """Send a worker the examples of all workers in the last rounds that it does not have."""
        gossip = self.training.gossip if self.training else None
        if gossip and self._member_of(request.worker, request.process, request.session):
            for message, body in gossip.answers(request):
                self.send(request.worker, message, body)

    def _advance(self, now: float) -> None:
        """Complete the rounds of the run that all members have completed."""
        if self.training and self.training.complete_rounds(self.members, now):
            self._snapshot_at = now

    def _grant(self, now: float) -> None:
        """Move the horizon ahead of the fastest worker, and send it to all members."""
        if self.training and self.training.has_begun:
            self.training.move_horizon(now)
            for worker in self.members:
                self._send_grant(self.training, worker)

    def _send_grant(self, training: PeerTraining, worker: int) -> None:
        """Send a member the horizon, and what this server has of it."""
        received = training.progress.members[worker].clock + 1 if self.members[worker].has_model else 0
        grant = RoundGrant(self.number, self.generation, training.horizon.until, received)
        self.send(worker, grant, pack_json(training.grant_details(worker)))

    def _want_snapshot(self, training: PeerTraining, now: float) -> None:
        """Have all workers send their models at the horizon."""
        self._snapshot_at = now
        if training.request_snapshot():
            self._grant(now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Handle everything that is due by time: silent workers, checkpoints, log lines, and messages to repeat."""
        timeout_s = self.config.worker_timeout_s
        is_silence_counted = self._pauses.tick(now, timeout_s)
        if self._restorer.retry_cause is not None:
            self.begin_generation(self._restorer.retry_cause)
        if self.training and self.evaluations.stops_early(now):
            self.training = None  # the updates after the decision are no roll-back, so nothing is logged as left
            # If the checkpoint of the decision is damaged, the run continues: every member must obey the next Regroup.
            self.number = self._next_number()
            self.begin_generation()
        if not self.training:
            return
        if self.training.is_over:
            for worker in self.processes.current:
                self.send(worker, RunEnd(self.number), b"")
            return
        self._begin_if_due(self.training, now)
        if is_silence_counted:
            self._lose_silent(now, timeout_s)
        # The loss of all workers has begun another generation, or could not.
        if self.training and now - self._snapshot_at >= self.config.run.checkpoint_every_s:
            self._want_snapshot(self.training, now)
        self.writer.tick(now)
        self._advance(now)
        self._grant(now)
        if self.training:
            self.training.journal.flush(now)

    def _lose_silent(self, now: float, timeout_s: float) -> None:
        silent = [worker for worker, member in self.members.items() if now - member.last_message_at > timeout_s]
        for worker in silent:
            logger.warning(f"worker {worker} has sent no heartbeat for {timeout_s:g} s")
        self._remove(silent, now)

    def end(self, now: float) -> None:
        """Have a checkpoint written, because the supervisor is about to stop the run."""
        if self.training:
            self._want_snapshot(self.training, now)

    # --- supervisors --------------------------------------------------------------------------------------------------

    def status(self, now: float) -> RunStatus:
        """Return the status for supervisors; not ready while no checkpoint is loaded."""
        if not self.training:
            return NOT_READY
        progress = self.training.progress
        journal = self.training.journal
        diverged = self.training.diverged
        return peer_status(
            progress,
            journal,
            len(self.members),
            journal.seconds(now),
            trained=progress.finished,
            # The supervisor ends server 0 of a finished run, so the final checkpoint must be complete before.
            finished=progress.finished and (diverged is not None or self._is_complete(now)),
            diverged=diverged,
        )

    def _is_complete(self, now: float) -> bool:
        """Return whether the final checkpoint is complete, and no evaluation can end the run earlier."""
        return self.writer.is_final_whole and self.evaluations.are_complete(now)

    def trouble(self, now: float) -> str | None:
        """Return why the last checkpoint failed, as text; None if it did not."""
        return self.writer.trouble
