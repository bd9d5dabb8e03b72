"""The configuration of a run: a frozen, self-validating object that all processes receive and the run saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from pipeline.core.command_line import seed as seed_number
from pipeline.core.errors import UsageError
from pipeline.core.json_values import build
from pipeline.core.shardset.ratios import Ratios, largest_remainder
from pipeline.core.specs import Spec, from_json, option
from trainer.coordination.momentum import Momentum, heavy_ball, look_ahead
from trainer.coordination.schedules import RECIPES
from trainer.models import ModelSpec, model_from_json
from trainer.models.resnet import ResNet20
from trainer.protocols import PROTOCOLS, Protocol
from trainer.protocols.asp import ASP

FRESH_MOMENTUM = 0.9
DROPS = ", ".join(f"{name} {' and '.join(map(str, at))}" for name, at in sorted(RECIPES.items()) if at)


@dataclass(frozen=True)
class Data(Spec):
    """The training data, and how mini-batches are drawn from it.

    batch_size is the global mini-batch B: each of N workers draws B/N examples per step."""

    shards: str = option(help="folder of a committed shard set", metavar="URI", may_change=True)
    batch_size: int = option(128, "global mini-batch: N workers draw B/N examples each a step", metavar="B", least=1)
    worker_batch: Literal["floor", "exact"] = option(
        "floor", "where N does not divide B: floor drops the rest, exact gives the first workers one more"
    )
    sampling: Literal["shuffle", "bernoulli"] = option(
        "shuffle",
        "shuffle: passes over a worker's rows, each in a new order; bernoulli: every row is in a mini-batch with"
        " probability B/rows, and updates are means over examples, as in MLlib",
    )
    augment: bool = option(True, "random crops and flips while training")
    follow: bool = option(
        False,
        "at the end of a pass over a worker's rows, go on with those that a stream has appended since",
        may_change=True,
    )
    generation: int | None = option(
        None,
        "of a set that a stream appends to: train on it as it was with generation G",
        metavar="G",
        least=0,
        may_change=True,
        shown="the newest when the run begins",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow and self.sampling == "bernoulli":
            raise UsageError("--follow goes by passes over the rows, which --sampling bernoulli has not; leave out one")


@dataclass(frozen=True)
class Optimiser(Spec):
    """SGD with momentum on the servers.

    learning_rate is the single-process rate a: synchronous protocols apply a to the mean of N gradients, asynchronous
    ones a/N to each gradient. A rate or momentum of None means the default for the model and protocol; Config fills it
    in."""

    learning_rate: float | None = option(
        None,
        "rate of a single process: bsp applies A to the mean of N gradients, asp and ssp A/N to each",
        metavar="A",
        above=0,
        shown="the model's own, less where gradients may be stale",
    )
    momentum: float | None = option(
        None,
        "of SGD, on the servers",
        metavar="M",
        least=0,
        below=1,
        shown=f"{FRESH_MOMENTUM:g}, or the model's own where gradients may be stale, mostly {ModelSpec.stale_momentum:g}",
    )
    momentum_rule: Literal["auto", "heavy-ball", "look-ahead"] = option(
        "auto",
        "heavy-ball: momentum decays by M an update, as in SGD; look-ahead: by M in as many gradients as there are workers,"
        " and workers compute at what it will have made of the parameters; auto: look-ahead where gradients may be stale",
    )
    weight_decay: float = option(2e-4, "L2 factor, part of the loss", metavar="W", least=0)
    recipe: Literal["auto", "ch4", "ch6", "constant", "inverse-sqrt"] = option(
        "auto",
        f"where the rate falls to a tenth. auto: after 3/4 and 9/10 of the run; by epochs: {DROPS}; constant: never;"
        " inverse-sqrt: A / sqrt(t) in mini-batch t",
    )
    tolerance: float = option(
        0.0,
        "end before --epochs or --steps, as soon as a global mini-batch moves the parameters by less than TOL times the"
        " greater of their norm and 1; needs --servers 1",
        metavar="TOL",
        least=0,
        shown="0: never",
    )
    batch_norm: Literal["ema", "last", "recalibrate"] = option(
        "recalibrate",
        "BatchNorm's running statistics: averaged over all workers' steps, the last update's, or taken anew from training"
        " rows before each evaluation",
    )


@dataclass(frozen=True)
class Processes(Spec):
    """The processes of a run, their device and their timeouts. A resumed run may change all of it."""

    servers: int = option(1, "parameter servers", metavar="S", least=1, may_change=True)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where workers compute; auto: on GPUs where there are any", may_change=True
    )
    threads: int = option(
        0,
        "of each worker's computation",
        metavar="T",
        least=0,
        may_change=True,
        shown="0: this host's cores / its workers",
    )
    same_host: Literal["memory", "socket"] = option(
        "memory", "how gradients reach a server on the same host", may_change=True
    )
    start_wait_s: float = option(
        60.0,
        "start without a worker that keeps the others waiting for so long; bsp needs all",
        metavar="SECONDS",
        above=0,
        may_change=True,
    )
    heartbeat_timeout_s: float = option(
        15.0, "a process without a heartbeat for so long is started again", metavar="SECONDS", above=0, may_change=True
    )
    stall_timeout_s: float = option(
        300.0,
        "a process that does nothing for so long, though it has heartbeats, is started again: choose more than one step,"
        " one batch of an evaluation and one checkpoint take; 0: never",
        metavar="SECONDS",
        least=0,
        may_change=True,
    )
    max_restarts: int = option(
        5,
        "give up when one process fails, or the run goes back to a checkpoint, more often than this without getting"
        " further than ever before in between; after the first time a restart waits, at most 30 s",
        metavar="R",
        least=0,
        may_change=True,
    )


@dataclass(frozen=True)
class RunSpec(Spec):
    """The output, length, seeds and checkpoints of a run. Either epochs or steps is given."""

    output: str = option(help="folder of the run: local, hdfs:// or s3://", metavar="DIR", may_change=True)
    epochs: int | None = option(
        None, "passes of all workers together over the examples", metavar="E", least=1, may_change=True
    )
    steps: int | None = option(
        None, "mini-batches of each worker, instead of --epochs", metavar="K", least=1, may_change=True
    )
    seed: int = option(
        0, "of initial parameters, order of examples, augmentation and dropout", metavar="S", least=0, parse=seed_number
    )
    model_seed: int | None = option(
        None, "of initial parameters alone", metavar="S", least=0, parse=seed_number, shown="that of --seed"
    )
    stop: Literal["global", "local"] = option(
        "global", "end when all workers together have done their steps, or each after its own"
    )
    checkpoint_every_s: float = option(60.0, "between checkpoints", metavar="SECONDS", above=0, may_change=True)
    epoch_checkpoints: bool = option(
        True, "write a checkpoint at the end of every epoch too, which is then evaluated", may_change=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise UsageError("give the length of the run: either --epochs or --steps")


@dataclass(frozen=True)
class Config:
    """The configuration of one training run.

    Each part is a spec: its fields are the flags of the command line. Units are in the names. No value is negated
    twice: weight decay is added to gradients. Raises UsageError for an invalid value."""

    data: Data
    run: RunSpec
    model: ModelSpec = ResNet20()
    optimiser: Optimiser = Optimiser()
    protocol: Protocol = ASP()
    processes: Processes = Processes()

    def __post_init__(self) -> None:
        rate = self.model.stale_learning_rate
        coefficient = self.model.stale_momentum
        if self.protocol.synchronous:
            rate = self.model.learning_rate
            coefficient = FRESH_MOMENTUM
        given = self.optimiser
        filled = replace(
            given,
            learning_rate=rate if given.learning_rate is None else given.learning_rate,
            momentum=coefficient if given.momentum is None else given.momentum,
        )
        object.__setattr__(self, "optimiser", filled)  # the dataclass is frozen
        if self.optimiser.tolerance and self.processes.servers > 1:
            raise UsageError(
                f"--tolerance looks at the whole model on one server: give --servers 1, not {self.processes.servers}"
            )

    def worker_batches(self, num_workers: int, ratios: Ratios = ()) -> tuple[int, ...]:
        """Return each worker's examples per step: floor(B/n), with ``exact`` one more for the first B mod n workers.

        ratios: the ratios of the set's shards, empty if they are equal. B is divided in these ratios, rounded down or,
        with ``exact``, by largest remainder, so that all workers finish a pass in the same number of steps. A result
        may be 0."""
        size = self.data.batch_size
        if ratios and self.data.worker_batch == "exact":
            return tuple(largest_remainder(np.array([size]), ratios)[0].tolist())
        if ratios:
            return tuple(size * ratio // sum(ratios) for ratio in ratios)
        share, rest = divmod(size, num_workers)
        return tuple(share + (self.data.worker_batch == "exact" and worker < rest) for worker in range(num_workers))

    @property
    def model_seed(self) -> int:
        """The seed of the initial parameters."""
        return self.run.seed if self.run.model_seed is None else self.run.model_seed

    @property
    def learning_rate(self) -> float:
        """The single-process rate a."""
        assert self.optimiser.learning_rate, "filled in from the start"
        return self.optimiser.learning_rate

    @property
    def coefficient(self) -> float:
        """The coefficient of momentum."""
        assert self.optimiser.momentum is not None, "filled in from the start"
        return self.optimiser.momentum

    def momentum_of(self, num_workers: int) -> Momentum:
        """Return the momentum rule for ``num_workers`` workers."""
        coefficient = self.coefficient
        rule = self.optimiser.momentum_rule
        if rule == "heavy-ball" or (rule == "auto" and (self.protocol.synchronous or num_workers == 1)):
            return heavy_ball(coefficient)
        return look_ahead(coefficient, self.protocol.update_size(num_workers), num_workers)

    def pushed_statistics(self, num_workers: int) -> Literal["changes", "whole"]:
        """Return the form in which workers push BatchNorm's running statistics (see ParameterSlice.statistics)."""
        return "whole" if self.optimiser.batch_norm == "last" or num_workers == 1 else "changes"

    def fraction(self, rows: int) -> float | None:
        """Return the probability that a row is in a mini-batch under Bernoulli sampling; None for other sampling."""
        return self.data.batch_size / rows if self.data.sampling == "bernoulli" else None

    def steps_per_epoch(self, rows: int) -> int:
        """Return the mini-batches per worker and epoch: floor(distinct examples / B), at least 1, for any sharding."""
        return max(1, rows // self.data.batch_size)

    def steps_per_worker(self, rows: int) -> int:
        """Return the mini-batches per worker in the whole run."""
        return self.run.steps if self.run.steps is not None else (self.run.epochs or 0) * self.steps_per_epoch(rows)

    def to_json(self) -> dict[str, Any]:
        """Return one entry per part; model and protocol by name, with their own parameters."""
        return {part.name: getattr(self, part.name).to_json() for part in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        """Build a configuration from the result of ``to_json``.

        Raises KeyError, TypeError, ValueError or UsageError for values that ``to_json`` of this version did not
        write."""
        return cls(
            data=build(Data, values["data"]),
            run=build(RunSpec, values["run"]),
            model=model_from_json(values["model"]),
            optimiser=build(Optimiser, values["optimiser"]),
            protocol=from_json(PROTOCOLS, "--protocol", values["protocol"]),
            processes=build(Processes, values["processes"]),
        )

    def essentials(self) -> dict[str, Any]:
        """Return the values that a resumed run must not change, by flag name."""
        names = {"--model": self.model.name, "--protocol": self.protocol.name}
        parts = (getattr(self, part.name).identity() for part in fields(self))
        return names | {f"--{key.replace('_', '-')}": value for part in parts for key, value in part.items()}

    def identity(self) -> str:
        """Return ``essentials`` as canonical JSON. A resume is exact only with a checkpoint of the same identity."""
        return json.dumps(self.essentials(), sort_keys=True)


@dataclass(frozen=True)
class Facts:
    """The facts about a run that every process knows.

    Attributes:
        num_workers: workers, one per shard.
        rows: distinct training examples.
        num_parameters: length P of the first part of the flat vector.
        num_buffers: length Q of its second part, BatchNorm's running statistics.
        shards: digest of the shard set's content.
        fingerprint: sum of the hashes of the rows.
        ratios: ratios of the shards, empty if they are equal.
        classifies: whether the model predicts classes, so that there is an accuracy.
    """

    num_workers: int
    rows: int
    num_parameters: int
    num_buffers: int
    shards: str = ""
    fingerprint: int | None = None
    ratios: Ratios = ()
    classifies: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratios", tuple(self.ratios))  # JSON has lists

    @property
    def elements(self) -> int:
        """The length P + Q of the flat vector."""
        return self.num_parameters + self.num_buffers


def slice_bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into half-open ranges total*i//n to total*(i+1)//n, whose sizes differ by at most one."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
