"""The control plane on server 0: runs the coordinator, loads one checkpoint on all servers, answers supervisors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trainer.checkpoints.read import read_state
from trainer.checkpoints.state import RunState
from trainer.checkpoints.write import WriteOutcome
from trainer.config import Config, RunFacts
from trainer.coordination.convergence import Convergence, Read
from trainer.coordination.orders import Order, Snapshot, StepMeasurements
from trainer.gossip.rounds import Examples, Pool
from trainer.home.folders import Folders
from trainer.leader.background import AtOnce, CallQueue
from trainer.leader.durable_log import secure_log
from trainer.leader.early_stop import EvaluationWatch, log_early_stop
from trainer.leader.evaluator_news import EvaluatorNews
from trainer.leader.next_stage import SwitchWatch, log_stage, next_stage
from trainer.leader.restore import Restorer
from trainer.leader.server_gossip import ServerGossip
from trainer.leader.silence import PauseWatch
from trainer.leader.snapshots import Snapshots
from trainer.leader.training import Training
from trainer.rules import build_coordinator
from trainer.runlog.events import log_event
from trainer.runlog.example_ledger import ExampleLedger
from trainer.runlog.journal import Journal
from trainer.stages import build_stages
from trainer.transport.status import NOT_READY, RunStatus

logger = logging.getLogger(__name__)

RETRY_FINAL_S = 5.0
FAR_LOOK_S = 5.0  # between two looks for a decision of the evaluator in a remote store


@dataclass
class Follower:
    """A server other than server 0, as server 0 knows it.

    Attributes:
        identity: its connection, as the address of messages to it.
        session: grows with every start of its process.
        loaded: the generation that it has loaded, 0 before the first.
    """

    identity: bytes
    session: int
    loaded: int = 0


class Leader:
    """The control plane of a run. No worker is coordinated until all servers have loaded the same checkpoint.

    Args:
        config, facts: the run.
        folders: where the run is kept and logged.
        send_order: send_order(followers, order) sends an order to followers and executes it on this server.
        send_load: send_load(followers, generation, version, stage) has all load a checkpoint, this server too.
        read: returns the parameters of this server's slice.
        microseconds: a clock that is later than at any earlier start, for the numbers of generations.
        work: completes checkpoints and deletes old ones in the background (default: at once, in the caller's thread).
        send_pool: send_pool(worker, session, pool) sends a worker the examples of others, before its next parameters.

    Attributes:
        module: the module of this leader's servers; None if it leads all stages, as in virtual time.
        has_handed_over: whether the run is in a stage with other servers, which must take over from this leader.

    In its methods ``now`` is the caller's clock in seconds, ``server`` and ``worker`` are numbers, and ``session`` grows
    with every join of the worker.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        folders: Folders,
        send_order: Callable[[Sequence[Follower], Order], None],
        send_load: Callable[[Sequence[Follower], int, int, int], None],
        read: Read,
        microseconds: Callable[[], int] = lambda: time.time_ns() // 1000,
        work: CallQueue | None = None,
        send_pool: Callable[[int, int, Pool], None] = lambda worker, session, pool: None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.folders = folders
        self.log = folders.work
        self.checkpoints = folders.checkpoints
        self.send_order = send_order
        self.send_load = send_load
        self.read = read
        self.microseconds = microseconds
        self.send_pool = send_pool
        self.work = work or AtOnce()
        self.module: str | None = None
        self.has_handed_over = False
        self.followers: dict[int, Follower] = {}
        self.num_servers = config.processes.servers  # that hold a slice
        self.stages = build_stages(config, facts.num_workers, facts.rows)
        self.stage = self.stages[0]  # of the present generation
        self.generation = self.version = 0
        self.training: Training | None = None  # None until all servers have loaded one generation
        self.ledger: ExampleLedger | None = None  # of the present generation
        self._gossip: ServerGossip | None = None  # of the newest generation, which may be over
        look_s = 0.0 if folders.is_local else FAR_LOOK_S
        self.evaluations = EvaluationWatch(config, self.checkpoints, look_s)
        self._switch = SwitchWatch(self.checkpoints, look_s)
        self._snapshot_at = 0.0  # when the last checkpoint began
        self._restorer = Restorer(
            config, folders, microseconds, by_rule=self.stages[0].by_rule, fingerprint=facts.fingerprint
        )
        self._pauses = PauseWatch()
        self._news = EvaluatorNews(folders)

    # --- servers ------------------------------------------------------------------------------------------------------

    def hello(self, identity: bytes, index: int, session: int) -> None:
        """Register a follower. Once all are connected, all servers load the newest checkpoint.

        A repeated hello changes nothing. A new session means that its process was restarted, a new identity that its
        connection broke, so that orders and messages about gradients may have been lost. Both roll the run back to the
        newest checkpoint."""
        follower = self.followers.get(index)
        if follower and (follower.session, follower.identity) == (session, identity):
            return
        self.followers[index] = Follower(identity, session)
        is_reconnect = follower and follower.session == session
        self.begin_generation(
            f"the connection to server {index} broke" if is_reconnect else f"server {index} was started again"
        )

    def begin_generation(self, cause: str = "") -> None:
        """Have all servers load the newest sound checkpoint, which begins a new generation.

        A no-op until all servers are connected. If files cannot be read or written now, the next tick tries again.
        Raises DataError if there is no sound checkpoint, or for one of a stage that the run does not have.

        cause: why the run rolls back, for the log; unused at the start."""
        if len(self.followers) < self.num_servers - 1:
            return
        if self.training:
            self._restorer.leave(self.training.coordinator.version)
            self.training = None
        if self.ledger:
            self.ledger.discard()
        # A roll-back is logged before a hand-over, after which the next servers do not know what was left.
        restored = self._restorer.begin_generation(self.generation, cause)
        if restored is None:
            return
        self.version, self.generation, stop, self.ledger = restored
        state = read_state(self.checkpoints, self.version)
        before = self.stage.number
        self.stage = next_stage(self.config, self.stages, self.checkpoints, state, stop)
        # A run that ends with a checkpoint of the stage before needs no server of that stage: nothing is trained there.
        has_ended = stop is not None and self.stage.number < before
        if not has_ended and self.module not in (None, self.stage.config.exchange.server):
            self.has_handed_over = True
            return
        log_event(self.log, "generation", generation=self.generation, version=self.version)
        self.evaluations.begin(stop)
        if stop:
            log_early_stop(self.log, stop, state)
        self.send_load(list(self.followers.values()), self.generation, self.version, self.stage.number)

    def loaded(self, index: int, generation: int, now: float) -> None:
        """Note that a server has loaded a generation's checkpoint, and continue the run once all have.

        A message about another generation is late, perhaps for an earlier server 0, and changes nothing.

        index: number of the server, 0 for this one."""
        if self.training or not generation or generation != self.generation:
            return
        if index:
            self.followers[index].loaded = generation
        if any(follower.loaded != self.generation for follower in self.followers.values()):
            return
        state = read_state(self.checkpoints, self.version)
        config = self.stage.config
        facts = self.facts
        coordinator = build_coordinator(self.stage, facts, state, self.num_servers)
        convergence = Convergence(
            config.optimiser.tolerance,
            facts.num_workers,
            self.read,
            accepted=state.accepted,
            update_size=config.protocol.update_size(facts.num_workers),
            begin=config.cohorts.present.accepted,
        )
        journal = Journal(
            self.log,
            coordinator,
            self.generation,
            state.seconds,
            facts.fingerprint,
            classifies=facts.classifies,
            ledger=self.ledger,
        )
        if config.data.gossip:
            self._gossip = ServerGossip(self.log, coordinator, self.send_pool, self._gossip)
        self.training = Training(coordinator, convergence, journal, self._snapshots(journal), self._gossip)
        self._snapshot_at = now
        # A stage begins with the checkpoint of another one, or with the run.
        if len(self.stages) > 1 and (state.stage != self.stage.number or not state.version):
            log_stage(self.log, self.stage, state)

    def look_for_decision(self, now: float) -> None:
        """End the run or enter the next stage if a rule has decided so, by the evaluation of an epoch."""
        training = self.training
        if training and (self.evaluations.stops_early(now) or (self.stage.by_rule and self._switches(training, now))):
            self._enter_next_stage()

    def _switches(self, training: Training, now: float) -> bool:
        """Return whether the rule has decided about the stage."""
        ends_stage = training.coordinator.has_ended_stage and training.has_whole_checkpoint
        return self._switch.is_decided(training.coordinator.version if ends_stage else None, now)

    def _enter_next_stage(self) -> None:
        """Have all servers load the last checkpoint of the stage that has ended, for the next stage or the end.

        This is no roll-back, so nothing is logged as left."""
        self.training = None
        self.begin_generation()

    def _snapshots(self, journal: Journal) -> Snapshots:
        """Return the bookkeeping of the present generation's checkpoints."""
        generation = self.generation
        return Snapshots(
            self.checkpoints,
            partial(secure_log, self.folders, journal.ledger),
            self.num_servers,
            self.work,
            log=journal.write_pushes,
            is_current=lambda: self.generation == generation,
            notify=self._news.wake,
            given_up=self._news.log_given_up,
            by_rule=self.stage.by_rule or self.config.run.patience is not None,
        )

    def wrote(self, server: int, generation: int, sequence: int, outcome: WriteOutcome) -> None:
        """Note that a server has written its slice of a checkpoint, or failed to.

        Parameters that are not finite end the run as diverged. A message about another generation changes nothing.

        generation, sequence: numbers of its generation, and of the order to write it."""
        if not self.training or generation != self.generation:
            return
        self.training.snapshots.wrote(server, sequence, outcome)
        if self.training.snapshots.divergence:
            self.training.coordinator.diverge()

    # --- workers and supervisors --------------------------------------------------------------------------------------

    def joined(self, server: int, worker: int, session: int, now: float) -> None:
        """Note that a server holds a worker's join request; ignored while no checkpoint is loaded."""
        if self.training:
            self.training.coordinator.join(server, worker, session, now)
            self._advance(self.training, now)

    def pushed(
        self, server: int, worker: int, session: int, clock: int, now: float, measured: StepMeasurements | None = None
    ) -> bool:
        """Note that a server holds its part of a gradient. Returns False if its worker must join again.

        It must if no checkpoint is loaded, or if the gradient is not of the step that the worker computes now.

        clock: number of the step; measured: its measurements, from server 0 only."""
        if not self.training or not self.training.coordinator.push(server, worker, session, clock, now, measured):
            return False
        self._advance(self.training, now)
        return True

    def gave_up(self, worker: int, session: int, clock: int, now: float, measured: StepMeasurements) -> bool:
        """Record that a worker stopped computing a step because its gradient would be refused.

        Returns False if it must join again, as ``pushed``. clock, measured: as of ``pushed``."""
        if not self.training or not self.training.coordinator.give_up(worker, session, clock, now, measured):
            return False
        self._advance(self.training, now)
        return True

    def offered(self, worker: int, session: int, epoch: int, now: float, examples: Examples) -> None:
        """Note that a worker gives examples to all others; ignored for an earlier session.

        epoch: the worker's epoch by whose losses the examples were selected."""
        training = self.training
        if training and training.gossip and training.gossip.add(worker, session, epoch, examples):
            self._advance(training, now)

    def alive(self, worker: int, session: int, now: float) -> bool:
        """Note a heartbeat and return whether the session is a member; True while no checkpoint is loaded."""
        return not self.training or self.training.coordinator.alive(worker, session, now)

    def lost(self, worker: int, now: float) -> None:
        if self.training:
            self.training.coordinator.lose(worker)
            self._advance(self.training, now)

    def end(self, now: float) -> None:
        """Write a checkpoint now, because the supervisor is about to stop the run."""
        if self.training:
            self.training.coordinator.request_snapshot()
            self._advance(self.training, now)

    def tick(self, now: float) -> None:
        """Handle everything that is due by time: silent workers, checkpoints and log lines."""
        timeout_s = self.stage.config.worker_timeout_s
        is_silence_counted = self._pauses.tick(now, timeout_s)
        if self._restorer.retry_cause is not None:
            self.begin_generation(self._restorer.retry_cause)
        if self.training:
            if is_silence_counted:
                self._lose_silent(self.training, now, timeout_s)
            self.keep(now)
        self.look_for_decision(now)

    def _lose_silent(self, training: Training, now: float, timeout_s: float) -> None:
        training.coordinator.lose_silent(now, timeout_s)

    def keep(self, now: float) -> None:
        """Write the checkpoints and log lines that are due."""
        if not self.training:
            return
        coordinator = self.training.coordinator
        snapshots = self.training.snapshots
        is_held = self.training.is_at_stage_end
        unfinished = is_held or (coordinator.finished and not snapshots.is_final_whole)
        due_s = RETRY_FINAL_S if unfinished else self.config.run.checkpoint_every_s
        # The stage waits for the evaluator. A second checkpoint of its end would void the evaluation.
        if is_held and self.training.has_whole_checkpoint:
            due_s = math.inf
        if now - self._snapshot_at >= due_s and not (snapshots.under_way or snapshots.divergence):
            coordinator.request_snapshot()
            self._snapshot_at = now
        self._advance(self.training, now)
        if self.training:
            self.training.journal.flush(now)

    def status(self, now: float) -> RunStatus:
        """Return the status for supervisors; not ready while no checkpoint is loaded."""
        if not self.training:
            return NOT_READY
        # The supervisor ends all processes of a finished run: before that, no evaluation may end the run earlier.
        is_complete = self.training.snapshots.is_final_whole and self.evaluations.are_complete(now)
        return self.training.status(now, is_complete=is_complete)

    def trouble(self, now: float) -> str | None:
        """Return why the last checkpoint is late or failed, as text; None if it is not, or no checkpoint is loaded."""
        return self.training.snapshots.trouble(now) if self.training else None

    def _advance(self, training: Training, now: float) -> None:
        """Send the orders that can be decided now, and enter the next stage if the present one has ended."""
        self._decide(training, now)
        # Its last checkpoint must be whole, because the next stage is loaded from it. A rule decides later.
        has_ended = training is self.training and training.is_at_stage_end and training.has_whole_checkpoint
        if has_ended and not self.stage.by_rule:
            self._enter_next_stage()

    def _decide(self, training: Training, now: float) -> None:
        """Send the orders that can be decided now, and begin the checkpoints that belong to them.

        While as many checkpoints as allowed are being written, nothing is decided and the workers wait. Otherwise the
        run could pass the end of an epoch without the checkpoint that belongs to it."""
        coordinator = training.coordinator
        journal = training.journal
        snapshots = training.snapshots
        if training.gossip:
            training.gossip.complete_round()
        if snapshots.is_full:
            return
        for order, snapshot in coordinator.advance(now):
            if snapshot:
                self._snapshot_at = now
                ends_stage = coordinator.has_ended_stage and not self.stage.by_rule
                state = self._state(snapshot, journal.seconds(now), ends_stage=ends_stage)
                snapshots.begin(order.sequence, state, now, is_needed=state.final or coordinator.has_ended_stage)
            journal.note(coordinator.take_ended_epoch(), now)  # before the checkpoint can be complete
            # Before the order, which sends the parameters of the steps that use them.
            if training.gossip:
                training.gossip.send_pools(order)
            self.send_order(list(self.followers.values()), order)
            # An order has a learning rate if it makes an update, and --tolerance is tested after updates alone.
            if order.learning_rate is not None and training.convergence.is_reached(
                coordinator.budget.position.accepted
            ):
                self._converged(training, now)
            if snapshot:
                snapshots.settle(order.sequence, coordinator.budget.position.converged_steps)
            if snapshots.is_full:
                return

    def _converged(self, training: Training, now: float) -> None:
        """End the run because its parameters hardly change any more, and log that."""
        training.coordinator.converge()
        position = training.coordinator.budget.position
        seconds = training.journal.seconds(now)
        log_event(self.log, "converged", version=position.version, accepted=position.accepted, seconds=seconds)

    def _state(self, snapshot: Snapshot, seconds: float, *, ends_stage: bool) -> RunState:
        """Return the state of a checkpoint, from its progress and the properties of the run.

        seconds: training time so far; ends_stage: whether the present stage ends with the checkpoint."""
        # The identity is the run's, because a resume compares whole runs.
        return RunState(
            **vars(snapshot.position),
            epoch=snapshot.epoch,
            epoch_boundary=snapshot.epoch_boundary,
            final=snapshot.final,
            generation=self.generation,
            seconds=seconds,
            num_servers=self.num_servers,
            num_parameters=self.facts.num_parameters,
            num_buffers=self.facts.num_buffers,
            identity=self.config.identity(),
            stage=self.stage.number,
            ends_stage=ends_stage,
        )
