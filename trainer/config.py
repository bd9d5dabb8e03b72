"""The configuration of a run: a frozen, self-validating object that all processes receive and the run saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from pipeline.core.command_line import seed as seed_number
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build, fits
from pipeline.core.shardset.ratios import Ratios, largest_remainder
from pipeline.core.sizes import parse_size
from pipeline.core.specs import Spec, default_member, from_json, option
from trainer.coordination.cohorts import SINGLE, Cohorts
from trainer.coordination.momentum import Momentum, heavy_ball, look_ahead, nesterov
from trainer.coordination.schedules import AUTO, RECIPES, are_drops, parse_drops
from trainer.exchange import EXCHANGES, Exchange
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.gossip.options import GossipOptions
from trainer.models import ModelSpec, model_from_json
from trainer.models.resnet import ResNet20
from trainer.protocols import PROTOCOLS, Protocol
from trainer.protocols.asp import ASP
from trainer.sampling import SAMPLERS, Sampler
from trainer.sampling.base import TableSampler
from trainer.sampling.mixture import is_mix, parse_mix
from trainer.sampling.repartition import LossStatistics, RepartitionOptions
from trainer.sampling.shuffle import ShuffleSampler

SEPARATOR = "\n"  # of several paths in the place of a set's URI: no path has it
FRESH_MOMENTUM = 0.9
HEARTBEAT_TIMEOUT_S = 15.0
DROPS = ", ".join(f"{name} at epochs {' and '.join(map(str, at))}" for name, at in sorted(RECIPES.items()) if at)


@dataclass(frozen=True)
class Data(RepartitionOptions, GossipOptions):
    """The training data, and how mini-batches are drawn from it.

    batch_size is the global mini-batch B. Each of n workers draws B/n examples per step, rounded as worker_batch says,
    or its part of B by the ratios of the shards; under Bernoulli sampling a random number around that. sampling is the
    name of Config.sampler."""

    shards: str = option(
        help="folder of a committed shard set, or without a manifest the Parquet file or folder of every shard",
        metavar="URI",
        may_change=True,
    )
    batch_size: int = option(128, "examples per mini-batch, divided among the workers", least=1)
    worker_batch: Literal["floor", "exact"] = option(
        "floor",
        "division of a mini-batch that the number of workers does not divide: floor drops the remainder, exact gives an"
        " extra example to each of the first workers",
        advanced=True,
    )
    sampling: str = option(
        ShuffleSampler.name,
        "sampler, which draws a worker's mini-batches from its rows",
        check=lambda name: name in SAMPLERS,
        expected=" or ".join(SAMPLERS),
        advanced=True,
    )
    mix: str = option(
        "",
        "shares of several shard sets in the examples of every worker, such as 0.5,0.3,0.2, for as many --shards; a resumed"
        " run may change them",
        metavar="LIST",
        check=is_mix,
        expected="positive shares, such as 0.5,0.3,0.2",
        may_change=True,
        advanced=True,
    )
    augment: bool = option(True, "crop and flip training images at random", advanced=True)
    follow: bool = option(
        False,
        "after each pass over a worker's rows, include the rows that a stream has appended since",
        may_change=True,
        advanced=True,
    )
    generation: int | None = option(
        None,
        "generation of a streamed shard set to train on",
        least=0,
        may_change=True,
        shown="the newest at the start of the run",
        advanced=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow and self.sampling != ShuffleSampler.name:
            raise UsageError(
                f"--follow needs passes over all rows in random order, which --sampling {self.sampling} does not make;"
                " leave out one of them"
            )
        if self.mix:
            self._check_mix()
        if self.repartition != "fixed":
            self._check_repartition()
        if self.gossip:
            self._check_gossip()

    def _check_gossip(self) -> None:
        """Raise UsageError for options that exclude an exchange of examples."""
        for is_given, flag in (
            (self.repartition != "fixed", f"--repartition {self.repartition}"),
            (self.follow, "--follow"),
            (bool(self.mix), "--mix"),
        ):
            if is_given:
                raise UsageError(
                    f"--gossip {self.gossip} exchanges examples of fixed shards of one set: leave out {flag}"
                )

    def _check_repartition(self) -> None:
        """Raise UsageError for options that exclude a repartition."""
        for is_given, flag in (
            (self.sampling != ShuffleSampler.name, f"--sampling {self.sampling}"),
            (self.follow, "--follow"),
            (bool(self.mix), "--mix"),
        ):
            if is_given:
                raise UsageError(
                    f"--repartition {self.repartition} draws passes over all rows of a set: leave out {flag}"
                )

    def _check_mix(self) -> None:
        """Raise UsageError for options that exclude a mixture, or another number of sets than of shares."""
        for is_given, flag in (
            (self.sampling != ShuffleSampler.name, f"--sampling {self.sampling}"),
            (self.follow, "--follow"),
            (self.generation is not None, f"--generation {self.generation}"),
        ):
            if is_given:
                raise UsageError(f"--mix draws passes over each of several sets: leave out {flag}")
        sets = len(self.shards.split(SEPARATOR))
        if sets != len(parse_mix(self.mix)[0].shares):
            raise UsageError(f"--mix {self.mix}: give as many shares as --shards names sets, {sets}")


@dataclass(frozen=True)
class Optimiser(Spec):
    """SGD with momentum on the servers.

    learning_rate is the single-process rate a. With n workers an update multiplies the sum of its gradients by a/n. For
    bsp this applies a to the mean of n gradients, for asp a/n to each gradient, and for an update of k gradients
    (k-bsp, k-batch-bsp) k*a/n to their mean. Protocols that weigh gradients, such as n-softsync, multiply each by its
    weight first. A rate or momentum of None means the default for the model and protocol; Config fills it in."""

    learning_rate: float | None = option(
        None,
        "learning rate of single-process SGD; each gradient of an update is multiplied by this rate divided by the number"
        " of workers (n-softsync: by the number of gradients in the update)",
        above=0,
        shown="set by the model, lower if gradients can be stale",
    )
    momentum: float | None = option(
        None,
        "momentum of SGD, kept on the servers",
        least=0,
        below=1,
        shown=f"{FRESH_MOMENTUM:g}; if gradients can be stale, set by the model, mostly {ModelSpec.stale_momentum:g}",
        advanced=True,
    )
    momentum_rule: Literal["auto", "heavy-ball", "nesterov", "look-ahead"] = option(
        "auto",
        "heavy-ball, nesterov: momentum decays with every update, as in SGD; look-ahead: it decays once per round of the"
        " workers, which compute gradients at the parameters extrapolated by it; auto: look-ahead if gradients can be stale,"
        " else heavy-ball",
        advanced=True,
    )
    weight_decay: float = option(
        2e-4, "coefficient of the L2 penalty, which is part of the loss", least=0, advanced=True
    )
    recipe: Literal["auto", "ch4", "ch6", "constant", "inverse-sqrt"] = option(
        "auto",
        f"schedule of the learning rate: auto divides it by ten after 3/4 and 9/10 of the run, {DROPS}; constant keeps it;"
        " inverse-sqrt divides it by the square root of the number of mini-batches",
        advanced=True,
    )
    drops: tuple[float, ...] = option(
        (),
        "epochs at which the learning rate is divided by ten, such as 100,150, instead of --recipe",
        metavar="LIST",
        parse=parse_drops,
        check=are_drops,
        expected="positive epochs in increasing order, such as 100,150",
        shown="those of --recipe",
        advanced=True,
    )
    tolerance: float = option(
        0.0,
        "end the run early when a mini-batch changes the parameters by less than this fraction of their norm (or of 1, if"
        " the norm is smaller); 0 disables the test; needs --servers 1",
        least=0,
        advanced=True,
    )
    batch_norm: Literal["ema", "last", "recalibrate"] = option(
        "recalibrate",
        "running statistics of BatchNorm: ema averages them over the steps of all workers, last takes them from the last"
        " update, recalibrate computes them from training rows before each evaluation",
        advanced=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", tuple(self.drops))  # JSON has lists
        super().__post_init__()
        if self.drops and self.recipe != AUTO:
            raise UsageError(
                f"--drops and --recipe {self.recipe} both set the schedule of the learning rate: leave out one of them"
            )


@dataclass(frozen=True)
class Processes(Spec):
    """The processes of a run, their device and their timeouts. A resumed run may change every field."""

    servers: int = option(1, "number of parameter servers", least=1, may_change=True)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of the workers' computation; auto: GPUs if available", may_change=True
    )
    threads: int = option(
        0,
        "CPU threads per worker; 0 divides this host's cores among its workers",
        least=0,
        may_change=True,
        advanced=True,
    )
    row_storage: Literal["auto", "memory", "mapped"] = option(
        "auto",
        "where workers keep the images of their rows: in their memory, or in memory-mapped files that all workers of a"
        " host share; auto: mapped if the rows of a worker need more than half of --worker-memory",
        may_change=True,
        advanced=True,
    )
    worker_memory: int | None = option(
        None,
        "memory per worker, such as 512M or 2Gi, by which --row-storage auto decides",
        metavar="SIZE",
        least=1,
        parse=partial(parse_size, flag="--worker-memory"),
        may_change=True,
        shown="the memory of this host or container divided by its workers",
        advanced=True,
    )
    same_host: Literal["memory", "socket"] = option(
        "memory", "transport between a worker and a server on the same host", may_change=True, advanced=True
    )
    encryption: Literal["on", "off"] = option(
        "on",
        "encryption of messages between hosts. With off they travel in clear text, and a process proves that it has the"
        " token by a password, which whoever can read the traffic can use too: only for networks that you trust",
        may_change=True,
        advanced=True,
    )
    start_wait_s: float = option(
        60.0,
        "seconds to wait at the start for missing workers before the others begin; bsp needs all workers",
        metavar="SECONDS",
        above=0,
        may_change=True,
        advanced=True,
    )
    heartbeat_timeout_s: float | None = option(
        None,
        "seconds without a heartbeat after which a process is restarted",
        metavar="SECONDS",
        above=0,
        may_change=True,
        shown=f"{HEARTBEAT_TIMEOUT_S:g}; for workers that exchange among themselves {AllReduce.worker_timeout_s:g}",
        advanced=True,
    )
    stall_timeout_s: float = option(
        300.0,
        "seconds without progress after which a process is restarted although it sends heartbeats; must exceed the time of"
        " a step, of an evaluation batch and of a checkpoint; 0 disables the test",
        metavar="SECONDS",
        least=0,
        may_change=True,
        advanced=True,
    )
    max_restarts: int = option(
        5,
        "fail when a process is restarted, or the run rolls back, more often than this without new progress in between;"
        " repeated restarts are delayed by up to 30 seconds",
        least=0,
        may_change=True,
        advanced=True,
    )


@dataclass(frozen=True)
class RunSpec(Spec):
    """The output, length, seeds and checkpoints of a run. Either epochs or steps is given."""

    output: str = option(help="folder of the run, local, hdfs:// or s3://", metavar="URI", may_change=True)
    epochs: int | None = option(
        None, "length of the run in passes over the training examples", least=1, may_change=True
    )
    steps: int | None = option(
        None, "length of the run in mini-batches per worker, instead of --epochs", least=1, may_change=True
    )
    seed: int = option(
        0, "seed of initial parameters, order of examples, augmentation and dropout", least=0, parse=seed_number
    )
    model_seed: int | None = option(
        None, "seed of initial parameters alone", least=0, parse=seed_number, shown="the value of --seed", advanced=True
    )
    precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "numbers of the forward and backward pass on the workers: bf16 uses torch's automatic mixed precision with"
        " bfloat16; parameters, messages, updates and evaluations stay float32",
        advanced=True,
    )
    evaluation_mode: Literal["clean", "paper"] = option(
        "clean",
        "evaluation of models: clean, or paper: with augmented images and the network in training mode, as the published"
        " results of importance-aware training were measured",
        advanced=True,
    )
    stop: Literal["global", "local"] = option(
        "global",
        "end of the run: global counts the steps of all workers together, local lets every worker do its own number of"
        " steps",
        advanced=True,
    )
    checkpoint_every_s: float = option(
        60.0, "seconds between checkpoints", metavar="SECONDS", above=0, may_change=True, advanced=True
    )
    example_ledger: bool = option(
        False,
        "keep the loss of every trained example, and whether it was predicted correctly, as Parquet in OUTPUT/examples",
        advanced=True,
    )
    epoch_checkpoints: bool = option(
        True, "also write and evaluate a checkpoint at the end of every epoch", may_change=True, advanced=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise UsageError("give the length of the run: either --epochs or --steps")


@dataclass(frozen=True)
class Config:
    """The configuration of one training run.

    Each part is a spec: its fields are the flags of the command line. Units are in the names. Rates and coefficients
    are not negative: an update subtracts the rate times a gradient, to which weight decay has been added. Raises
    UsageError for an invalid value."""

    data: Data
    run: RunSpec
    model: ModelSpec = ResNet20()
    optimiser: Optimiser = Optimiser()
    protocol: Protocol = ASP()
    exchange: Exchange = ParameterServer()
    processes: Processes = Processes()
    sampler: Sampler = ShuffleSampler()
    cohorts: Cohorts = SINGLE

    def __post_init__(self) -> None:
        """Fill in a learning rate and momentum that are not given, by model and protocol; check pairs of options.

        With stages each stage has defaults of its own, so that nothing is filled in for the run as a whole."""
        self._name_sampler()
        self._check_exchange()
        self._check_pairs()
        if self.exchange.stages():
            self.stage_configs()  # checks the options of each stage
            return
        coefficient = FRESH_MOMENTUM if self.protocol.synchronous else self.model.stale_momentum
        optimiser = self.optimiser
        complete = replace(
            optimiser,
            learning_rate=self.default_rate if optimiser.learning_rate is None else optimiser.learning_rate,
            momentum=coefficient * self.protocol.has_momentum if optimiser.momentum is None else optimiser.momentum,
        )
        object.__setattr__(self, "optimiser", complete)  # the dataclass is frozen

    def _name_sampler(self) -> None:
        """Have ``sampler`` and its name in ``data`` agree: either of them may be given, or both.

        Raises UsageError if they differ, or if the sampler has a parameter without a default."""
        name = self.data.sampling
        if self.sampler.name == name:
            return
        if name == ShuffleSampler.name:
            object.__setattr__(self, "data", replace(self.data, sampling=self.sampler.name))  # the dataclass is frozen
        elif self.sampler.name == ShuffleSampler.name:
            object.__setattr__(self, "sampler", default_member(SAMPLERS, "--sampling", name))
        else:
            raise UsageError(f"--sampling {name} has another sampler, {self.sampler.name}: leave out one of them")

    def _check_pairs(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.optimiser.tolerance and self.processes.servers > 1:
            raise UsageError(
                f"--tolerance needs the whole model on a single server: give --servers 1, not {self.processes.servers}"
            )
        # The table is merged like BatchNorm's statistics, of which the last worker's would replace all others'.
        if self.table_sampler and self.optimiser.batch_norm == "last":
            name = f"--sampling {self.sampler.name}" if self.sampler.name != ShuffleSampler.name else "--repartition"
            raise UsageError(f"{name} learns from all workers, and --batch-norm last keeps one's: leave it out")

        if self.table_sampler and self.protocol.most_local_steps() > 1:
            raise UsageError(
                f"--protocol {self.protocol.name} pushes after several mini-batches, and the loss table of --sampling"
                f" {self.sampler.name} is merged after each: leave out one of them"
            )
        if self.data.repartition != "fixed":
            self._check_repartition()
        if self.data.gossip:
            self._check_gossip()

    def _check_gossip(self) -> None:
        """Raise UsageError for exchanges and samplers whose workers cannot exchange examples."""
        if not isinstance(self.exchange, ParameterServer):
            raise UsageError(
                f"--gossip {self.data.gossip} sends examples through parameter servers, which --exchange"
                f" {self.exchange.name} lacks: leave out one of them"
            )
        if self.table_sampler:
            raise UsageError(
                f"--gossip {self.data.gossip} mixes examples of other workers in, which the loss table of --sampling"
                f" {self.sampler.name} does not count: leave out one of them"
            )

    def _check_repartition(self) -> None:
        """Raise UsageError for protocols and exchanges whose workers do not make every step together."""
        together = isinstance(self.exchange, ParameterServer | AllReduce) and self.protocol.name == "bsp"
        if not together:
            name = self.exchange.name
            other = f"--protocol {self.protocol.name}" if name == ParameterServer.name else f"--exchange {name}"
            raise UsageError(
                f"--repartition {self.data.repartition} divides the rows for a step that all workers make together, which"
                f" {other} lacks: give --protocol bsp or --exchange all-reduce"
            )

    @property
    def reads_losses(self) -> bool:
        """Whether workers select examples for others by the losses of their rows."""
        return bool(self.data.gossip) and self.data.selector != "random"

    @property
    def loss_statistics(self) -> LossStatistics | None:
        """The losses by which a run divides its rows; None if it does not."""
        return LossStatistics(self.data.importance) if self.data.repartition == "importance" else None

    @property
    def table_sampler(self) -> TableSampler | None:
        """The owner of the run's loss table; None for a run without one."""
        return self.loss_statistics or (self.sampler if isinstance(self.sampler, TableSampler) else None)

    def stage_configs(self) -> tuple[Config, ...]:
        """Return the configuration of each stage of the run, with its exchange and protocol and their defaults.

        A run without a switch is one stage. Raises UsageError for options that a stage does not support."""
        stages = []
        for exchange, protocol in self.exchange.stages():
            if isinstance(exchange, NeighbourExchange):
                raise UsageError(
                    f"--exchange {self.exchange.name} cannot have a stage of {exchange.name}: a stage begins with one model,"
                    f" and {exchange.name} has one per worker"
                )
            # Servers that have no part in a stage are idle.
            servers = 1 if exchange.protocol else self.processes.servers
            processes = replace(self.processes, servers=servers)
            stages.append(replace(self, exchange=exchange, protocol=protocol, processes=processes))
        return tuple(stages) or (self,)

    def _check_exchange(self) -> None:
        """Set the protocol of an exchange that has its own, and check the options that it does not support."""
        name = self.exchange.name
        own = self.exchange.protocol
        by_rule = isinstance(self.exchange, StrategySwitch) and self.exchange.alpha is None
        if by_rule and not self.run.epoch_checkpoints:
            raise UsageError(
                "--alpha auto evaluates every epoch: leave out --no-epoch-checkpoints, or give --alpha SHARE"
            )
        if isinstance(self.exchange, StrategySwitch) and self.exchange.switch_on == "holdout":
            self._check_holdout()
        if self.exchange.stages() and self.protocol != ASP():
            raise UsageError(f"--exchange {name} has protocols of its own: leave out --protocol {self.protocol.name}")
        if own is None:
            return
        # A command line refuses --protocol beside such an exchange, so that any other protocol is the default here.
        if self.protocol.name != own:
            object.__setattr__(self, "protocol", PROTOCOLS[own]())  # the dataclass is frozen
        if self.processes.servers > 1:
            raise UsageError(
                f"--exchange {name} keeps the model on the workers: leave out --servers {self.processes.servers}"
            )
        if self.optimiser.tolerance:
            raise UsageError(f"--exchange {name} has no --tolerance: leave it out, or use {ParameterServer.name}")

    def _check_holdout(self) -> None:
        """Raise UsageError for ways of drawing rows that do not leave out the rows that are held out."""
        for is_given, flag in (
            (self.data.follow, "--follow"),
            (not self.sampler.fixed_size, f"--sampling {self.sampler.name}"),
        ):
            if is_given:
                raise UsageError(f"--switch-on holdout needs passes over fixed rows: leave out {flag}")

    def worker_batches(self, num_workers: int, ratios: Ratios = ()) -> tuple[int, ...]:
        """Return each worker's examples per step for n workers and the global mini-batch B. A result may be 0.

        With equal shards each worker draws floor(B/n); with --worker-batch exact the first B mod n workers draw one
        more. With ratios, B is divided in their proportion, so that all workers finish a pass in the same number of
        steps: rounded down, or with ``exact`` by largest remainder.

        num_workers: n; ratios: the ratios of the set's shards, empty if they are equal."""
        size = self.data.batch_size
        if ratios and self.data.worker_batch == "exact":
            return tuple(largest_remainder(np.array([size]), ratios)[0].tolist())
        if ratios:
            return tuple(size * ratio // sum(ratios) for ratio in ratios)
        share, rest = divmod(size, num_workers)
        return tuple(share + (self.data.worker_batch == "exact" and worker < rest) for worker in range(num_workers))

    def reported_rows(self, rows: int) -> int:
        """Return the most rows whose losses a report holds: of a push if the run has a ledger, else none.

        rows: distinct training examples."""
        most = max(self.data.batch_size, rows) * self.protocol.most_local_steps()
        return most if self.run.example_ledger else 0

    @property
    def heartbeat_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a process that is no worker is restarted."""
        timeout_s = self.processes.heartbeat_timeout_s
        return HEARTBEAT_TIMEOUT_S if timeout_s is None else timeout_s

    @property
    def worker_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a worker is restarted."""
        timeout_s = self.processes.heartbeat_timeout_s
        return self.exchange.worker_timeout_s if timeout_s is None else timeout_s

    @property
    def model_seed(self) -> int:
        """The seed of the initial parameters."""
        return self.run.seed if self.run.model_seed is None else self.run.model_seed

    @property
    def learning_rate(self) -> float:
        """The single-process rate a."""
        assert self.optimiser.learning_rate, "filled in from the start, or asked of a stage"
        return self.optimiser.learning_rate

    @property
    def default_rate(self) -> float:
        """The single-process rate of a run without --learning-rate."""
        if self.protocol.synchronous:
            return self.model.learning_rate
        if self.protocol.has_momentum:
            return self.model.stale_learning_rate
        # As far as the gradients of a push move the parameters with momentum in the end, which the steps of a push share.
        return self.model.stale_learning_rate / (1 - self.model.stale_momentum) / self.protocol.most_local_steps()

    @property
    def coefficient(self) -> float:
        """The coefficient of momentum."""
        assert self.optimiser.momentum is not None, "filled in from the start, or asked of a stage"
        return self.optimiser.momentum

    def momentum_of(self, num_workers: int) -> Momentum:
        """Return the momentum rule for ``num_workers`` workers."""
        coefficient = self.coefficient
        rule = self.optimiser.momentum_rule
        if rule == "heavy-ball" or (rule == "auto" and (self.protocol.synchronous or num_workers == 1)):
            return heavy_ball(coefficient)
        if rule == "nesterov":
            return nesterov(coefficient)
        return look_ahead(coefficient, self.protocol.update_size(num_workers), num_workers)

    def pushed_statistics(self, num_workers: int) -> Literal["changes", "whole"]:
        """Return the form in which workers push BatchNorm's running statistics (see ParameterSlice.statistics)."""
        return "whole" if self.optimiser.batch_norm == "last" or num_workers == 1 else "changes"

    def steps_per_epoch(self, rows: int) -> int:
        """Return the mini-batches per worker and epoch: floor(rows / B), at least 1, for any sharding.

        rows: distinct training examples."""
        return max(1, rows // self.data.batch_size)

    def steps_per_worker(self, rows: int) -> int:
        """Return the clock at which the workers end, by default their mini-batches. rows: distinct training examples."""
        per_epoch = self.steps_per_epoch(rows)
        present = self.cohorts.present
        return present.last_step(steps=self.run.steps, epochs=self.run.epochs or 0, steps_per_epoch=per_epoch)

    def mini_batches_per_worker(self, rows: int) -> int:
        """Return the mini-batches per worker in the whole run, in which workers kept pace. rows: see ``steps_per_worker``.

        It differs from the clock at the end after a change of workers, who begin at the greatest clock of those before."""
        present = self.cohorts.present
        return self.steps_per_worker(rows) - present.clock + present.taken

    def total_epochs(self, rows: int) -> float:
        """Return the length of the run in epochs. rows: distinct training examples."""
        return self.cohorts.present.epochs(self.steps_per_worker(rows), self.steps_per_epoch(rows))

    def num_workers(self, num_shards: int) -> int:
        """Return the number of workers: one per shard, unless a resume has changed it."""
        return self.cohorts.present.workers or num_shards

    def to_json(self) -> dict[str, Any]:
        """Return one entry per part; model, protocol, exchange and sampler by name, with their own parameters.

        A sampler without parameters has no entry, because its name is in ``data``; cohorts only if there are several."""
        parts = {part.name: getattr(self, part.name).to_json() for part in fields(self)}
        if not self.sampler.params():
            del parts["sampler"]
        if not self.cohorts.entries:
            del parts["cohorts"]
        return parts

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
            # Configurations saved before there were other exchanges do not name theirs.
            exchange=from_json(EXCHANGES, "--exchange", values.get("exchange", {"name": ParameterServer.name})),
            processes=build(Processes, values["processes"]),
            sampler=from_json(SAMPLERS, "--sampling", values.get("sampler", {"name": values["data"]["sampling"]})),
            cohorts=Cohorts.from_json(values.get("cohorts", {})),
        )

    def essentials(self) -> dict[str, Any]:
        """Return the values that a resumed run must not change, by flag name."""
        names = {"--model": self.model.name, "--protocol": self.protocol.name, "--exchange": self.exchange.name}
        parts = [getattr(self, part.name).identity() for part in fields(self)]
        # The number of intervals follows from the length of the run.
        if self.data.repartition == "importance":
            parts.append({"epochs": self.run.epochs, "steps": self.run.steps})
        values = names | {f"--{key.replace('_', '-')}": value for part in parts for key, value in part.items()}
        # A resume that changes the mini-batch says so in the cohorts.
        return values | ({"--batch-size": self.cohorts.first.batch_size} if self.cohorts.entries else {})

    def identity(self) -> str:
        """Return ``essentials`` as canonical JSON. A resume is exact only with a checkpoint of the same identity."""
        return json.dumps(self.essentials(), sort_keys=True)


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that every process knows.

    Attributes:
        num_workers: workers, one per shard unless a resume has changed that.
        rows: distinct training examples.
        num_parameters: length P of the first part of the flat vector, the model's parameters.
        num_buffers: length Q of its second part, BatchNorm's running statistics.
        shards: digest of the shard set's content.
        fingerprint: sum of the hashes of the distinct rows modulo 2^64; None if the manifest has none.
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

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON, the fingerprint in hexadecimal: it may exceed int64."""
        fingerprint = None if self.fingerprint is None else f"{self.fingerprint:016x}"
        return asdict(self) | {"fingerprint": fingerprint, "ratios": list(self.ratios)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunFacts:
        """Parse the result of ``to_json``. Raises DataError."""
        ratios = values.get("ratios", [])
        fingerprint = values.get("fingerprint")
        try:
            if not fits(ratios, list[int]) or not fits(fingerprint, str | None):
                raise ValueError("'ratios' or 'fingerprint' is of another type")
            number = None if fingerprint is None else int(fingerprint, 16)
            return replace(build(cls, {**values, "ratios": (), "fingerprint": None}), ratios=ratios, fingerprint=number)
        except ValueError as fault:
            raise DataError(
                f"the facts of the run are not read here: {fault}; install one version of the program on all hosts"
            ) from None

    @property
    def elements(self) -> int:
        """The length P + Q of the flat vector."""
        return self.num_parameters + self.num_buffers


def slice_bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into ``parts`` half-open ranges, whose sizes differ by at most one: bounds total*i//parts."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
