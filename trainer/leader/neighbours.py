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
from functools import partial
from typing import Any

import numpy as np

from pipeline.core.errors import JobError
from trainer.checkpoints.decisions import stop_of
from trainer.checkpoints.prune import go_back
from trainer.checkpoints.read import read_slice_range, read_state
from trainer.checkpoints.replica_file import ReplicaFile
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.coordination.peer_progress import PeerProgress
from trainer.exchange.mixing import TopologyPlan, links_by_worker
from trainer.gossip.rounds import Examples
from trainer.gossip.schedule import DELAY
from trainer.home.folders import Folders
from trainer.leader.background import AtOnce, CallQueue
from trainer.leader.early_stop import EvaluationWatch, log_early_stop
from trainer.leader.leader import FAR_LOOK_S
from trainer.leader.peer_checkpoints import EARLIER_PLANS, PeerCheckpoints, PeerTimes, begin_peers, budget_of, plan_of
from trainer.leader.peer_gossip import PeerGossip
from trainer.leader.peer_log import log_links, log_newcomer
from trainer.leader.peer_members import PeerMembership, view_body
from trainer.leader.peer_status import describe_divergence, status_of
from trainer.leader.process_table import ProcessTable
from trainer.leader.replica_writer import ReplicaWriter
from trainer.leader.rounds import Body, FromWorker, SendToWorker, introduction_of
from trainer.rules import worker_rate
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import ExampleLedger, begin_ledger
from trainer.runlog.journal import Journal
from trainer.stages import build_stages
from trainer.transport.bodies.examples import pack_examples, unpack_examples
from trainer.transport.bodies.json_object import pack_json
from trainer.transport.bodies.rounds import unpack_own_rounds
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import CopyReceipt
from trainer.transport.messages.gossip import GossipPool, PeerOffer, PoolRequest
from trainer.transport.messages.heads import Message
from trainer.transport.messages.neighbours import NeighbourView, ReplicaCopy, RoundGrant
from trainer.transport.messages.peers import LinkLoss, ModelCopy, PeerBeat, PeerJoin, Regroup, RoundReport, RunEnd
from trainer.transport.status import NOT_READY, RunStatus

logger = logging.getLogger(__name__)

