"""The gradients of virtual workers: none, gradients of a toy loss, or gradients of the model on the shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.ratios import Ratios
from trainer.checkpoints.slice_file import Float32s
from trainer.config import RunFacts
from trainer.context import RunContext
from trainer.coordination.local_steps import LocalCopy, LocalPlan
from trainer.coordination.orders import RowLosses, StepMeasurements, join_measurements
from trainer.coordination.passes import RowSums
from trainer.data.gossip import GivenExamples, find_rows, rows_of_pool
from trainer.data.rows import Rows
from trainer.gossip.rounds import Pool


class MiniBatchResult(NamedTuple):
    """The result of a mini-batch.

    Attributes:
        vector: float32 [P + Q], the gradient as servers receive it.
        examples: size of the mini-batch.
        loss: mean loss.
        correct: number of correct predictions.
        seen: the rows of the mini-batch, or None if there are no rows.
        row_losses: their losses, if the run keeps them.
    """

    vector: Float32s
    examples: int
    loss: float
    correct: int
    seen: RowSums | None = None
    row_losses: RowLosses | None = None

    def measurements(self, seconds: float) -> StepMeasurements:
        """Return a worker's report of the step. seconds: virtual time of the step."""
        return StepMeasurements(
            self.examples, self.loss, self.correct, seconds, seen=self.seen, row_losses=self.row_losses
        )


class Compute:
    """The gradient computation of all virtual workers. ``start`` returns the initial parameters, float32 [P + Q].

    Attributes:
        num_parameters: P.
        num_buffers: Q.
        fingerprint: of the rows; None if unknown, or without rows.
        ratios: unequal shares in which workers draw rows; empty if shares are equal.
        classifies: whether predictions can be correct or wrong.
        owned_entries: see Step.
        loss_table: ``table_begin`` and ``shard_rows`` of the run's facts.
    """

    num_parameters: int
    num_buffers: int = 0
    fingerprint: int | None = None
    ratios: Ratios = ()
    classifies: bool = False
    owned_entries: tuple[slice, int] | None = None
    loss_table: tuple[int, tuple[int, ...]] = (0, ())

    def start(self) -> Float32s:
        return np.zeros(self.num_parameters + self.num_buffers, np.float32)

    @abstractmethod
    def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> MiniBatchResult:
        """Return the gradient of a mini-batch at ``parameters``, which are one array per server."""

    def push(self, worker: int, clock: int, parameters: Sequence[Float32s], plan: LocalPlan) -> MiniBatchResult:
        """Return the next push of a worker: the sum of the gradients of its mini-batches from a step on."""
        if len(plan.rates) == 1:
            return self.step(worker, clock, parameters)
        copy = LocalCopy(np.concatenate(parameters), self.num_parameters, plan.statistics, self.owned_entries)
        reports = []
        for step, rate in enumerate(plan.rates):
            result = self.step(worker, clock + step, [copy.values])
            copy.add(result.vector, rate)
            reports.append(result.measurements(0.0))
        joined = join_measurements(reports)
        return MiniBatchResult(copy.total, joined.examples, joined.loss, joined.correct, joined.seen, joined.row_losses)

    def set_threads(self, count: int) -> None:
        """Use ``count`` threads from now on. No-op if threads cannot change the rounding of gradients."""

    def seen(self, worker: int, clock: int) -> RowSums | None:
        """Return the rows of a mini-batch that was not computed, or None if there are no rows."""
        return None

    def selection(self, worker: int, clock: int) -> GivenExamples | None:
        """Return the examples that a worker gives to others before a step; None before most steps."""
        return None

    def adopt(self, worker: int, pool: Pool) -> None:
        """Have a worker use the examples of others from its next step on. No-op without rows."""

    def keep_pools(self) -> None:
        """Keep the examples of others for all steps, not only for the newest ones: steps may come in any order."""

    def restore_losses(self, history: Sequence[tuple[Ints, Float32s]]) -> None:
        """Have all workers select examples by the losses of a ledger. No-op without rows. history: ids and losses."""

    def restart(self, worker: int) -> None:
        """Forget the memory of a worker's process. No-op if its gradients do not depend on it."""


class NoCompute(Compute):
    """A schedule without computation: one parameter, whose gradient is always 0."""

    num_parameters = 1
    _NOTHING = np.zeros(1, np.float32)

    def __init__(self, context: RunContext, num_workers: int) -> None:
        self.sizes = context.config.worker_batches(num_workers)

    def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> MiniBatchResult:
        return MiniBatchResult(self._NOTHING, self.sizes[worker], 0.0, 0)


