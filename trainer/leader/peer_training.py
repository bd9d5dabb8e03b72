"""The state of a run among neighbours while a checkpoint is loaded: its rounds, log, checkpoints and horizon."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer.checkpoints.replica_file import ReplicaFile
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState
from trainer.config import Config, RunFacts
from trainer.coordination.orders import OwnRound
from trainer.coordination.peer_progress import PeerProgress
from trainer.exchange.mixing import TopologyPlan
from trainer.gossip.schedule import DELAY
from trainer.home.folders import Folders
from trainer.leader.horizon import Horizon
from trainer.leader.peer_checkpoints import EARLIER_PLANS, PeerCheckpoints, PeerTimes, begin_peers, budget_of, plan_of
from trainer.leader.peer_gossip import PeerGossip
from trainer.leader.peer_log import log_links
from trainer.leader.peer_members import PeerMembership
from trainer.leader.replica_writer import ReplicaWriter
from trainer.leader.status import describe_divergence
from trainer.rules import worker_rate
from trainer.runlog.example_ledger import ExampleLedger
from trainer.runlog.journal import Journal


class PeerTraining:
    """A generation of a run among neighbours. A roll-back discards it.

    Args:
        config, facts, folders: the run.
        state: of the checkpoint with which the generation begins. A final one counts as written.
        writer: writes its checkpoints, and knows its number.
        ledger: of its examples; None without --example-ledger.

    Attributes:
        version: of that checkpoint.
        progress: the rounds of the run and of each worker.
        plan: of the links.
        gossip: the rounds in which workers exchange examples; None if they do not.
        checkpoints: that are not complete.
        journal: writes events and gradients to the log.
        horizon: the first round that is not granted.
        has_begun: whether the first members are known, so that their rounds may begin.
        begin_at: when the rounds begin without missing workers; infinity before the first worker.
        absent_from: by worker, the first round that it has missed, until it takes part again.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        folders: Folders,
        state: RunState,
        writer: ReplicaWriter,
        ledger: ExampleLedger | None,
    ) -> None:
        root = folders.checkpoints
        stored = PeerTimes.from_state(state).begun
        state = begin_peers(config, facts, root, state)
        times = PeerTimes.from_state(state)
        self.log = folders.work
        self.writer = writer
        self.version = state.version
        writer.begin(is_final_whole=state.final, ledger=ledger)
        self.steps = config.steps_per_worker(facts.rows)
        budget = budget_of(config, facts, state)
        # No shards are read here: a worker that returns reports the passes that have ended without it.
        self.progress = PeerProgress(budget, partial(worker_rate, config, facts), lambda worker, round: None)
        self.plan: TopologyPlan = plan_of(config, facts, root, state)
        self.gossip = PeerGossip(self.log, budget.position.gossip, facts.num_workers) if config.data.gossip else None
        earlier = state.memory.get(EARLIER_PLANS, ())
        self.checkpoints = PeerCheckpoints(config, facts, folders, writer.generation, self.plan, earlier)
        self.journal = Journal(
            self.log,
            self.progress,
            writer.generation,
            state.seconds,
            facts.fingerprint,
            classifies=facts.classifies,
            ledger=ledger,
        )
        self.horizon = Horizon(state.version)
        self.has_begun = False
        self.begin_at = math.inf
        self.absent_from = {worker: clock for worker, clock in state.clocks.items() if clock < state.version}
        self._mean = self.checkpoints.read_mean(state, stored)
        file = self.checkpoints.models_of(state)
        self._file_of: dict[int, ReplicaFile] = dict.fromkeys(times.begun, file) if file else {}
        self._unused: dict[int, set[int]] = {}  # by worker, its neighbours whose models it does not use
        self._sent_bytes = times.sent_bytes
        self._sent_in: Counter[int] = Counter()  # bytes by round, of incomplete rounds

    @property
    def diverged(self) -> str | None:
        """Why the run has diverged, in words; None if it has not."""
        return describe_divergence(self.progress) or self.writer.not_finite

    @property
    def is_over(self) -> bool:
        """True if no round is left, and the final checkpoint is written or the run has diverged."""
        return self.progress.finished and (self.writer.is_final_whole or self.diverged is not None)

    def first_model(self, worker: int) -> tuple[Float32s, Float32s]:
        """Return values and momentum with which a worker begins the generation.

        A worker that has none in the checkpoint begins with the mean of all models."""
        file = self._file_of.get(worker)
        return (np.array(file.values[worker]), np.array(file.momentum[worker])) if file else self._mean

    def admit(self, worker: int) -> bool:
        """Make a worker a member from the horizon on. Returns False if no round is left for it."""
        until = self.horizon.until
        if until >= self.steps or self.progress.admit(worker, until) is None:
            return False
        # The newcomer uses the models of all its neighbours again.
        self._unused.pop(worker, None)
        return True

    def leave(self, worker: int) -> None:
        """Continue without a member."""
        self.absent_from.setdefault(worker, self.progress.members[worker].clock)
        self.progress.leave(worker)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def note_rounds(self, worker: int, first: int, rounds: Sequence[OwnRound]) -> None:
        """Log the rounds that a worker has completed. first: the first of them."""
        # A report repeats the rounds of earlier reports until the worker learns that this server has them.
        for round, each in enumerate(rounds, first):
            if round == self.progress.members[worker].clock and not self.progress.finished:
                log_links(self.log, worker, round, each.changed, self._unused)
                self.progress.finish(worker, each.report)
                self.absent_from.pop(worker, None)
                self._sent_in[round] += each.sent_bytes

    def keep_copy(self, version: int, worker: int, values: Float32s, momentum: Float32s, now: float) -> None:
        """Keep a worker's model for the checkpoint of a version. values, momentum: its model."""
        seconds = self.journal.seconds(now)
        try:
            self.checkpoints.put(version, worker, values, momentum, seconds, seconds)
        except OSError as error:
            # The run rolls back further without it. Without the last one it would have no end, so a worker sends that
            # again.
            self.writer.trouble = f"the checkpoint of version {version} is not written: {error}"
            self.checkpoints.give_up(version)

    def complete_rounds(self, members: Mapping[int, PeerMembership], now: float) -> bool:
        """Complete the rounds that all members have completed, and return whether a checkpoint was begun at their ends.

        A round waits until the models of all members are here, if they belong to a checkpoint."""
        has_begun_one = False
        while not self.writer.is_full and self._has_copies(self.progress.version + 1, members):
            if not self.progress.complete_round():
                break
            version = self.progress.version
            if self.gossip:
                self.gossip.count(self.progress)  # before the checkpoint of this version
            self._sent_bytes += self._sent_in.pop(version - 1, 0)
            self.journal.note(self.progress.boundary, now)
            if version in self.checkpoints.pending:
                self._write(now)
                has_begun_one = True
        return has_begun_one

    def _has_copies(self, version: int, members: Mapping[int, PeerMembership]) -> bool:
        """Return whether all members that begin with a version have sent their models of it, if they are needed."""
        if not self.checkpoints.is_due(version):
            return True
        needed = (worker for worker, member in members.items() if member.first <= version)
        return all(self.checkpoints.has(version, worker) for worker in needed)

    def _write(self, now: float) -> None:
        """Write the checkpoint of the present version in the background."""
        # Before the checkpoint, so that the log of a run that resumes from it has all earlier pushes.
        self.journal.write_pushes()
        seconds = self.journal.seconds(now)
        replicas = self.checkpoints.take(self.progress, origin=0.0, now=seconds, sent_bytes=self._sent_bytes)
        self.writer.submit(self.checkpoints, replicas)

    # --- the horizon --------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """The first round that may not be granted now.

        With an exchange of examples it is the first one whose examples are not known."""
        return min(self.steps, self.gossip.most_rounds(self.progress.version)) if self.gossip else self.steps

    def is_horizon_near(self) -> bool:
        """Return whether the fastest worker is halfway to the horizon, which can be moved."""
        reach = min(self.horizon.ahead, DELAY) if self.gossip else self.horizon.ahead
        is_near = self.progress.furthest_started + reach // 2 >= self.horizon.until
        return is_near and (self.gossip is None or self.limit > self.horizon.until)

    def move_horizon(self, now: float) -> None:
        self.horizon.move(self.progress.furthest_started, self.limit, now)

    def request_snapshot(self) -> bool:
        """Have a checkpoint written at the horizon, which is the same round for all. Returns False without a round left."""
        if not self.has_begun or self.horizon.until >= self.steps:
            return False
        self.checkpoints.extra.add(self.horizon.until)
        return True

    def grant_details(self, worker: int) -> dict[str, Any]:
        """Return the body of a grant: the versions of which models are needed, and those that are here."""
        version = self.progress.version
        due = sorted(each for each in self.checkpoints.extra if each > version)
        # With its own copies here, or complete, a worker need not keep them.
        have = [each for each in self.checkpoints.pending if self.checkpoints.has(each, worker)]
        details: dict[str, Any] = {"due": due, "have": have, "complete": version}
        if self.gossip:
            details["pools"] = self.gossip.schedule.begins()
        return details
