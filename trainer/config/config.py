"""The configuration of a run: a frozen, self-validating object that all processes receive and the run saves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import UsageError
from pipeline.core.json_values import build, field_types
from pipeline.core.shardset.ratios import Ratios, largest_remainder
from pipeline.core.specs import default_member, from_json
from trainer.config.data import CROP_FLIP, Data
from trainer.config.optimiser import ADAPTIVE_RATE, FRESH_MOMENTUM, SGD, Optimiser
from trainer.config.processes import HEARTBEAT_TIMEOUT_S, Processes
from trainer.config.run_spec import RunSpec
from trainer.coordination.cohorts import SINGLE, Cohort, Cohorts
from trainer.coordination.momentum import Momentum, heavy_ball, look_ahead, nesterov
from trainer.exchange import EXCHANGES, Exchange
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.gossip import SELECTORS
from trainer.gossip.random_examples import random_examples
from trainer.models import ModelSpec, model_from_json
from trainer.models.resnet import ResNet20
from trainer.protocols import PROTOCOLS, Protocol
from trainer.protocols.asp import ASP
from trainer.sampling import SAMPLERS, Sampler
from trainer.sampling.base import TableSampler
from trainer.sampling.loss_statistics import LossStatistics
from trainer.sampling.partition_plan import PartitionPlan
from trainer.sampling.shuffle import ShuffleSampler


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
        self._check_types()
        self._name_sampler()
        self._check_exchange()
        self._check_pairs()
        if self.exchange.stages():
            self.stage_configs()  # checks the options of each stage
            return
        optimiser = self.optimiser
        has_fresh_momentum = self.protocol.synchronous or optimiser.optimiser != SGD
        coefficient = FRESH_MOMENTUM if has_fresh_momentum else self.model.stale_momentum
        complete = replace(
            optimiser,
            learning_rate=self.default_rate if optimiser.learning_rate is None else optimiser.learning_rate,
            momentum=coefficient * self.protocol.has_momentum if optimiser.momentum is None else optimiser.momentum,
        )
        object.__setattr__(self, "optimiser", complete)  # the dataclass is frozen

    def _check_types(self) -> None:
        """Raise UsageError for a part of another type, such as the name or the class of a protocol."""
        for name, kind in field_types(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UsageError(f"{name} of Config must be an object of the class {kind.__name__}, got {value!r}")

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
        if self.optimiser.optimiser != SGD:
            self._check_optimiser()
        if self.run.evaluation_mode == "paper" and self.data.augmentation != CROP_FLIP:
            raise UsageError(
                f"--evaluation-mode paper crops and flips evaluation images, which --augmentation {self.data.augmentation}"
                " does not: leave out one of them"
            )
        # The table is merged like BatchNorm's statistics, of which the last worker's would replace all others'.
        if self.table_sampler and self.optimiser.batch_norm == "last":
            name = f"--sampling {self.sampler.name}" if self.sampler.name != ShuffleSampler.name else "--repartition"
            raise UsageError(f"{name} learns from all workers, and --batch-norm last keeps one's: leave it out")

        # A worker pushes the change of a row's loss. Before the last one is applied, the next would be added to it.
        has_rows = isinstance(self.sampler, TableSampler) and self.sampler.has_row_entries
        if has_rows and isinstance(self.exchange, ParameterServer) and not self.protocol.reads_own_writes:
            raise UsageError(
                f"--sampling {self.sampler.name} needs a worker's losses before its next mini-batch, but --protocol"
                f" {self.protocol.name} may apply them later: give another --protocol, such as asp, or another --sampling"
            )
        if self.data.repartition != "fixed":
            self._check_repartition()
        if self.data.gossip:
            self._check_gossip()

    def _check_optimiser(self) -> None:
        """Raise UsageError for exchanges that cannot hold the state of an update rule, and for rules of momentum."""
        name = self.optimiser.optimiser
        if not isinstance(self.exchange, ParameterServer | AllReduce):
            raise UsageError(
                f"--optimiser {name} keeps its state on servers or under all-reduce, which --exchange {self.exchange.name}"
                " lacks: leave out one of them"
            )
        # The servers add such pushes as they are; another rule would take them for gradients.
        if not self.protocol.has_momentum:
            raise UsageError(
                f"--protocol {self.protocol.name} pushes the steps of sgd on the workers' own copies, not gradients: leave"
                f" out --optimiser {name}"
            )
        if self.optimiser.momentum_rule != "auto":
            raise UsageError(
                f"--momentum-rule {self.optimiser.momentum_rule} is a rule of sgd, not of --optimiser {name}: leave out one"
                " of them"
            )

    def _check_gossip(self) -> None:
        """Raise UsageError for exchanges and samplers whose workers cannot exchange examples."""
        if not self.exchange.carries_examples:
            raise UsageError(
                f"--gossip {self.data.gossip} gives examples to all other workers, which --exchange {self.exchange.name}"
                " cannot carry: leave out one of them"
            )
        if self.table_sampler:
            raise UsageError(
                f"--gossip {self.data.gossip} mixes examples of other workers in, which the loss table of --sampling"
                f" {self.sampler.name} does not count: leave out one of them"
            )

    def _check_repartition(self) -> None:
        """Raise UsageError for protocols and exchanges whose workers would divide the rows by different losses.

        A random deal is a function of the worker's own clock, which every protocol and exchange has. An exchange with
        stages is checked stage by stage."""
        if self.data.repartition != "importance" or self.exchange.stages():
            return
        if not isinstance(self.exchange, ParameterServer | AllReduce):
            raise UsageError(
                f"--repartition importance needs the same losses of all rows on every worker where an interval begins,"
                f" which --exchange {self.exchange.name} lacks: give --exchange parameter-server or all-reduce, or"
                " --repartition random"
            )
        # A row whose gradient is refused would be ranked by losses of an earlier phase.
        if self.protocol.refuses_gradients:
            raise UsageError(
                f"--repartition importance needs the losses of all mini-batches, of which --protocol {self.protocol.name}"
                " refuses some: give another --protocol, or --repartition random"
            )

    @property
    def reads_losses(self) -> bool:
        """True if workers select examples for others by the losses of their rows."""
        return bool(self.data.gossip) and SELECTORS[self.data.selector] is not random_examples

    @property
    def loss_statistics(self) -> LossStatistics | None:
        """The losses by which a run divides its rows; None if it does not."""
        return LossStatistics(self.data.importance) if self.data.repartition == "importance" else None

    def evaluation_portions(self, num_shards: int) -> int | None:
        """Return the number of portions of the evaluation rows that have entries of their own in a loss table.

        None if workers share the entries, because each one measures all rows, or because all pull the same table before
        they push, so that their changes add up. Otherwise a worker would push its change of a table that others have
        changed in the meantime. The number does not depend on the workers, which may change.

        num_shards: number of shards of the set."""
        together = isinstance(self.exchange, NeighbourExchange) or all(
            stage.protocol.reproducible for stage in self.stage_configs()
        )
        return None if together else num_shards

    @property
    def table_sampler(self) -> TableSampler | None:
        """The owner of the run's loss table; None for a run without one."""
        return self.loss_statistics or (self.sampler if isinstance(self.sampler, TableSampler) else None)

    def partition_plan(self, rows: int, num_workers: int) -> PartitionPlan:
        """Return the division of the rows of a run that repartitions, over its present workers.

        Args:
            rows: distinct training examples, which epochs count; copies are left out.
            num_workers: workers with which the run began, unless its cohorts say that.
        Raises:
            UsageError: the rows cannot be divided.
        """
        first, *later = self.cohorts.entries or (Cohort(num_workers, self.data.batch_size),)
        steps, epochs = self._length(first, rows)
        plan = PartitionPlan(self.data, rows, self.cohort_batches(first), steps, epochs, self.run.seed)
        for cohort in later:
            steps, epochs = self._length(cohort, rows)
            plan = plan.followed_by(cohort.ends, self.cohort_batches(cohort), steps=steps, epochs=epochs)
        return plan

    def _length(self, cohort: Cohort, rows: int) -> tuple[int, float]:
        """Return the clock at which a run ends if a cohort trains it until then, and its epochs. rows: as anywhere."""
        per_epoch = max(1, rows // cohort.batch_size)
        steps = cohort.last_step(steps=self.run.steps, epochs=self.run.epochs or 0, steps_per_epoch=per_epoch)
        return steps, cohort.epochs(steps, per_epoch)

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
        if self.exchange.switches_by_rule and not self.run.epoch_checkpoints:
            raise UsageError(
                "--alpha auto evaluates every epoch: leave out --no-epoch-checkpoints, or give --alpha SHARE"
            )
        if self.exchange.held_out_share:
            self._check_holdout()
        if self.exchange.stages() and self.protocol != ASP():
            raise UsageError(f"--exchange {name} has protocols of its own: leave out --protocol {self.protocol.name}")
        if own is None:
            return
        if self.protocol.name not in (own, ASP.name):
            raise UsageError(f"--exchange {name} has no protocols: leave out --protocol {self.protocol.name}")
        # A command line refuses --protocol asp beside such an exchange, so that it is the default here.
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
            (self.data.repartition != "fixed", f"--repartition {self.data.repartition}"),
            (not self.sampler.fixed_size, f"--sampling {self.sampler.name}"),
        ):
            if is_given:
                raise UsageError(f"--switch-on holdout needs passes over fixed rows: leave out {flag}")

    def worker_batches(self, num_workers: int, ratios: Ratios = ()) -> tuple[int, ...]:
        """Return each worker's examples per step for n workers and the global mini-batch B. A result may be 0.

        num_workers: n; ratios: the ratios of the set's shards, empty if they are equal."""
        return self.cohort_batches(Cohort(num_workers, self.data.batch_size), ratios)

    def cohort_batches(self, cohort: Cohort, ratios: Ratios = ()) -> tuple[int, ...]:
        """Return each worker's examples per step in a cohort of n workers and its global mini-batch B.

        With equal shards each worker draws floor(B/n); with --worker-batch exact the first B mod n workers draw one
        more. With ratios, B is divided in their proportion, so that all workers finish a pass in the same number of
        steps: rounded down, or with ``exact`` by largest remainder.

        ratios: see ``worker_batches``."""
        num_workers = cohort.workers
        size = cohort.batch_size
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
        """Seconds without a heartbeat after which a process is restarted: no worker, or one that has not joined yet."""
        timeout_s = self.processes.heartbeat_timeout_s
        return HEARTBEAT_TIMEOUT_S if timeout_s is None else timeout_s

    @property
    def worker_timeout_s(self) -> float:
        """Seconds without a heartbeat after which a worker that has joined is lost to the others, and restarted."""
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
        if self.optimiser.optimiser != SGD:
            return ADAPTIVE_RATE
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
        """Return the momentum rule for ``num_workers`` workers. Other update rules use its coefficient alone."""
        coefficient = self.coefficient
        if self.optimiser.optimiser != SGD:
            return heavy_ball(coefficient)
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
            sampler=from_json(SAMPLERS, "--sampling", _sampler_values(values)),
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


def _sampler_values(values: Mapping[str, Any]) -> Any:
    """Return the values of a saved configuration's sampler, which ``from_json`` checks."""
    sampler = values.get("sampler", {"name": values["data"]["sampling"]})
    # The name of the field before 26 November 2026.
    if isinstance(sampler, dict) and "group_by" in sampler:
        return {"sampling_groups" if key == "group_by" else key: value for key, value in sampler.items()}
    return sampler