class Quadratic(Compute):
    """A toy loss: half the sum of a_i w_i^2 over 64 parameters w_i that start at 1; curvatures a_i from 1 to 1/100.

    A mini-batch of B examples adds noise of standard deviation 1/sqrt(B) to the gradient, as sampling does."""

    num_parameters = 64

    def __init__(self, context: RunContext, num_workers: int) -> None:
        self.seed = context.config.run.seed
        self.sizes = context.config.worker_batches(num_workers)
        self.curvature = np.geomspace(1, 0.01, self.num_parameters).astype(np.float32)

    def start(self) -> Float32s:
        return np.ones(self.num_parameters, np.float32)

    def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> MiniBatchResult:
        values = parameters[0] if len(parameters) == 1 else np.concatenate(parameters)
        with np.errstate(over="ignore"):  # the coordinator detects runs that diverge
            slope = self.curvature * values
            loss = 0.5 * float(slope @ values)
        size = self.sizes[worker]
        noise = generator(self.seed, Purpose.TOY, worker, clock).standard_normal(len(values), np.float32)
        return MiniBatchResult(slope + noise * np.float32(size**-0.5), size, loss, 0)


class RealCompute(Compute):
    """The gradients of the model, in this thread, with the mini-batches, augmentation and dropout of real workers."""

    def __init__(self, context: RunContext, num_workers: int) -> None:
        from trainer.data.batches import build_batches
        from trainer.data.cohorts import build_cohort_batches
        from trainer.data.deal import deal
        from trainer.data.holdout import trained_fingerprint
        from trainer.data.network import build_network, loss_table_of
        from trainer.data.repartition import all_rows
        from trainer.models.devices import pick_device
        from trainer.models.flat_vector import FlatModel
        from trainer.worker.step import Step

        config = context.config
        # Before any computation: the number of threads changes how sums are rounded.
        self.set_threads(config.processes.threads or 1)
        shards = context.shards
        network = build_network(config, shards)
        flat = FlatModel(network.model)
        self.config = config
        self._start = flat.read()
        self.fingerprint = trained_fingerprint(shards, config)
        self.num_parameters = flat.num_parameters
        self.num_buffers = flat.num_buffers
        self.pulled = np.zeros_like(self._start)
        self.pushed = np.zeros_like(self._start)
        device = pick_device(config.processes.device, 0)
        self.model_step = Step(config, network, self.pulled, self.pushed, device, num_workers)
        self.owned_entries = self.model_step.owned_entries
        self.loss_table = loss_table_of(config, shards, flat)
        self.ratios = shards.ratios_of(num_workers)
        self.classifies = not network.targets
        if config.cohorts.entries:
            self.batches = [each.batches for each in build_cohort_batches(config, shards, targets=network.targets)]
        else:
            repartitions = config.data.repartition != "fixed"
            every_row = [all_rows(shards, targets=network.targets)] * num_workers if repartitions else None
            worker_rows = every_row or deal(shards, num_workers, targets=network.targets)
            self.batches = [
                build_batches(config, shards, rows, worker, num_workers) for worker, rows in enumerate(worker_rows)
            ]

    def set_threads(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)

    def start(self) -> Float32s:
        return self._start

    def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> MiniBatchResult:
        from trainer.worker.step import step_seed

        np.concatenate(parameters, out=self.pulled)
        batch, draw, _ = self.batches[worker].make(clock, self.model_step.read_table())
        outcome = self.model_step(batch, step_seed(self.config.run.seed, worker, clock), draw=draw)
        assert outcome, "nobody cancels it"
        row_losses = draw.row_losses(self.model_step.row_outcomes)
        if (gossip := self.batches[worker].gossip) and self.model_step.outcomes:
            gossip.note(draw, self.model_step.outcomes[0])
        return MiniBatchResult(self.pushed.copy(), len(batch.labels), *outcome, draw.seen(), row_losses)

    def selection(self, worker: int, clock: int) -> GivenExamples | None:
        gossip = self.batches[worker].gossip
        return gossip.selection(clock) if gossip else None

    def adopt(self, worker: int, pool: Pool) -> None:
        gossip = self.batches[worker].gossip
        assert gossip, "only workers that exchange examples get any"
        gossip.adopt(pool.clock, pool.first, rows_of_pool(pool, self._find_rows))

    def keep_pools(self) -> None:
        for batches in self.batches:
            if batches.gossip:
                batches.gossip.spans = None

    def restore_losses(self, history: Sequence[tuple[Ints, Float32s]]) -> None:
        for batches in self.batches:
            if batches.gossip:
                batches.gossip.restore_losses(history)

    def restart(self, worker: int) -> None:
        if gossip := self.batches[worker].gossip:
            gossip.forget_losses()

    def _find_rows(self, ids: Ints) -> Rows:
        return find_rows([batches.gossip.rows for batches in self.batches if batches.gossip], ids)

    def seen(self, worker: int, clock: int) -> RowSums | None:
        sampler = self.batches[worker].sampler
        return None if sampler.reads_table else sampler.draw(clock).seen()


COMPUTES: dict[str, type[NoCompute] | type[Quadratic] | type[RealCompute]] = {
    "none": NoCompute,
    "quadratic": Quadratic,
    "real": RealCompute,
}


def facts_of(compute: Compute, num_workers: int, rows: int) -> RunFacts:
    """Return the facts of a run whose gradients come from ``compute``."""
    table_begin, shard_rows = compute.loss_table
    return RunFacts(
        num_workers,
        rows,
        compute.num_parameters,
        compute.num_buffers,
        fingerprint=compute.fingerprint,
        ratios=compute.ratios,
        classifies=compute.classifies,
        table_begin=table_begin,
        shard_rows=shard_rows,
    )
