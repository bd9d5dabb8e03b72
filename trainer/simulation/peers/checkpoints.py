"""Checkpoints of runs whose workers keep models of their own: the mean of all models, and each model with its times.

A checkpoint of version V has the models with which the workers begin round V. Workers begin it at different times, and
the last one completes the checkpoint. The mean is a slice, which the evaluator reads like a slice of servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.atomic import sync
from trainer.checkpoints.prune import prune
from trainer.checkpoints.replica_file import ReplicaFile, create_replicas, open_replicas, replica_name
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_slice, write_state
from trainer.config import Config, RunFacts
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.coordination.peer_progress import PeerProgress
from trainer.home.place import remove_empty
from trainer.run_files import CHECKPOINTS, PUSHES
from trainer.runlog.events import log_event

REPLICAS = "replicas"  # key of a state's memory
BY_WORKER = ("begun", "link_free")
FLOAT_BYTES = 4
MODELS_HELD = 4  # its parameters, its momentum, and at most two earlier models that slower neighbours still need


class PeerTimes(NamedTuple):
    """The times at a checkpoint, from which a resumed run repeats all events that follow.

    Attributes:
        begun: virtual time at which each worker began round V, by worker; absent workers are missing.
        link_free: virtual time at which its link had sent all earlier messages.
        seconds: training time at the earliest time in ``begun``.
        sent_bytes: bytes that all workers had sent in earlier rounds.
    """

    begun: Mapping[int, float] = {}
    link_free: Mapping[int, float] = {}
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def start(self) -> float:
        """The virtual time at which the first worker began; 0 at the start of a run."""
        return min(self.begun.values(), default=0.0)

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


class PeerCheckpoints:
    """The checkpoints of one generation that are not complete yet, and the writing of complete ones.

    Args:
        config, facts: the run.
        work: the run's folder.
        generation: number of the generation.

    Attributes:
        extra: versions of checkpoints that are due by time.
    """

    def __init__(self, config: Config, facts: RunFacts, work: Path, generation: int) -> None:
        self.config = config
        self.facts = facts
        self.work = work
        self.root = work / CHECKPOINTS
        self.generation = generation
        self.extra: set[int] = set()
        self._shape = (facts.num_workers, facts.num_parameters, facts.num_buffers)
        self._steps = config.steps_per_worker(facts.rows)
        self._steps_per_epoch = config.steps_per_epoch(facts.rows)
        self._pending: dict[int, PendingReplicas] = {}

    def is_due(self, version: int) -> bool:
        """Return whether the models of a version are needed: at the end of an epoch or of the run, or by time."""
        return version % self._steps_per_epoch == 0 or version >= self._steps or version in self.extra

    def put(self, version: int, worker: int, replica: ParameterSlice, now: float, link_free: float) -> None:
        """Add the model with which a worker begins a round now. Raises OSError. link_free: see PeerTimes."""
        if version not in self._pending:
            path = folder_of(self.root, version) / replica_name(self.generation)
            self._pending[version] = PendingReplicas(create_replicas(path, *self._shape, version))
        pending = self._pending[version]
        pending.file.put(worker, replica.values, replica.momentum)
        pending.begun[worker] = now
        pending.link_free[worker] = link_free

    def is_pending(self, version: int) -> bool:
        return version in self._pending

    def complete(self, progress: PeerProgress, *, origin: float, now: float, sent_bytes: int) -> bool | None:
        """Complete the checkpoint of the version that all members have just reached, and return whether it is kept.

        Returns None, and writes nothing, if the mean of the models is not finite. At the end of an epoch it also logs
        the distance of the models from their mean. Raises OSError. The caller has written the log up to this version.

        Args:
            progress: of the run.
            origin: the virtual time at which its training time was 0.
            now: virtual time.
            sent_bytes: bytes that all workers have sent in all complete rounds.
        """
        version = progress.version
        pending = self._pending.pop(version)
        workers = sorted(pending.begun)
        summary = pending.file.summary(workers)
        if not (np.isfinite(summary.values).all() and np.isfinite(summary.momentum).all()):
            return None
        boundary = progress.boundary
        seconds = now - origin
        if boundary is not None:
            details = {"distance": summary.distance, "sent_bytes": sent_bytes, "replicas": len(workers)}
            log_event(self.work, "consensus", epoch=boundary, version=version, seconds=seconds, **details)
        final = version >= self._steps
        folder = folder_of(self.root, version)
        # At the end of an epoch the models are needed for the log even if no checkpoint is kept.
        if not (final or version in self.extra or (boundary is not None and self.config.run.epoch_checkpoints)):
            pending.file.path.unlink()
            remove_empty(folder)
            return False
        total = self.facts.elements
        write_slice(folder, 0, 1, version, 0, total, total, summary.values, summary.momentum, self.generation)
        sync(self.work / PUSHES)
        times = PeerTimes(pending.begun, pending.link_free, min(pending.begun.values()) - origin, sent_bytes)
        parts = {pending.file.path.name: pending.file.flush()}
        write_state(folder, self._state(progress, times, parts, seconds=seconds, final=final))
        prune(self.root)
        return True

    def _state(
        self, progress: PeerProgress, times: PeerTimes, parts: dict[str, int], *, seconds: float, final: bool
    ) -> RunState:
        """Return the state of a checkpoint. parts: see RunState; seconds: training time now."""
        position = progress.budget.position
        # One slice, with the mean, and the models as a further part.
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
            memory={REPLICAS: times.to_json()},
            passes=progress.passes.held,
            epoch_sums=progress.epoch_sums.held,
            parts=parts,
        )

    def models_of(self, state: RunState) -> ReplicaFile:
        """Open the models of a checkpoint. Raises DataError."""
        path = folder_of(self.root, state.version) / replica_name(state.generation)
        return open_replicas(path, *self._shape, state.version)


def describe_memory(facts: RunFacts) -> str:
    """Return a line about the memory and the disk that the models of all workers take."""
    model = FLOAT_BYTES * facts.elements
    model_bytes = MODELS_HELD * facts.num_workers * model
    stored = FLOAT_BYTES * facts.num_workers * (facts.elements + facts.num_parameters)
    return (
        f"{facts.num_workers:,} models of {model / 1e6:.3g} MB: up to {model_bytes / 1e9:.3g} GB of memory, and"
        f" {stored / 1e9:.3g} GB of disk per checkpoint"
    )
