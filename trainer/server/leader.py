"""What server 0 does beside holding its slice: run the coordinator, bring all servers to one checkpoint, and answer
supervisors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import JobError
from trainer.checkpoints.prune import discard_after, prune
from trainer.checkpoints.read import newest, read_state, whole
from trainer.config import Config, Facts
from trainer.coordination.convergence import Convergence, Read
from trainer.coordination.coordinator import Coordinator, Measured, Order, Phase, Progress
from trainer.coordination.schedules import learning_rate
from trainer.run_files import CHECKPOINTS
from trainer.runlog.events import log_event
from trainer.runlog.journal import Journal

RETRY_FINAL_S = 5.0


@dataclass
class Follower:
    """Another server; session: grows with every start of its process; loaded: the generation that it has loaded."""

    identity: bytes
    session: int
    loaded: int = 0


class Head:
    """send_order and send_load reach every server, this one included; until all have loaded, nobody is coordinated.
    read: the parameters that this server holds."""

    def __init__(
        self,
        config: Config,
        facts: Facts,
        root: Path,
        send_order: Callable[[Sequence[Follower], Order], None],
        send_load: Callable[[Sequence[Follower], int, int], None],
        read: Read,
    ) -> None:
        self.config, self.facts, self.root = config, facts, root
        self.checkpoints = root / CHECKPOINTS
        self.send_order, self.send_load, self.read = send_order, send_load, read
        self.followers: dict[int, Follower] = {}
        self.generation = self.version = 0
        self.coordinator: Coordinator | None = None
        self._snapshot_at = 0.0

    # --- servers ------------------------------------------------------------------------------------------------------

    def hello(self, identity: bytes, index: int, session: int) -> None:
        """A follower is there. One that was started anew takes everybody back to the last checkpoint, and so does one
        that connected anew (its identity tells): orders, or its words about gradients, may have been on their way."""
        known = self.followers.get(index)
        if known and (known.session, known.identity) == (session, identity):
            return
        self.followers[index] = Follower(identity, session)
        broken = known and known.session == session
        self.gather(f"the connection to server {index} broke" if broken else f"server {index} was started again")

    def gather(self, cause: str = "") -> None:
        """Once all servers are there, have them load the newest whole checkpoint. Raises JobError without one."""
        if len(self.followers) < self.config.processes.servers - 1:
            return
        version = newest(self.checkpoints, verify=True)
        if version is None:
            raise JobError(f"{self.checkpoints} holds no whole checkpoint, not even the first; start with --overwrite")
        if self.coordinator:
            before = self.coordinator.progress.version
            log_event(self.root, "rollback", from_version=before, to_version=version, cause=cause)
        self.coordinator = None
        discard_after(self.checkpoints, version)
        stored = read_state(self.checkpoints, version).generation
        # The clock, since a server 0 that died may have been at a generation that no checkpoint tells of.
        self.generation = max(self.generation + 1, stored + 1, time.time_ns() // 1000)
        self.version = version
        self.send_load(list(self.followers.values()), self.generation, version)

    def loaded(self, index: int, generation: int, now: float) -> None:
        """A server has the checkpoint; when all have it the run goes on from there."""
        if self.coordinator or not generation or generation != self.generation:
            return  # late words about another generation, perhaps to the server 0 of before
        if index:
            self.followers[index].loaded = generation
        if any(follower.loaded != self.generation for follower in self.followers.values()):
            return
        state = read_state(self.checkpoints, self.version)
        config, facts = self.config, self.facts
        self.coordinator = Coordinator(
            config.protocol,
            num_workers=facts.num_workers,
            num_servers=config.processes.servers,
            steps=config.steps_per_worker(facts.rows),
            steps_per_epoch=config.steps_per_epoch(facts.rows),
            rate=self._rate,
            stop=config.run.stop,
            start_wait_s=config.processes.start_wait_s,
            by_examples=config.data.sampling == "bernoulli",
            epoch_snapshots=config.run.epoch_checkpoints,
            progress=Progress(state.version, state.accepted, state.examples, dict(state.clocks)),
        )
        self.convergence = Convergence(config.optimiser.tolerance, facts.num_workers, self.read)
        self.journal = Journal(self.root, self.coordinator, self.generation, state.seconds)
        self._snapshot_at = now

    # --- workers and supervisors --------------------------------------------------------------------------------------

    def joined(self, server: int, worker: int, session: int, now: float) -> None:
        if self.coordinator:
            self.coordinator.join(server, worker, session, now)
            self._advance(now)

    def pushed(
        self, server: int, worker: int, session: int, clock: int, now: float, measured: Measured | None = None
    ) -> bool:
        """False: nobody waits for this gradient, its worker must join again."""
        if not self.coordinator or not self.coordinator.push(server, worker, session, clock, now, measured):
            return False
        self._advance(now)
        return True

    def alive(self, worker: int, session: int, now: float) -> bool:
        """Whether that session takes part; True while nobody can tell."""
        return not self.coordinator or self.coordinator.alive(worker, session, now)

    def lost(self, worker: int, now: float) -> None:
        if self.coordinator:
            self.coordinator.lose(worker)
            self._advance(now)

    def end(self, now: float) -> None:
        """Write a checkpoint of this moment: the supervisor is about to stop the run."""
        if self.coordinator:
            self.coordinator.request_snapshot()
            self._advance(now)

    def tick(self, now: float) -> None:
        """What is due by the clock: silent workers, checkpoints, log lines."""
        if not self.coordinator:
            return
        self.coordinator.lose_silent(now, self.config.processes.heartbeat_timeout_s)
        unfinished = self.coordinator.finished and not self._final_is_whole()
        if now - self._snapshot_at >= (RETRY_FINAL_S if unfinished else self.config.run.checkpoint_every_s):
            self.coordinator.request_snapshot()
            self._snapshot_at = now
        self._advance(now)
        self.journal.flush(now)

    def status(self, now: float) -> dict[str, Any]:
        """What a supervisor is told; only ``ready``, ``finished``, ``diverged`` while no checkpoint is loaded."""
        if not self.coordinator:
            return {"ready": False, "finished": False, "diverged": None}
        progress, members, bad = self.coordinator.progress, self.coordinator.members, self.coordinator.diverged
        keys = ("loss", "accuracy", "images_per_s", "staleness_mean", "staleness_max")
        return {key: self.journal.summary.get(key) for key in keys} | {
            "ready": True,
            "finished": self.coordinator.finished and (bad is not None or self._final_is_whole()),
            "diverged": bad and f"the loss of worker {bad.worker} is {bad.measured.loss} at version {bad.version}",
            "version": progress.version,
            "accepted": progress.accepted,
            "total": self.coordinator.steps * self.coordinator.num_workers,
            "epoch": self.coordinator.epoch,
            "seconds": self.journal.seconds(now),
            "remaining": sum(member.phase not in (Phase.FINISHED, Phase.ABSENT) for member in members),
            "alive": sum(member.phase is not Phase.ABSENT for member in members),
            "num_workers": len(members),
        }

    def _advance(self, now: float) -> None:
        assert self.coordinator
        for order in self.coordinator.advance(now):
            if order.snapshot:
                self._complete(order.snapshot, now)
            self.send_order(list(self.followers.values()), order)
            self.journal.note(order.snapshot["epoch_boundary"] if order.snapshot else None, now)
            if order.take and self.convergence.is_reached(self.coordinator.progress.accepted):
                self._converged(now)
            if order.snapshot:
                self.journal.write_pushes()  # what a checkpoint counts is written down with it
                prune(self.checkpoints)

    def _rate(self, epoch: float) -> float:
        mini_batches = epoch * self.config.steps_per_epoch(self.facts.rows)
        return (
            learning_rate(self.config.optimiser.recipe, self.config.optimiser.learning_rate, epoch, mini_batches)
            / self.facts.num_workers
        )

    def _converged(self, now: float) -> None:
        assert self.coordinator
        self.coordinator.converge()
        progress, seconds = self.coordinator.progress, self.journal.seconds(now)
        log_event(self.root, "converged", version=progress.version, accepted=progress.accepted, seconds=seconds)

    def _complete(self, snapshot: dict[str, Any], now: float) -> None:
        """What the coordinator does not know of a checkpoint's state."""
        self._snapshot_at = now
        snapshot.update(
            generation=self.generation,
            seconds=self.journal.seconds(now),
            num_servers=self.config.processes.servers,
            num_parameters=self.facts.num_parameters,
            num_buffers=self.facts.num_buffers,
            identity=self.config.identity(),
        )

    def _final_is_whole(self) -> bool:
        """Whether all servers have written the checkpoint of the end."""
        return bool(self.coordinator and self.coordinator.progress.version in whole(self.checkpoints)[-1:])
