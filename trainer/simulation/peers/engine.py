"""The event loop of a run in virtual time whose workers keep models of their own and exchange them with neighbours.

Each worker sends its messages one after the other on a link of its own; receiving takes no time. A worker waits only
for its neighbours of a round. Everything follows from the seed, the settings and the scripted failures, so a resumed
run repeats every event after its checkpoint at the same virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from trainer.checkpoints.decisions import StopDecision
from trainer.checkpoints.prune import prune
from trainer.checkpoints.read import read_state
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.peer_progress import PeerProgress
from trainer.exchange.mixing import Neighbours, links_by_worker, mix_parameters
from trainer.exchange.neighbours import NeighbourExchange
from trainer.home.folders import Folders
from trainer.leader.early_stop import EvaluationWatch, log_early_stop
from trainer.leader.peer_checkpoints import (
    EARLIER_PLANS,
    PeerCheckpoints,
    PeerTimes,
    begin_peers,
    budget_of,
    plan_of,
)
from trainer.leader.peer_log import NO_MODEL, log_links, log_newcomer
from trainer.leader.peer_members import SEARCHED_ROUNDS
from trainer.leader.restore import restore
from trainer.leader.status import describe_divergence, describe_not_finite, peer_status
from trainer.plan import FLOAT_BYTES
from trainer.rules import build_replica, replica_rate, weighted_batch, worker_rate
from trainer.runlog.events import log_event
from trainer.runlog.journal import Journal
from trainer.simulation.compute import Compute
from trainer.simulation.engine import KEEP_S, SCRIPTED, begin_at
from trainer.simulation.network import Link
from trainer.simulation.options import SimulationSettings
from trainer.simulation.peers.events import PeerEvent, PeerEventKind, PeerPhase, VirtualPeer
from trainer.simulation.peers.examples import PeerExamples
from trainer.simulation.peers.newcomers import Newcomer, Newcomers
from trainer.simulation.peers.queue import PeerQueue
from trainer.simulation.step_times import StepTimes
from trainer.transport.status import RunStatus

LEADER_RESTARTED = "the leader was started again"


class PeerEngine:
    """The simulation of one run. A step costs O(log N) in the queue, the mixing of its models, and ``compute``.

    Args:
        config, facts: the run.
        simulated: the virtual cluster.
        compute: computes the gradients.
        folders: the run's folders.
        observe: observe(engine) is called after every event.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        simulated: SimulationSettings,
        compute: Compute,
        folders: Folders,
        observe: Callable[[PeerEngine], None],
    ) -> None:
        exchange = config.exchange
        assert isinstance(exchange, NeighbourExchange), "other exchanges have other worlds"
        self.config = config
        self.facts = facts
        self.exchange = exchange
        self.simulated = simulated
        self.compute = compute
        self.observe = observe
        self.folders = folders
        self.root = folders.work
        self.step_times = StepTimes(config, facts, simulated)
        self.steps = config.steps_per_worker(facts.rows)
        self.usual_batch = weighted_batch(config, facts)
        self.has_snapshot = False  # True after a checkpoint, until the observer resets it
        self.evaluations = EvaluationWatch(config, folders.checkpoints, 0.0)
        self.down = False  # whether the leader is dead
        self.back_at = 0.0  # end of its latest scripted absence
        self.divergence: str | None = None  # why the run has diverged
        self.stop: StopDecision | None = None  # the decision with which the generation ends the run
        self.queue = PeerQueue(facts.num_workers)
        self.generation = begin_at(self.root)[1]
        nothing = np.empty(0, np.float32)
        bytes_per_s = (simulated.bandwidth_mbps or math.inf) * 1e6 / 8
        self.latency_s = simulated.latency_ms / 1000
        self.peers = [
            VirtualPeer(build_replica(config, facts, nothing, nothing), Link(bytes_per_s))
            for _ in range(facts.num_workers)
        ]
        self.newcomers = Newcomers()
        self.unused: dict[int, set[int]] = {}  # by worker, its neighbours whose models it does not use
        self.progress: PeerProgress
        self.journal: Journal
        self.checkpoints: PeerCheckpoints
        self.examples: PeerExamples
        self.sent_bytes = 0  # in all complete rounds
        self.sent_in: Counter[int] = Counter()  # bytes by round, of incomplete rounds
        self.neighbours = lru_cache(maxsize=1024)(self._neighbours)
        self._measured: dict[int, StepMeasurements] = {}  # of the present round, by worker
        self._stored: list[int] = []  # workers whose models the checkpoint of the generation has
        self.now = 0.0
        self._load()

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events until the run has ended or no event is left."""
        self._log_generation()
        self._schedule_failures()
        due = 0.0
        while self.queue and not self.is_over():
            event = self.queue.pop()
            self.now = event.time
            if self.now >= self._checkpoint_at:
                self._want_checkpoint()
            self._handle(event)
            if self.now >= due and not self.down:  # a dead leader writes nothing
                self.journal.flush(self.now)
                due = self.now + KEEP_S
            self.observe(self)
            # The observer has evaluated the checkpoints of this event.
            if self.evaluations.stops_early(self.now):
                self._roll_back()
        self.journal.flush(self.now)

    def is_over(self) -> bool:
        """Return whether all rounds are complete, or the run has diverged."""
        return self.progress.finished or self.divergence is not None

    def status(self) -> RunStatus:
        """Return the status that a leader reports to a supervisor."""
        # No supervisor waits for a final checkpoint here, so a run that is trained is finished.
        present = sum(member.is_in for member in self.progress.members)
        return peer_status(
            self.progress,
            self.journal,
            present,
            self._seconds(self.now),
            trained=self.is_over(),
            finished=self.is_over(),
            diverged=describe_divergence(self.progress) or self.divergence,
        )

    def trouble(self) -> str | None:
        """Return None: files that cannot be written end the run."""
        return None

    def interrupt(self) -> None:
        """Do nothing: a checkpoint now would need all workers in the same round. The run resumes from the last one."""

    def _seconds(self, time: float) -> float:
        """Return the training time of the run at a virtual time; the time of undone rounds does not count."""
        return time - self.origin

    def _want_checkpoint(self) -> None:
        """Have the workers write a checkpoint when they begin a round that none of them has begun.

        Called before an event is handled, at multiples of the interval, so that a resumed run chooses the same rounds."""
        self.checkpoints.extra.add(1 + max(member.clock for member in self.progress.members))
        self._checkpoint_at = self._next_checkpoint()

    def _next_checkpoint(self) -> float:
        """Return the next time at which a checkpoint is due, besides those at the ends of epochs."""
        every_s = self.config.run.checkpoint_every_s
        return every_s * (math.floor(self.now / every_s) + 1)

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: PeerEvent) -> None:
        """Call the method for an event's kind, unless its worker or sender has died or been rolled back since."""
        # Failures and returns come first, because they apply even if the worker has been restarted since.
        worker = event.worker
        kind = event.kind
        if kind is PeerEventKind.CRASH:
            self._crash(event.away_s)
        elif kind is PeerEventKind.RECOVER:
            self._recover()
        elif kind is PeerEventKind.DIE:
            self._die(worker, event.away_s)
        elif kind is PeerEventKind.JOIN:
            self._join(worker)
        elif self.queue.is_void(event):
            return
        elif kind is PeerEventKind.BEGIN:
            if event.model is not None:  # a newcomer, which has no momentum
                momentum = np.zeros(self.facts.num_parameters, np.float32)
                self.peers[worker].replica = build_replica(self.config, self.facts, event.model, momentum)
            self._begin(worker)
            # A worker can join after all others have finished their last round, which may wait for it alone.
            self._complete_rounds()
        elif kind is PeerEventKind.FINISH:
            self._finish(worker)
        else:
            assert event.model is not None, "every message has a model"
            self._arrive(worker, event.sender, event.round, event.model)

    def _begin(self, worker: int) -> None:
        """Begin a worker's round with its present model."""
        peer = self.peers[worker]
        round = self.progress.members[worker].clock
        if round < self.steps and self.examples.hold_back(worker, round):
            peer.phase = PeerPhase.BEGINNING
            return
        self.progress.start_round(worker)
        # Before anything is sent, so that a run that resumes from here sends it again.
        if round > self.progress.version and self.checkpoints.is_due(round):
            replica = peer.replica
            self.checkpoints.put(round, worker, replica.values, replica.momentum, self.now, peer.link.free_at)
        for index in self.newcomers.note_model(worker, round, peer.replica.values):
            self._copy(index, worker)
        if round >= self.steps:
            peer.phase = PeerPhase.DONE
            return
        peer.phase = PeerPhase.COMPUTING
        self.examples.give(worker, round)
        peer.step_start = self.now
        peer.step_end = self.now + self.step_times.seconds(worker, round)
        self.queue.put(peer.step_end, worker, PeerEventKind.FINISH)
        if self.exchange.order == "avg-then-grad":
            self._send(worker, round)

    def _finish(self, worker: int) -> None:
        """End a worker's step. A gradient that is subtracted before models are exchanged is computed now."""
        peer = self.peers[worker]
        peer.phase = PeerPhase.WAITING
        if self.exchange.order == "grad-then-avg":
            values = peer.replica.values.copy()
            self._descend(worker, values)
            self._send(worker, self.progress.members[worker].clock)
        self._try_to_complete(worker)

    def _arrive(self, worker: int, sender: int, round: int, model: Float32s) -> None:
        peer = self.peers[worker]
        peer.inbox.setdefault(round, {})[sender] = model
        if peer.phase is PeerPhase.WAITING:
            self._try_to_complete(worker)

    def _try_to_complete(self, worker: int) -> None:
        """Complete a worker's round if the models of all its neighbours have arrived, and begin its next one.

        Neighbours that died are left out, unless their models of this round arrived before. The weights of the other
        links stay as they are, so that both ends of a link use the same one."""
        peer = self.peers[worker]
        round = self.progress.members[worker].clock
        arrived = peer.inbox.get(round, {})
        links = self.neighbours(round).get(worker, ())
        if any(other not in arrived and self.progress.takes_part(other, round) for other, _ in links):
            return
        # For a replay, which cannot know which messages came too late.
        before = self.unused.get(worker, set())
        unused = {other for other, _ in links if other not in arrived}
        changed = [other for other, _ in links if (other in unused) != (other in before)]
        log_links(self.root, worker, round, changed, self.unused)
        self._mix(worker, [(weight, arrived[other]) for other, weight in links if other in arrived])
        peer.inbox.pop(round, None)
        if self.progress.diverged:
            return
        self._begin(worker)
        self._complete_rounds()

    def _mix(self, worker: int, others: list[tuple[float, Float32s]]) -> None:
        """Average a worker's parameters with its neighbours', and note the end of its round. others: see ``mix``."""
        peer = self.peers[worker]
        mixed = mix_parameters(peer.replica.values, others, self.facts.num_parameters)
        if self.exchange.order == "avg-then-grad":
            # The gradient of the model before the mixing, computed only now, so that no waiting worker holds one.
            self._descend(worker, mixed)
        else:
            peer.replica.values = mixed
        self.progress.finish(worker, self._measured[worker])

    def _descend(self, worker: int, values: Float32s) -> None:
        """Replace a worker's model by ``values``, updated by the gradient of its present model.

        values: the present model, or its average with the neighbours' models."""
        peer = self.peers[worker]
        round = self.progress.members[worker].clock
        result = self.compute.step(worker, round, [peer.replica.values])
        peer.replica.values = values
        weight = result.examples / self.usual_batch if self.usual_batch else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite ends the run
            peer.replica.apply([result.vector], replica_rate(self.config, self.facts, round), [weight])
        measured = result.measurements(peer.step_end - peer.step_start)
        self._measured[worker] = measured._replace(offer=self.examples.take_offer(worker))

    # --- messages -----------------------------------------------------------------------------------------------------

    def _neighbours(self, round: int) -> Neighbours:
        """Return the neighbours of every worker that has any in a round, in ascending order, with their weights."""
        return links_by_worker(self.plan.edges(round))

    def _send(self, worker: int, round: int) -> None:
        """Send a worker's model to its neighbours of a round, one after the other; nothing without neighbours."""
        peer = self.peers[worker]
        size = FLOAT_BYTES * self.facts.num_parameters
        for other, _ in self.neighbours(round).get(worker, ()):
            if self.progress.takes_part(other, round):
                self.sent_in[round] += size
                arrival = peer.link.send(size, self.now) + self.latency_s
                details = {"sender": worker, "round": round, "model": peer.replica.values}
                self.queue.put(arrival, other, PeerEventKind.ARRIVE, **details)

    def _copy(self, index: int, source: int | None = None) -> None:
        """Send a newcomer its first model: from ``source``, or the spare one of Newcomer if ``source`` is None."""
        newcomer = self.newcomers.pop(index)
        model = newcomer.spare if source is None else self.peers[source].replica.values
        size = FLOAT_BYTES * self.facts.elements
        # Counted in the round before, which is incomplete while a newcomer waits. A run that resumes from the next
        # checkpoint does not send the model again.
        self.sent_in[newcomer.first - 1] += size
        arrival = self.latency_s + (self.now if source is None else self.peers[source].link.send(size, self.now))
        log_newcomer(self.root, index, newcomer.spare_from if source is None else source, newcomer.first)
        self.unused.pop(index, None)
        self.peers[index].phase = PeerPhase.BEGINNING
        self.queue.put(arrival, index, PeerEventKind.BEGIN, model=model)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _die(self, worker: int, away_s: float) -> None:
        """Let a worker die and restart after ``away_s`` virtual seconds.

        Its model is lost, and so are its messages that have not arrived, except a model on its way to a newcomer."""
        peer = self.peers[worker]
        peer.back_at = max(peer.back_at, self.now + away_s)
        log_event(self.root, "restart", role="worker", index=worker, cause=SCRIPTED)
        self.queue.put(self.now + away_s, worker, PeerEventKind.JOIN)
        if peer.phase in (PeerPhase.DONE, PeerPhase.ABSENT):  # a worker that is done has sent everything
            return
        self.compute.restart(worker)
        self._forget(worker)
        self.progress.leave(worker)
        for index in self.newcomers.lose(worker):
            self._copy(index)
        if not self._has_model():
            if self.newcomers:
                self._roll_back(NO_MODEL)
            return
        # Neighbours that wait for its model continue without it.
        for other, waiting in enumerate(self.peers):
            if waiting.phase is PeerPhase.WAITING:
                self._try_to_complete(other)
        self._complete_rounds()

    def _forget(self, worker: int) -> None:
        """Make all events of a worker and of its messages void."""
        peer = self.peers[worker]
        peer.phase = PeerPhase.ABSENT
        peer.inbox.clear()
        self.queue.end_life(worker)
        self.examples.forget(worker)

    def _has_model(self) -> bool:
        return any(peer.phase >= PeerPhase.BEGINNING for peer in self.peers)

    def _join(self, worker: int) -> None:
        """Let a worker rejoin, with a neighbour's model, in the first round that no member has begun."""
        peer = self.peers[worker]
        if self.down or peer.back_at > self.now or peer.phase is not PeerPhase.ABSENT:
            return
        if not self._has_model():
            self._roll_back(NO_MODEL)
            return
        first = self.progress.admit(worker)
        if first is None:  # the others have begun the last round, or none is left
            return
        peer.phase = PeerPhase.JOINING
        self.newcomers[worker] = Newcomer(first, self._sources(worker, first))

    def _sources(self, worker: int, first: int) -> set[int]:
        """Return the members among a worker's neighbours in the next round in which it has any."""
        for round in range(first, first + SEARCHED_ROUNDS):
            if links := self.neighbours(round).get(worker):
                return {other for other, _ in links if self.progress.takes_part(other, first - 1)}
        return set()

    def _crash(self, away_s: float) -> None:
        """Let the leader die and restart after ``away_s`` virtual seconds, which rolls all workers back.

        The leader stands for server 0 of a real run, as which its restart is logged."""
        self.down = True
        self.back_at = max(self.back_at, self.now + away_s)
        log_event(self.root, "restart", role="server", index=0, cause=SCRIPTED)
        for worker in range(self.facts.num_workers):
            self._forget(worker)
        self.queue.put(self.now + away_s, -1, PeerEventKind.RECOVER)

    def _recover(self) -> None:
        """Restart the leader, unless it has crashed again meanwhile: it returns when the last absence is over."""
        if self.down and self.now >= self.back_at:
            self.down = False
            self._roll_back(LEADER_RESTARTED)

    def _roll_back(self, cause: str = "") -> None:
        """Restart from the newest sound checkpoint, with the workers that are present now.

        cause: for the log; "" for an early stop, which ends the run with that checkpoint unless it is damaged."""
        for worker in range(self.facts.num_workers):
            self._forget(worker)
        before = self.progress.version
        self._load(at=self.now)
        if cause:
            log_event(self.root, "rollback", from_version=before, to_version=self.progress.version, cause=cause)
        self._log_generation()
        if self.is_over():
            return
        # ``_load`` has begun the workers that are in the checkpoint. The others join with a neighbour's model.
        for worker, peer in enumerate(self.peers):
            if peer.phase is PeerPhase.ABSENT:
                self._join(worker)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _log_generation(self) -> None:
        version = self.progress.version
        log_event(self.root, "generation", generation=self.generation, version=version, models=self._stored)
        if self.stop:
            log_early_stop(self.root, self.stop, read_state(self.checkpoints.root, version))

    def _load(self, at: float | None = None) -> None:
        """Begin a generation at the newest sound checkpoint. Raises DataError if there is none.

        The caller has made all earlier events void. The workers begin at the times at which they had reached it, so that a
        resumed run repeats all later events.

        at: the time of a roll-back, at which all present workers begin instead; None at the start of the program."""
        facts = self.facts
        root = self.folders.checkpoints
        version, self.generation, self.stop, ledger = restore(
            self.config, self.folders, self.generation + 1, fingerprint=facts.fingerprint
        )
        self.evaluations.begin(self.stop)
        state = read_state(root, version)
        self._stored = sorted(PeerTimes.from_state(state).begun)
        state = begin_peers(self.config, facts, root, state)
        times = PeerTimes.from_state(state)
        self.now = times.start if at is None else at
        self.origin = self.now - times.seconds
        self.sent_bytes = times.sent_bytes
        self.sent_in = Counter()
        self.newcomers = Newcomers()
        self.unused = {}
        self.plan = plan_of(self.config, facts, root, state)
        self.neighbours.cache_clear()
        earlier = state.memory.get(EARLIER_PLANS, ())
        self.checkpoints = PeerCheckpoints(self.config, facts, self.folders, self.generation, self.plan, earlier)
        self._checkpoint_at = self._next_checkpoint()
        budget = budget_of(self.config, facts, state)
        self.progress = PeerProgress(budget, partial(worker_rate, self.config, facts), self.compute.seen)
        self.examples = PeerExamples(self.config, self.folders, self.compute, self.progress)
        self._begin_all(state, times, at)
        self.journal = Journal(
            self.root,
            self.progress,
            self.generation,
            times.seconds,
            facts.fingerprint,
            classifies=facts.classifies,
            ledger=ledger,
        )
        self.journal.seconds(self.now)  # the training time runs from here

    def _begin_all(self, state: RunState, times: PeerTimes, at: float | None) -> None:
        """Let every worker begin that is in a checkpoint and, after a roll-back, present.

        If no present worker has a model there, all present ones begin with the mean of its models.

        Args:
            state: of the checkpoint, as the present cohort continues from it.
            times: of its workers; none at the start of a run.
            at: the time of a roll-back, or None.
        """
        values, momentum = self.checkpoints.read_mean(state, self._stored)
        file = self.checkpoints.models_of(state)
        present = [worker for worker, peer in enumerate(self.peers) if at is None or peer.back_at <= at]
        members = [worker for worker in present if worker in times.begun]
        for worker in members or present:
            peer = self.peers[worker]
            if file and members:
                values = np.array(file.values[worker])
                momentum = file.momentum[worker]
            # Values that several workers share are safe: they are never changed in place.
            peer.replica = build_replica(self.config, self.facts, values, np.array(momentum))
            start = times.begun.get(worker, 0.0) if at is None else at
            peer.link.free_at = times.link_free.get(worker, 0.0) if at is None else at
            peer.phase = PeerPhase.BEGINNING
            self.progress.begin(worker)
            self.queue.put(start, worker, PeerEventKind.BEGIN)
        if at is not None or not times.begun:
            return
        for worker in present:
            if worker not in times.begun:
                self._restore_absence(worker, times.start)

    def _restore_absence(self, worker: int, start: float) -> None:
        """Restore a worker that has no model in the checkpoint.

        It was away when the others reached the checkpoint's round, or died on the way there. A worker that was away
        stays ABSENT until ``back_at``. One that died on the way is alive again until its scripted death, so that its
        neighbours wait for it as in the first run.

        start: virtual time at which the first worker began the checkpoint's round."""
        peer = self.peers[worker]
        earlier_deaths = [
            failure for failure in self.simulated.failures if failure.worker == worker and failure.at_s < start
        ]
        # 0 if it had not died before ``start``; ``start`` or later if it was away then.
        peer.back_at = max((failure.at_s + failure.away_s for failure in earlier_deaths), default=0.0)
        # Otherwise it was present at ``start`` and died on the way. No BEGIN is scheduled: it computes nothing
        # until its death.
        if peer.back_at < start:
            peer.phase = PeerPhase.BEGINNING
            self.progress.begin(worker)

    def _schedule_failures(self) -> None:
        """Queue the scripted failures, and the returns from earlier ones, that follow the start of this run."""
        for failure in self.simulated.failures_of(self.facts.num_workers):
            back = failure.at_s + failure.away_s
            worker = -1 if failure.worker is None else failure.worker
            if failure.at_s >= self.now:
                kind = PeerEventKind.CRASH if failure.worker is None else PeerEventKind.DIE
                self.queue.put(failure.at_s, worker, kind, away_s=failure.away_s)
            elif failure.worker is not None and back >= self.now:
                self.queue.put(back, worker, PeerEventKind.JOIN)

    def _complete_rounds(self) -> None:
        """Complete the rounds of the run that all members have completed, and the checkpoints at their ends."""
        while self.progress.complete_round():
            version = self.progress.version
            for worker in self.examples.count():
                self.queue.put(self.now, worker, PeerEventKind.BEGIN)
            self.sent_bytes += self.sent_in.pop(version - 1, 0)
            self.journal.note(self.progress.boundary, self.now)
            if version not in self.checkpoints.pending:
                continue
            # Before the checkpoint, so that the log of a run that resumes from it has all earlier pushes.
            self.journal.write_pushes()
            if self.journal.ledger:
                self.journal.ledger.write(version)
            replicas = self.checkpoints.take(
                self.progress, origin=self.origin, now=self.now, sent_bytes=self.sent_bytes
            )
            was_written = self.checkpoints.write(replicas)
            if was_written:
                prune(self.checkpoints.root, by_rule=self.config.run.patience is not None)
                self.has_snapshot = True
            if was_written is None:
                self.divergence = describe_not_finite(version)
                return
