"""Checkpoints of runs whose workers keep models of their own: the mean of all models, and each model with its times.

A checkpoint of version V has the models with which the workers begin round V. Workers begin it at different times, and
the last one completes the checkpoint. The mean is a slice, which the evaluator reads like a slice of servers. The plan
of the links is part of every checkpoint, so that a run keeps its links wherever it resumes. Another cohort of workers
begins with the mean, and with a plan of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.atomic import sync
from trainer.checkpoints.read import read_slice_range
from trainer.checkpoints.replica_file import ReplicaFile, create_replicas, open_replicas, replica_name
from trainer.checkpoints.slice_file import Float32s, broken
from trainer.checkpoints.state import STATE, RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import Config, RunFacts
from trainer.coordination.cohorts import Cohort
from trainer.coordination.peer_progress import PeerProgress, RoundBudget
from trainer.exchange.mixing import TopologyPlan
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.plan_json import plan_from_json, plan_to_json
from trainer.home.folders import Folders
from trainer.home.place import Place, remove_empty, write_whole
from trainer.plan import FLOAT_BYTES
from trainer.rules import begin_cohort, carry_losses, position_of
from trainer.run_files import CHECKPOINTS, PUSHES
from trainer.runlog.events import log_event

# keys of a state's memory
REPLICAS = "replicas"
PLAN = "plan"
EARLIER_PLANS = "earlier_plans"
BY_WORKER = ("begun", "link_free")
MODELS_HELD = 4  # its parameters, its momentum, and at most two earlier models that slower neighbours still need


class PeerTimes(NamedTuple):
    """The times at a checkpoint, from which a resumed run repeats all events that follow.

    Attributes:
        begun: time at which each worker began round V, in seconds, by worker; absent workers are missing.
        link_free: time at which its link had sent all earlier messages, in seconds.
        seconds: training time at the earliest time in ``begun``.
        sent_bytes: bytes that all workers had sent in earlier rounds.
    """

    begun: Mapping[int, float] = {}
    link_free: Mapping[int, float] = {}
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def start(self) -> float:
        """The time at which the first worker began, in seconds; 0 at the start of a run."""
        return min(self.begun.values(), default=0.0)

    def together(self, num_workers: int, seconds: float) -> PeerTimes:
        """Return the times of other workers that begin together, at a later training time (seconds)."""
        times = dict.fromkeys(range(num_workers), self.start + seconds - self.seconds)
        return PeerTimes(times, times, seconds, self.sent_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the times in plain JSON, in the order of workers."""
        workers = sorted(self.begun)
        by_worker = {name: {str(worker): getattr(self, name)[worker] for worker in workers} for name in BY_WORKER}
        return self._asdict() | by_worker

    @classmethod
    def from_state(cls, state: RunState) -> PeerTimes:
        """Return the times in a state; at the start of a run it has none."""
        stored = state.memory.get(REPLICAS, {})
        by_worker = {name: {int(worker): time for worker, time in stored.get(name, {}).items()} for name in BY_WORKER}
        return cls(**stored | by_worker)


@dataclass
class PendingReplicas:
    """A checkpoint that some workers have not reached yet. begun, link_free: as in PeerTimes, of workers that have."""

    file: ReplicaFile
    begun: dict[int, float] = field(default_factory=dict)
    link_free: dict[int, float] = field(default_factory=dict)


class ReplicasAtVersion(NamedTuple):
    """A checkpoint whose models are all there.

    Attributes:
        state: to be written last; its ``parts`` are not known yet.
        file: the models.
        workers: that have a model in it.
        sent_bytes: bytes that all workers had sent in earlier rounds.
        is_kept: whether it is written; otherwise only the distance of the models is logged.
    """

    state: RunState
    file: ReplicaFile
    workers: tuple[int, ...]
    sent_bytes: int
    is_kept: bool


