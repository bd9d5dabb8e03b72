"""What a run is told: one frozen object that validates itself, travels to every process and is saved with the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pipeline.errors import UsageError


@dataclass(frozen=True)
class Config:
    """One training run. Units are in the names; a minus sign never appears twice (weight decay is added to gradients).

    batch_size is the global mini-batch B, learning_rate the single-process rate a: workers take B/n examples, and
    asynchronous protocols apply each push with a/n (SPEC 3, 4.1). Raises UsageError for a value that cannot be."""

    shards: str
    output: str
    model: str = "resnet20"
    protocol: str = "asp"
    staleness_bound: int = 3
    servers: int = 1
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    batch_size: int = 128
    worker_batch: Literal["floor", "exact"] = "floor"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 2e-4
    recipe: Literal["ch4", "ch6", "constant", "inverse-sqrt"] = "ch6"
    sampling: Literal["shuffle", "bernoulli"] = "shuffle"
    tolerance: float = 0.0
    batch_norm: Literal["ema", "last", "recalibrate"] = "ema"
    norm: Literal["batch", "group"] = "batch"
    shortcut: Literal["pad", "conv"] = "pad"
    intercept: bool = True
    augment: bool = True
    stop: Literal["global", "local"] = "global"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    same_host: Literal["memory", "socket"] = "memory"
    checkpoint_every_s: float = 60.0
    epoch_checkpoints: bool = True
    start_wait_s: float = 60.0
    heartbeat_timeout_s: float = 15.0
    max_restarts: int = 5

    def __post_init__(self) -> None:
        def refuse(name: str, want: str) -> None:
            raise UsageError(f"--{name.replace('_', '-')} must be {want}, got {getattr(self, name)!r}")

        for name in ("servers", "batch_size"):
            if getattr(self, name) < 1:
                refuse(name, "at least 1")
        for name in ("staleness_bound", "seed", "weight_decay", "tolerance", "threads", "max_restarts"):
            if not getattr(self, name) >= 0:
                refuse(name, "0 or more")
        for name in ("learning_rate", "checkpoint_every_s", "start_wait_s", "heartbeat_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                refuse(name, "a positive number")
        if not 0 <= self.momentum < 1:
            refuse("momentum", "at least 0 and below 1")
        if self.tolerance and self.servers > 1:
            raise UsageError(
                f"--tolerance looks at the whole model on one server: give --servers 1, not {self.servers}"
            )
        if (self.epochs is None) == (self.steps is None):
            raise UsageError("give the length of the run: either --epochs or --steps")
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                refuse(name, "at least 1")

    def worker_batch_size(self, worker: int, num_workers: int) -> int:
        """Examples a worker draws a step: floor(B/n), or with ``exact`` one more for the first B mod n workers."""
        share, rest = divmod(self.batch_size, num_workers)
        return share + (self.worker_batch == "exact" and worker < rest)

    def fraction(self, rows: int) -> float | None:
        """The probability of each of so many rows to be in a mini-batch, where they are drawn by Bernoulli sampling."""
        return self.batch_size / rows if self.sampling == "bernoulli" else None

    def steps_per_epoch(self, rows: int) -> int:
        """Mini-batches a worker runs an epoch, the same for every strategy: floor(distinct examples / B) (SPEC 0)."""
        return max(1, rows // self.batch_size)

    def steps_per_worker(self, rows: int) -> int:
        """Mini-batches each worker runs in all."""
        return self.steps if self.steps is not None else (self.epochs or 0) * self.steps_per_epoch(rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        """Raises TypeError for a key that this version does not know."""
        return cls(**values)

    def identity(self) -> str:
        """What a checkpoint must agree on for a resume to be exact, as canonical JSON; where and how long may change."""
        free = {"output", "epochs", "steps", "servers", "device", "threads", "same_host", "max_restarts"}
        free |= {"checkpoint_every_s", "epoch_checkpoints", "start_wait_s", "heartbeat_timeout_s", "shards"}
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self) if f.name not in free}, sort_keys=True)


@dataclass(frozen=True)
class Facts:
    """What every process knows of a run: rows: distinct training examples; the flat vector has num_parameters, then
    num_buffers numbers."""

    num_workers: int
    rows: int
    num_parameters: int
    num_buffers: int

    @property
    def numbers(self) -> int:
        return self.num_parameters + self.num_buffers