AHEAD_S = 1.0  # time that the fastest worker takes to the horizon
MOST_AHEAD = 10_000  # rounds from the fastest worker to the horizon
LEAST_AHEAD = 2
MOST_REPEATED = 16  # rounds that a report repeats before this server tells the worker that it has them
RATE_S = 1.0  # between two measurements of the fastest worker's speed
BURST_S = 0.02  # the shortest time by which rounds are divided, because one report can have several
SEARCHED_ROUNDS = 64  # that are searched for a newcomer's next neighbours
NO_MODEL = "all workers were lost at the same time"


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
        until: the first round that is not granted.
        members: by worker.
        waiting: introduction and process of workers that asked to join before the run has begun.
        processes: the current processes of all workers.
        ledger: of the examples of the present generation; None before the first one, or without --example-ledger.
        gossip: the rounds in which workers exchange examples; None if they do not.
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
        self.evaluations = EvaluationWatch(config, self.root, 0.0 if folders.is_local else FAR_LOOK_S)
        self.log = folders.work
        self.stage = build_stages(config, facts.num_workers, facts.rows)[0]
        self.has_handed_over = False
        self.steps = config.steps_per_worker(facts.rows)
        self.steps_per_epoch = config.steps_per_epoch(facts.rows)
        self.generation = 0
        self.number = 0
        self.until = 0
        self.members: dict[int, PeerMembership] = {}
        self.waiting: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self.processes = ProcessTable()
        self.module: str | None = None
        self.progress: PeerProgress | None = None  # None while no checkpoint is loaded
        self.journal: Journal
        self.ledger: ExampleLedger | None = None
        self.gossip: PeerGossip | None = None
        self.checkpoints: PeerCheckpoints
        self.plan: TopologyPlan
        self.version = 0  # of the checkpoint with which the generation began
        self._mean: tuple[Float32s, Float32s]  # values and momentum of that checkpoint
        self._file_of: dict[int, ReplicaFile] = {}  # its models, by workers that have one
        self._has_begun = False  # whether the members of the generation's begin are known
        self._begin_at = math.inf  # when it begins without missing workers
        self._bodies: list[tuple[Examples, bytes]] = []  # the last examples of pools that were sent, and packed
        self._unused: dict[int, set[int]] = {}  # by worker, its neighbours whose models it does not use
        self._absent_from: dict[int, int] = {}  # the first round that a worker has missed, until it takes part again
        self._sent_bytes = 0
        self._sent_in: dict[int, int] = {}  # bytes by round, of incomplete rounds
        self._ahead = LEAST_AHEAD
        self._measured = (0.0, 0)  # time and furthest round at the last measurement of the speed
        self._snapshot_at = 0.0
        self._retry_cause: str | None = None
        self._version_before: int | None = None
        self._ticked = self._patient_until = 0.0

    # --- generations --------------------------------------------------------------------------------------------------

    def begin_generation(self, cause: str = "") -> None:
        """Begin a generation at the newest sound checkpoint, for which all workers must join again.

        If files cannot be read or written now, the next tick tries again. Raises JobError if there is no checkpoint.

        cause: why the run rolls back, for the log; unused at the start."""
        if self.progress:
            self._version_before = self.progress.version
            self.progress = None
        if self.ledger:
            self.ledger.discard()
        self.members = {}
        self._retry_cause = None
        try:
            # The clock is the lower bound, because a server 0 that died may have used a generation that is in no file.
            stop = stop_of(self.root, self.config)
            restored = go_back(self.root, max(self.generation + 1, self.microseconds()), stop=stop)
            if restored:
                self.ledger = begin_ledger(self.config, self.folders.home, restored[1], restored[0])
        except OSError as error:
            logger.warning(f"{self.root}: going back to a checkpoint is tried again: {error}")
            self._retry_cause = cause
            return
        if not restored:
            raise JobError(f"{self.root} holds no whole checkpoint, not even the first; start with --overwrite")
        self.version, self.generation = restored
        self.writer.generation = self.generation
        if self._version_before is not None:
            log_event(self.log, "rollback", from_version=self._version_before, to_version=self.version, cause=cause)
            self._version_before = None
        state = read_state(self.root, self.version)
        workers_with_model = sorted(PeerTimes.from_state(state).begun)
        log_event(self.log, "generation", generation=self.generation, version=self.version, models=workers_with_model)
        self.evaluations.begin(stop)
        if stop:
            log_early_stop(self.log, stop, state)
        self._load(state)

    def _load(self, state: RunState) -> None:
        """Continue the run from the state of a checkpoint. A final one counts as written."""
        facts = self.facts
        state = begin_peers(self.config, facts, self.root, state)
        self.plan = plan_of(self.config, facts, self.root, state)
        earlier = state.memory.get(EARLIER_PLANS, ())
        self.checkpoints = PeerCheckpoints(self.config, facts, self.folders, self.generation, self.plan, earlier)
        budget = budget_of(self.config, facts, state)
        # No shards are read here: a worker that returns reports the passes that have ended without it.
        self.progress = PeerProgress(budget, partial(worker_rate, self.config, facts), lambda worker, round: None)
        if self.config.data.gossip:
            self.gossip = PeerGossip(self.log, budget.position.gossip, facts.num_workers)
        self.journal = Journal(
            self.log,
            self.progress,
            self.generation,
            state.seconds,
            facts.fingerprint,
            classifies=facts.classifies,
            ledger=self.ledger,
        )
        self.until = state.version
        self._has_begun = False
        self._begin_at = math.inf
        times = PeerTimes.from_state(state)
        self._mean = read_slice_range(self.root, state.version, 0, state.total)
        file = self.checkpoints.models_of(state)
        self._file_of = dict.fromkeys(times.begun, file) if file else {}
        self._sent_bytes = times.sent_bytes
        self._unused = {}
        self._absent_from = {worker: clock for worker, clock in state.clocks.items() if clock < state.version}
        self._sent_in = {}
        self._ahead = LEAST_AHEAD
        self.writer.begin(is_final_whole=state.final, ledger=self.ledger)

    def regroup(self, now: float) -> None:
        """Begin the work of this process: workers of an earlier server 0 learn from heartbeats that they must join."""
        self._snapshot_at = now
        self.number = self._next_number()

    def _begin(self, now: float) -> None:
        """Begin the rounds of a generation, with all workers that have asked to take part."""
        assert self.progress
        self._has_begun = True
        for worker in sorted(self.waiting):
            self.number = self._next_number()  # each session has a number of its own
            process, introduction = self.waiting[worker]
            self.members[worker] = PeerMembership(process, self.number, self.version, None, introduction, now)
            self.progress.begin(worker)
        self.waiting = {}
        self._measured = (now, self.version)
        self._send_views()
        for worker in self.members:
            self._send_first_model(worker)
        self._grant(now)

    def _send_first_model(self, worker: int) -> None:
        """Send a worker its model of the checkpoint with which the generation began.

        A worker that has none there begins with the mean of all models."""
        values, momentum = self._mean
        if worker in self._file_of:
            values = np.array(self._file_of[worker].values[worker])
            momentum = np.array(self._file_of[worker].momentum[worker])
        session = self.members[worker].session
        self.send(worker, ModelCopy(session, self.version), values.tobytes(), momentum.tobytes())

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
        if self._is_over():
            self.send(worker, RunEnd(self.number), b"")
            return
        member = self.members.get(worker)
        if member and member.process == join.process:
            if not member.has_model:
                self.send(worker, *self._view())
                if member.source is None:
                    self._send_first_model(worker)
            return
        # Its earlier process has ended, or this one has left a view of an earlier leader.
        if member:
            self._remove({worker}, now)
        if not self.progress:
            return
        if self._has_begun:
            self._admit(worker, join.process, introduction, now)
        else:
            self.waiting[worker] = (join.process, introduction)
            self._begin_if_due(now)

    def _begin_if_due(self, now: float) -> None:
        """Begin the generation once all workers are there, or the wait for missing ones is over."""
        if self._has_begun or not self.progress or not self.waiting:
            return
        if self._begin_at == math.inf:
            self._begin_at = now + self.config.processes.start_wait_s
        if len(self.waiting) == self.facts.num_workers or now >= self._begin_at:
            self._begin(now)

    def _admit(self, worker: int, process: int, introduction: Mapping[str, Any], now: float) -> None:
        """Make a worker that asked to join a member from the first round that is not yet granted (``until``).

        Does nothing if no round is left, or if no member has a model to copy; the worker repeats its request until it
        is answered.

        Args:
            worker: its number.
            process: random number that identifies its process.
            introduction: address, host and memory of its process.
            now: time of the request (seconds).
        """
        progress = self.progress
        assert progress
        source = self._source(worker)
        if source is None or self.until >= self.steps or progress.admit(worker, self.until) is None:
            return
        self.number = self._next_number()
        self.members[worker] = PeerMembership(process, self.number, self.until, source, introduction, now)
        # The newcomer uses the models of all its neighbours again.
        self._unused.pop(worker, None)
        # Before any round from the horizon on is granted.
        self._send_views()
        self._grant(now)

    def _source(self, worker: int) -> int | None:
        """Return the member whose model a newcomer gets: one of its next neighbours, or else any that has a model."""
        present = [other for other, member in self.members.items() if member.has_model]
        for round in range(self.until, self.until + SEARCHED_ROUNDS):
            for other, _ in links_by_worker(self.plan.edges(round)).get(worker, ()):
                if other in present:
                    return other
        return min(present, default=None)

    def _remove(self, workers: Iterable[int], now: float) -> None:
        """Continue without some workers, and without newcomers whose first model was to come from one of them.

        If no worker is left that has a model, the run rolls back."""
        leavers = set(workers) & set(self.members)
        if not leavers or not self.progress:
            return
        leavers |= {
            worker for worker, member in self.members.items() if member.source in leavers and not member.has_model
        }
        for worker in leavers:
            del self.members[worker]
            self._absent_from.setdefault(worker, self.progress.members[worker].clock)
            self.progress.leave(worker)
        self.number = self._next_number()
        self._send_views()
        # Those that live learn it from this view too, and ask to join again.
        for worker in leavers:
            self.send(worker, Regroup(self.number), b"")
        if not any(member.has_model or member.source is None for member in self.members.values()):
            if not self.progress.finished:
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
        if self._is_over():
            return RunEnd(self.number), b""
        member = self.members.get(beat.worker)
        if member and member.process == beat.process:
            return self._view() if beat.number < self.number else None
        return (Regroup(self.number), b"") if beat.number else None

    def _view(self) -> tuple[NeighbourView, bytes]:
        body = view_body(self.members, self._absent_from, self.version, self.plan)
        return NeighbourView(self.number, self.generation), body

    def _send_views(self) -> None:
        view = self._view()
        for worker in self.members:
            self.send(worker, *view)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _report(self, message: RoundReport, body: Body, now: float) -> None:
        """Log the rounds that a worker has completed, and note that it has its first model.

        A worker with a first model or with changed links sends no model until it knows that this server has logged
        them. Its report is therefore answered even if no further rounds are granted. Raises MalformedMessageError."""
        member = self._member_of(message.worker, message.process, message.number)
        rounds = unpack_own_rounds(body)
        if not member or not self.progress:
            return
        worker = message.worker
        repeated = self.progress.members[worker].clock - (message.version - len(rounds))
        must_answer = not member.has_model or any(each.changed for each in rounds) or repeated > MOST_REPEATED
        if not member.has_model:
            member.has_model = True
            self.progress.start_round(worker)
            if member.source is not None:
                log_newcomer(self.log, worker, member.source, member.first)
        # A report repeats the rounds of earlier reports until the worker learns that this server has them.
        for round, each in enumerate(rounds, message.version - len(rounds)):
            if round == self.progress.members[worker].clock and not self.progress.finished:
                log_links(self.log, worker, round, each.changed, self._unused)
                self.progress.finish(worker, each.report)
                self._absent_from.pop(worker, None)
                self._sent_in[round] = self._sent_in.get(round, 0) + each.sent_bytes
        self._advance(now)
        # Move the horizon when the fastest worker is halfway to it, so that it does not have to wait.
        is_near = self.progress.furthest_started + self._reach() // 2 >= self.until
        if is_near and (self.gossip is None or self._limit(self.progress) > self.until):
            self._grant(now)
        elif must_answer:
            self._send_grant(worker)

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
        if not member or not self.progress or message.version <= self.progress.version:
            return
        if (len(values), len(momentum)) != (4 * self.facts.elements, 4 * self.facts.num_parameters):
            raise MalformedMessageError(f"{len(values)} and {len(momentum)} bytes of a model")
        if not self.checkpoints.is_due(message.version):
            return
        seconds = self.journal.seconds(now)
        try:
            self.checkpoints.put(
                message.version,
                message.worker,
                np.frombuffer(values, np.float32),
                np.frombuffer(momentum, np.float32),
                seconds,
                seconds,
            )
        except OSError as error:
            # The run rolls back further without it. Without the last one it would have no end, so a worker sends that
            # again.
            self.writer.trouble = f"the checkpoint of version {message.version} is not written: {error}"
            self.checkpoints.give_up(message.version)
        self._advance(now)

    def _keep_examples(self, message: PeerOffer, body: Body) -> None:
        """Keep the examples that a worker gives to others. Raises MalformedMessageError."""
        if self.gossip and self._member_of(message.worker, message.process, message.session):
            self.gossip.keep(message.worker, message.epoch, unpack_examples(body))

    def _send_pools(self, request: PoolRequest) -> None:
        """Send a worker the examples of all workers in the last rounds that it does not have."""
        worker = request.worker
        if not self.gossip or not self._member_of(worker, request.process, request.session):
            return
        for pool in self.gossip.schedule.pools(worker):
            if pool.round >= request.round:
                own = pool.own_begin, pool.own_end
                message = GossipPool(worker, request.session, pool.round, pool.clock, pool.first, *own)
                self.send(worker, message, self._packed(pool.examples))

    def _packed(self, examples: Examples) -> bytes:
        """Return examples as the body of a message, of which one serves all workers."""
        for each, body in self._bodies:
            if each is examples:
                return body
        self._bodies = [*self._bodies[-1:], (examples, pack_examples(examples))]
        return self._bodies[-1][1]

    def _member_of(self, worker: int, process: int, session: int) -> PeerMembership | None:
        member = self.members.get(worker)
        return member if member and (member.process, member.session) == (process, session) else None

    def _advance(self, now: float) -> None:
        """Complete the rounds of the run that all members have completed, and begin the checkpoints at their ends.

        A round waits until the models of all members are here, if they belong to a checkpoint."""
        progress = self.progress
        while progress and not self.writer.is_full and self._has_copies(progress.version + 1):
            if not progress.complete_round():
                return
            version = progress.version
            if self.gossip:
                self.gossip.count(progress)  # before the checkpoint of this version
            self._sent_bytes += self._sent_in.pop(version - 1, 0)
            self.journal.note(progress.boundary, now)
            if self.checkpoints.is_pending(version):
                self._write(progress, now)

    def _has_copies(self, version: int) -> bool:
        """Return whether all members that begin with a version have sent their models of it, if they are needed."""
        if not self.checkpoints.is_due(version):
            return True
        needed = (worker for worker, member in self.members.items() if member.first <= version)
        return all(self.checkpoints.has(version, worker) for worker in needed)

    def _write(self, progress: PeerProgress, now: float) -> None:
        """Write the checkpoint of the present version in the background."""
        # Before the checkpoint, so that the log of a run that resumes from it has all earlier pushes.
        self.journal.write_pushes()
        self._snapshot_at = now
        seconds = self.journal.seconds(now)
        replicas = self.checkpoints.take(progress, origin=0.0, now=seconds, sent_bytes=self._sent_bytes)
        self.writer.submit(self.checkpoints, replicas)

    # --- the horizon --------------------------------------------------------------------------------------------------

    def _grant(self, now: float) -> None:
        """Move the horizon ahead of the fastest worker, and send it to all members."""
        progress = self.progress
        if not progress or not self._has_begun:
            return
        measured_at, furthest = self._measured
        elapsed = now - measured_at
        ahead = math.ceil((progress.furthest_started - furthest) / max(elapsed, BURST_S) * AHEAD_S)
        if elapsed >= RATE_S:
            self._ahead = min(MOST_AHEAD, max(LEAST_AHEAD, ahead))
            self._measured = (now, progress.furthest_started)
        else:
            # At the start, and after a wait for a lost worker, the last measurement is too low. Until the next one, fast
            # workers would ask for a horizon every second round.
            self._ahead = min(MOST_AHEAD, max(self._ahead, min(2 * self._ahead, ahead)))
        self.until = max(self.until, min(self._limit(progress), progress.furthest_started + self._ahead))
        for worker in self.members:
            self._send_grant(worker)

    def _limit(self, progress: PeerProgress) -> int:
        """Return the first round that may not be granted now.

        With an exchange of examples it is the first one whose examples are not known."""
        return min(self.steps, self.gossip.most_rounds(progress.version)) if self.gossip else self.steps

    def _reach(self) -> int:
        """Return the number of rounds from the fastest worker to a horizon that has just been moved."""
        return min(self._ahead, DELAY) if self.gossip else self._ahead

    def _send_grant(self, worker: int) -> None:
        """Send a member the horizon, and what this server has of it."""
        progress = self.progress
        assert progress
        due = sorted(version for version in self.checkpoints.extra if version > progress.version)
        received = progress.members[worker].clock + 1 if self.members[worker].has_model else 0
        # With its own copies here, or complete, a worker need not keep them.
        have = [version for version in self.checkpoints.pending if self.checkpoints.has(version, worker)]
        details: dict[str, Any] = {"due": due, "have": have, "complete": progress.version}
        if self.gossip:
            details["pools"] = self.gossip.schedule.begins()
        body = pack_json(details)
        self.send(worker, RoundGrant(self.number, self.generation, self.until, received), body)

    def _want_snapshot(self, now: float) -> None:
        """Have all workers send their models at the horizon, which is the same round for all of them."""
        self._snapshot_at = now
        if self._has_begun and self.until < self.steps:
            self.checkpoints.extra.add(self.until)
            self._grant(now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Handle everything that is due by time: silent workers, checkpoints, log lines, and messages to repeat."""
        timeout_s = self.config.worker_timeout_s
        if now - self._ticked > timeout_s / 4:
            self._patient_until = now + timeout_s  # this server was suspended, and has heartbeats to read first
        self._ticked = now
        if self._retry_cause is not None:
            self.begin_generation(self._retry_cause)
        if self.progress and self.evaluations.stops_early(now):
            self.progress = None  # the updates after the decision are no roll-back, so nothing is logged as left
            self.begin_generation()
        if not self.progress:
            return
        if self._is_over():
            for worker in self.processes.current:
                self.send(worker, RunEnd(self.number), b"")
            return
        self._begin_if_due(now)
        if now >= self._patient_until:
            self._lose_silent(now, timeout_s)
        if now - self._snapshot_at >= self.config.run.checkpoint_every_s:
            self._want_snapshot(now)
        self.writer.tick(now)
        self._advance(now)
        self._grant(now)
        self.journal.flush(now)

    def _lose_silent(self, now: float, timeout_s: float) -> None:
        silent = [worker for worker, member in self.members.items() if now - member.last_message_at > timeout_s]
        for worker in silent:
            logger.warning(f"worker {worker} has sent no heartbeat for {timeout_s:g} s")
        self._remove(silent, now)

    def end(self, now: float) -> None:
        """Have a checkpoint written, because the supervisor is about to stop the run."""
        if self.progress:
            self._want_snapshot(now)

    # --- supervisors --------------------------------------------------------------------------------------------------

    def status(self, now: float) -> RunStatus:
        """Return the status for supervisors; not ready while no checkpoint is loaded."""
        progress = self.progress
        if not progress:
            return NOT_READY
        diverged = self._diverged(progress)
        return status_of(
            progress,
            self.journal,
            len(self.members),
            self.journal.seconds(now),
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

    def _diverged(self, progress: PeerProgress) -> str | None:
        """Return in words why the run has diverged, or None if it has not."""
        return describe_divergence(progress) or self.writer.not_finite

    def _is_over(self) -> bool:
        progress = self.progress
        return (
            progress is not None
            and progress.finished
            and (self.writer.is_final_whole or self._diverged(progress) is not None)
        )