class PeerCheckpoints:
    """The checkpoints of one generation that are not complete yet, and the writing of complete ones.

    Args:
        config, facts: the run.
        folders: the run's folders. The models are collected on this host, and then copied to a remote home.
        generation: number of the generation.
        plan: of the links.
        earlier: plans of the cohorts of workers before, as in the state of a checkpoint.

    Attributes:
        extra: versions of checkpoints that are due by time.
        given_up: versions of checkpoints for which there was no room.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        folders: Folders,
        generation: int,
        plan: TopologyPlan,
        earlier: Sequence[Mapping[str, Any]],
    ) -> None:
        self.config = config
        self.facts = facts
        self.folders = folders
        self.root = folders.checkpoints
        self.local_root = folders.work / CHECKPOINTS
        self.generation = generation
        self.plan = plan
        self.earlier = earlier
        # Every member sends its model of such a version, at whatever time it reaches it.
        self.extra: set[int] = set()
        self.given_up: set[int] = set()
        self._shape = (facts.num_workers, facts.num_parameters, facts.num_buffers)
        self._steps = config.steps_per_worker(facts.rows)
        self._steps_per_epoch = config.steps_per_epoch(facts.rows)
        self._pending: dict[int, PendingReplicas] = {}

    def is_due(self, version: int) -> bool:
        """Return whether the models of a version are needed: at the end of an epoch or of the run, or by time."""
        cohort = self.config.cohorts.present
        return version not in self.given_up and is_due(version, cohort, self._steps_per_epoch, self._steps, self.extra)

    def give_up(self, version: int) -> None:
        """Do without a checkpoint, unless it is the end of the run, which cannot do without."""
        if version < self._steps:
            self.given_up.add(version)
            self._pending.pop(version, None)

    def put(
        self, version: int, worker: int, values: Float32s, momentum: Float32s, now: float, link_free: float
    ) -> None:
        """Add the model with which a worker begins a round now. Raises OSError.

        Args:
            version: the round.
            worker: its index.
            values, momentum: its model.
            now: the time at which it begins.
            link_free: see PeerTimes.
        """
        if version not in self._pending:
            path = self._path(version, self.generation)
            self._pending[version] = PendingReplicas(create_replicas(path, *self._shape, version))
        pending = self._pending[version]
        pending.file.put(worker, values, momentum)
        pending.begun[worker] = now
        pending.link_free[worker] = link_free

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the versions of checkpoints that are not complete."""
        return tuple(self._pending)

    def has(self, version: int, worker: int) -> bool:
        """Return whether a worker's model of a version that is not complete is here."""
        return version in self._pending and worker in self._pending[version].begun

    def take(self, progress: PeerProgress, *, origin: float, now: float, sent_bytes: int) -> ReplicasAtVersion:
        """Return the checkpoint of the version that all members have just reached, which no longer counts as pending.

        The caller must first write the log up to this version, so that a run that resumes here has all earlier pushes.

        Args:
            progress: of the run.
            origin: time of a clock at which the training time of the run was 0 (seconds).
            now: the present time of this clock (seconds).
            sent_bytes: bytes that all workers have sent in all complete rounds.
        """
        version = progress.version
        boundary = progress.boundary
        pending = self._pending.pop(version)
        times = PeerTimes(pending.begun, pending.link_free, min(pending.begun.values()) - origin, sent_bytes)
        final = version >= self._steps
        # Other complete versions are not written: only the distance of their models is logged.
        is_kept = final or version in self.extra or (boundary is not None and self.config.run.epoch_checkpoints)
        # Nobody sends earlier versions any more; a long run would otherwise name thousands of them in each grant.
        self.extra = {each for each in self.extra if each >= version}
        state = self._state(progress, times, seconds=now - origin, final=final)
        return ReplicasAtVersion(state, pending.file, tuple(sorted(pending.begun)), sent_bytes, is_kept)

    def write(self, replicas: ReplicasAtVersion, secure_log: Callable[[], object] | None = None) -> bool | None:
        """Write a checkpoint that ``take`` has returned, and return whether it is kept.

        Returns None, and writes nothing, if the mean of the models is not finite. At the end of an epoch it also logs
        the distance of the models from their mean. Raises OSError, and SupersededError of ``secure_log``.

        secure_log: makes the log durable up to this version (default: for a local home)."""
        state = replicas.state
        version = state.version
        summary = replicas.file.summary(replicas.workers)
        if not (np.isfinite(summary.values).all() and np.isfinite(summary.momentum).all()):
            return None
        if state.epoch_boundary is not None:
            details = {
                "distance": summary.distance,
                "sent_bytes": replicas.sent_bytes,
                "replicas": len(replicas.workers),
            }
            at = {"epoch": state.epoch_boundary, "version": version, "seconds": state.seconds}
            log_event(self.folders.work, "consensus", **at, **details)
        folder = folder_of(self.root, version)
        # At the end of an epoch the models are needed for the log even if no checkpoint is kept.
        if not replicas.is_kept:
            self.discard(replicas)
            return False
        write_model(folder, version, summary.values, summary.momentum, self.generation)
        size = replicas.file.flush()
        if not self.folders.is_local:
            write_whole(folder / replicas.file.path.name, replicas.file.path.read_bytes())
        (secure_log or partial(sync, self.folders.work / PUSHES))()
        write_state(folder, replace(state, parts={replicas.file.path.name: size}))
        if not self.folders.is_local:
            self.discard(replicas)
        return True

    def discard(self, replicas: ReplicasAtVersion) -> None:
        """Delete the models of a checkpoint on this host."""
        replicas.file.path.unlink(missing_ok=True)
        remove_empty(replicas.file.path.parent)

    def _state(self, progress: PeerProgress, times: PeerTimes, *, seconds: float, final: bool) -> RunState:
        """Return the state of a checkpoint. seconds: training time now."""
        position = progress.budget.position
        memory: dict[str, Any] = {REPLICAS: times.to_json(), PLAN: plan_to_json(self.plan)}
        if self.earlier:
            memory[EARLIER_PLANS] = list(self.earlier)
        # One slice, with the mean, and the models as a further part. Copies, because a thread may write the state
        # while the run continues.
        return RunState(
            version=position.version,
            accepted=position.accepted,
            examples=position.examples,
            generation=self.generation,
            epoch=progress.budget.epoch,
            epoch_boundary=progress.boundary,
            final=final,
            clocks={worker: min(member.clock, position.version) for worker, member in enumerate(progress.members)},
            seconds=seconds,
            num_servers=1,
            num_parameters=self.facts.num_parameters,
            num_buffers=self.facts.num_buffers,
            identity=self.config.identity(),
            memory=memory,
            passes=deepcopy(progress.passes.state),
            epoch_sums=dict(progress.epoch_sums.sums),
            gossip=deepcopy(position.gossip),
        )

    def models_of(self, state: RunState) -> ReplicaFile | None:
        """Open the models of a checkpoint, of a remote home a copy on this host. Raises DataError and OSError.

        Returns None if the workers begin with it, at the start of the run or of their cohort: all with the mean."""
        if not PeerTimes.from_state(state).begun or self.config.cohorts.begins_at(state.version):
            return None
        return self._open(state, self.facts.num_workers)

    def read_mean(self, state: RunState, stored: Collection[int]) -> tuple[Float32s, Float32s]:
        """Return values and momentum of the mean of the models of a checkpoint, with which other workers may begin.

        Where a cohort begins, losses of rows go to their new workers. Otherwise the mean has the mean of the loss tables,
        also for a worker of the cohort that the checkpoint lacks. Raises DataError and OSError.

        stored: workers that have a model in it, before ``begin_peers``."""
        values, momentum = read_slice_range(self.root, state.version, 0, state.total)
        if not (stored and self.facts.shard_rows and self.config.cohorts.begins_at(state.version)):
            return values, momentum
        file = self._open(state, self.config.cohorts.previous.workers)
        models = {worker: file.values[worker] for worker in stored}
        return carry_losses(self.config, self.facts, values, models), momentum

    def _open(self, state: RunState, num_workers: int) -> ReplicaFile:
        """Open the models of all workers in a checkpoint."""
        path = self._path(state.version, state.generation)
        shape = num_workers, self.facts.num_parameters, self.facts.num_buffers
        if self.folders.is_local:
            return open_replicas(path, *shape, state.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.write_bytes((folder_of(self.root, state.version) / path.name).read_bytes())
            return open_replicas(path, *shape, state.version)
        finally:
            # The mapped memory keeps the copy's content until nobody uses it any more.
            path.unlink(missing_ok=True)
            remove_empty(path.parent)

    def _path(self, version: int, generation: int) -> Path:
        return folder_of(self.local_root, version) / replica_name(generation)


def is_due(version: int, cohort: Cohort, steps_per_epoch: int, steps: int, extra: Collection[int]) -> bool:
    """Return whether the models of a version are needed: at the end of an epoch or of the run, or by time.

    extra: versions of checkpoints that are due by time."""
    return cohort.ends_epoch(version, steps_per_epoch) or version >= steps or version in extra


def budget_of(config: Config, facts: RunFacts, state: RunState) -> RoundBudget:
    """Return the budget of a run at a checkpoint."""
    steps = config.steps_per_worker(facts.rows)
    per_epoch = config.steps_per_epoch(facts.rows)
    return RoundBudget(
        facts.num_workers,
        steps,
        per_epoch,
        config.run.stop,
        position_of(state),
        cohort=config.cohorts.present,
        # A start that continues a run reopens its final checkpoint before.
        has_ended=state.final,
    )


def begin_peers(config: Config, facts: RunFacts, root: Place, state: RunState) -> RunState:
    """Return the state of a checkpoint as the present cohort of workers continues from it.

    If the cohort begins with it, all workers begin at the time at which the checkpoint was complete. Their links are
    planned anew, unless there are as many workers as before. Changes no other state. Raises DataError as ``begin_cohort``,
    and UsageError if these workers cannot have the topology.

    root: folder of checkpoints."""
    result = begin_cohort(config, state)
    if not config.cohorts.begins_at(state.version):
        return result
    before = plan_of(config, replace(facts, num_workers=config.cohorts.previous.workers), root, state)
    times = PeerTimes.from_state(state).together(facts.num_workers, state.seconds)
    memory = {
        REPLICAS: times.to_json(),
        PLAN: plan_to_json(before if before.num_workers == facts.num_workers else _new_plan(config, facts)),
        EARLIER_PLANS: [*state.memory.get(EARLIER_PLANS, ()), plan_to_json(before)],
    }
    return replace(result, memory=memory)


def plan_of(config: Config, facts: RunFacts, root: Place, state: RunState) -> TopologyPlan:
    """Return the plan of a run's links: the one that its checkpoint has, or a new one before the first update.

    root: folder of checkpoints. Raises DataError if the stored plan is damaged, UsageError if there can be none."""
    stored = stored_plans(root, state)
    return stored[-1] if stored else _new_plan(config, facts)


def _new_plan(config: Config, facts: RunFacts) -> TopologyPlan:
    exchange = config.exchange
    assert isinstance(exchange, NeighbourExchange), "only these have links"
    return exchange.plan(facts.num_workers, config.run.seed)


def stored_plans(root: Place, state: RunState) -> list[TopologyPlan]:
    """Return the plans in a checkpoint: of the links of each cohort of workers up to it, in their order.

    A checkpoint of an earlier version of this program, from before the first update, has none. Raises DataError if a plan
    is damaged. root: folder of checkpoints."""
    try:
        stored = [*state.memory.get(EARLIER_PLANS, ()), state.memory.get(PLAN)]
        return [plan_from_json(each) for each in stored if each is not None]
    except (TypeError, ValueError, AttributeError):
        raise broken(folder_of(root, state.version) / STATE, "holds no plan of links") from None


def describe_memory(facts: RunFacts) -> str:
    """Return a line about the memory and the disk that the models of all workers take."""
    model = FLOAT_BYTES * facts.elements
    model_bytes = MODELS_HELD * facts.num_workers * model
    stored = FLOAT_BYTES * facts.num_workers * (facts.elements + facts.num_parameters)
    return (
        f"{facts.num_workers:,} models of {model / 1e6:.3g} MB: up to {model_bytes / 1e9:.3g} GB of memory, and"
        f" {stored / 1e9:.3g} GB of disk per checkpoint"
    )
