"""The rules of one run, built from its configuration: the same for real servers, virtual time and replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace

from pipeline.core.errors import DataError
from trainer.checkpoints.decisions import has_converged
from trainer.checkpoints.slice_file import Float32s
from trainer.checkpoints.state import RunState
from trainer.config import ADAM, SGD, Config, RunFacts
from trainer.coordination.adam import AdamSlice
from trainer.coordination.barriers import Barriers
from trainer.coordination.budget import Budget, Position
from trainer.coordination.cohorts import begin_passes
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.local_steps import ONE_STEP, LocalPlan
from trainer.coordination.parameter_slice import ParameterSlice
from trainer.coordination.schedules import learning_rate, warm_up
from trainer.coordination.switch import carry_momentum
from trainer.coordination.weights import Weights
from trainer.data.places import own_entries
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.switching import Switching
from trainer.sampling.partition_stream import plan_barriers
from trainer.stages import Stage


def slots_of(config: Config) -> int:
    """Return the elements of state per parameter that the update rule of a run keeps. Raises UsageError."""
    name = config.optimiser.optimiser
    if name == SGD:
        return ParameterSlice.slots
    if name == ADAM:
        return AdamSlice.slots
    from trainer.models.own_optimiser import slots_of  # loads torch

    return slots_of(name)


def build_slice(
    config: Config, num_workers: int, values: Float32s, momentum: Float32s, updates: int = 0
) -> ParameterSlice:
    """Return a range of the model with the update rule of a run. Raises UsageError for an unusable one of the user's own.

    Args:
        config: the run.
        num_workers: n.
        values: float32, the parameters of the range, then BatchNorm's running statistics.
        momentum: float32, ``slots_of(config)`` elements per parameter.
        updates: number of updates that made the values.
    """
    rule = config.momentum_of(num_workers)
    statistics = config.pushed_statistics(num_workers)
    name = config.optimiser.optimiser
    if name == SGD:
        return ParameterSlice(values, momentum, rule, num_workers, statistics, updates)
    if name == ADAM:
        return AdamSlice(values, momentum, rule, num_workers, statistics, updates)
    from trainer.models.own_optimiser import TorchSlice  # loads torch

    return TorchSlice(values, momentum, rule, num_workers, statistics, updates, name)


def enter_stage(
    config: Config, before: Config, after: Config, num_workers: int, values: Float32s, momentum: Float32s
) -> tuple[Float32s, Float32s]:
    """Return values and momentum of a range of the model as the next stage begins with them.

    Args:
        config: the run.
        before, after: configurations of the stage that made the checkpoint, and of the next one.
        num_workers: n.
        values, momentum: as for ``build_slice``.
    """
    assert isinstance(config.exchange, Switching), "only these have stages"
    factor = config.exchange.momentum_factor(num_workers)
    rules = before.momentum_of(num_workers), after.momentum_of(num_workers)
    return carry_momentum(values, momentum, *rules, factor)


def enter_cohort(
    config: Config, num_workers: int, version: int, values: Float32s, momentum: Float32s
) -> tuple[Float32s, Float32s]:
    """Return values and momentum of a range of the model as the present cohort of workers continues with them.

    They change only if the cohort begins with this checkpoint and another number of workers has another momentum rule.

    Args:
        config: configuration of the stage that made the checkpoint.
        num_workers: n.
        version: of the checkpoint.
        values, momentum: as for ``build_slice``.
    """
    if not config.cohorts.begins_at(version):
        return values, momentum
    rules = config.momentum_of(config.cohorts.previous.workers), config.momentum_of(num_workers)
    return carry_momentum(values, momentum, *rules, 1.0)


def carry_losses(config: Config, facts: RunFacts, mean: Float32s, models: Mapping[int, Float32s]) -> Float32s:
    """Return the mean of the models of some workers as the workers after them begin with it, float32 [P + Q].

    If each worker keeps the losses of its own rows, the entry of a row in the loss table is the one that its worker has.
    Rows of a worker without a model have the entries of the first worker that has one, as a newcomer gets them.

    Args:
        config: of the present workers.
        facts: of the run.
        mean: the mean of the models.
        models: of the workers before, by worker.
    """
    if not facts.shard_rows or not models:
        return mean
    result = mean.copy()
    table = result[facts.own_losses]
    table[:] = models[min(models)][facts.own_losses]
    own = own_entries(facts.shard_rows, [each.workers for each in config.cohorts.entries[:-1]])
    for worker, model in models.items():
        table[own[worker]] = model[facts.own_losses][own[worker]]
    return result


def begin_cohort(config: Config, state: RunState) -> RunState:
    """Return the state of a checkpoint as the present cohort of workers continues from it.

    Changes only the state with which the cohort begins. Raises DataError for an earlier checkpoint, whose workers drew
    rows that the cohort has been given, and for clocks of other workers than the cohorts say."""
    cohort = config.cohorts.present
    if not config.cohorts.entries:
        return state
    if state.version < cohort.version:
        raise DataError(
            f"the checkpoint of version {cohort.version}, with which {cohort.workers} workers began, is damaged; the newest"
            f" whole one is of version {state.version}: start again with --resume"
        )
    has_begun = state.version > cohort.version
    # Workers that keep models of their own end with the round, absent ones too.
    counts_rounds = isinstance(config.exchange, NeighbourExchange)
    clocks = dict.fromkeys(state.clocks, state.version) if counts_rounds else state.clocks
    ends = dict(enumerate(cohort.ends))
    if sorted(clocks) != list(range(cohort.workers)) if has_begun else clocks != ends:
        raise DataError(
            f"the checkpoint of version {state.version} has other clocks than the workers in config.json ended with: one of"
            " the two is of another run; choose another --output, or --overwrite"
        )
    if has_begun:
        return state
    clocks = dict.fromkeys(range(cohort.workers), cohort.clock)
    # A protocol's memory, exchanged examples and the times of steps are about the workers before.
    passes = begin_passes(state.passes, cohort)
    return replace(state, clocks=clocks, passes=passes, memory={}, gossip={}, stragglers={})


def position_of(state: RunState, stage: int | None = None) -> Position:
    """Return a copy of the progress in a checkpoint, so that a resumed run makes the same decisions as before.

    stage: number of the stage that continues; None for workers that keep models of their own, without a protocol."""
    # A protocol does not understand the memory of another one.
    is_same_stage = state.stage == stage
    return Position(
        state.version,
        state.accepted,
        state.examples,
        dict(state.clocks),
        dict(state.memory) if is_same_stage else {},
        state.passes,
        dict(state.epoch_sums),
        deepcopy(state.gossip),
        deepcopy(state.stragglers) if is_same_stage else {},
        # An ended run writes its checkpoint again. A start that reopened the checkpoint trains past its end.
        state.converged_steps if state.final else None,
    )


def build_coordinator(stage: Stage, facts: RunFacts, state: RunState, num_servers: int) -> Coordinator:
    """Return the coordinator of a stage that continues a run from the state of a checkpoint.

    num_servers: servers that hold a part of every gradient."""
    config = stage.config
    # The tolerance may have ended the run with the checkpoint of an epoch, before the final one was written.
    if has_converged(state, config, facts.rows):
        state = replace(state, final=True)
    state = begin_cohort(config, state)
    steps = config.steps_per_worker(facts.rows)
    steps_per_epoch = config.steps_per_epoch(facts.rows)
    return Coordinator(
        config.protocol,
        Budget(
            facts.num_workers,
            steps,
            steps_per_epoch,
            config.run.stop,
            position_of(state, stage.number),
            until=stage.until,
            cohort=config.cohorts.present,
            # A start that continues a run reopens its final checkpoint before.
            has_ended=state.final,
        ),
        rate=worker_rates(config, facts),
        num_servers=num_servers,
        start_wait_s=config.processes.start_wait_s,
        by_examples=not config.sampler.fixed_size,
        usual_batch=usual_batch(config, facts),
        epoch_snapshots=config.run.epoch_checkpoints,
        seconds=state.seconds,
        straggler_rule=stage.straggler_rule,
        barriers=build_barriers(config, facts),
    )


def build_barriers(config: Config, facts: RunFacts) -> Barriers:
    """Return the steps before which the workers of a stage wait for each other. config: of the stage.

    Most runs have none. Under a reproducible protocol the workers make each step together in any case."""
    if config.data.repartition != "importance" or config.protocol.reproducible:
        return Barriers()
    plan = config.partition_plan(facts.rows, facts.num_workers)
    return plan_barriers(plan, reads_own_writes=config.protocol.reads_own_writes)


def local_plan(config: Config, facts: RunFacts, clock: int) -> LocalPlan:
    """Return the mini-batches that a worker computes from a step on before it pushes, and the rates of its own copy.

    The worker knows its own clock alone, so that its rate falls there, and the server's by the gradients of all."""
    steps = config.protocol.local_steps(clock)
    if steps > 1:
        steps = build_barriers(config, facts).steps_before(clock, steps)
    if steps == 1:
        return ONE_STEP
    per_epoch = config.steps_per_epoch(facts.rows)
    epochs = [config.cohorts.present.epochs(clock + step, per_epoch) for step in range(steps)]
    rates = tuple(worker_rate(config, facts, epoch) for epoch in epochs)
    return LocalPlan(rates, config.pushed_statistics(facts.num_workers))


def build_weights(config: Config, facts: RunFacts) -> Weights:
    """Return the rule for the factors of the gradients in an update."""
    by_examples = not config.sampler.fixed_size
    return Weights(config.protocol, facts.num_workers, by_examples=by_examples, usual=usual_batch(config, facts))


def usual_batch(config: Config, facts: RunFacts) -> float | None:
    """Return the mean mini-batch of a worker if workers draw different numbers of examples, else None.

    They do if the set has ratios, or with --worker-batch exact."""
    if not config.sampler.fixed_size:
        return config.data.batch_size / facts.num_workers if facts.ratios else None
    batches = config.worker_batches(facts.num_workers, facts.ratios)
    return sum(batches) / facts.num_workers if len(set(batches)) > 1 else None


def build_replica(config: Config, facts: RunFacts, values: Float32s, momentum: Float32s) -> ParameterSlice:
    """Return a worker's own model with its update rule, for exchanges without servers.

    Its gradient alone makes an update, like the mean of all gradients on servers. values, momentum: the whole model."""
    statistics = config.pushed_statistics(facts.num_workers)
    return ParameterSlice(values, momentum, config.momentum_of(1), 1, statistics)


def replica_rate(config: Config, facts: RunFacts, round: int) -> float:
    """Return the scheduled single-process rate in a round, which multiplies a worker's gradient of its own model."""
    return _rates(config, facts)(config.cohorts.present.epochs(round, config.steps_per_epoch(facts.rows)))


def weighted_batch(config: Config, facts: RunFacts) -> float | None:
    """Return the size of a mini-batch whose gradient has the weight 1, for exchanges in which workers keep own models.

    The weight of another mini-batch is its size divided by this one, so that all examples count the same. None if all
    gradients have the weight 1: under --weigh-by workers, or if all mini-batches have the same size. O(N)."""
    assert isinstance(config.exchange, NeighbourExchange), "in other exchanges workers share a model"
    if config.exchange.weigh_by == "workers":
        return None
    if not config.sampler.fixed_size:
        return config.data.batch_size / facts.num_workers
    return usual_batch(config, facts)


def worker_rate(config: Config, facts: RunFacts, epoch: float) -> float:
    """Return a/n, the factor of a sum of gradients: the scheduled rate at a global epoch / the number of workers."""
    return worker_rates(config, facts)(epoch)


def worker_rates(config: Config, facts: RunFacts) -> Callable[[float], float]:
    """Return ``worker_rate`` as a function of the global epoch, for a caller that asks for every update."""
    rate = _rates(config, facts)
    return lambda epoch: rate(epoch) / facts.num_workers


def _rates(config: Config, facts: RunFacts) -> Callable[[float], float]:
    """Return the function from a global epoch to the scheduled single-process rate."""
    steps = config.steps_per_epoch(facts.rows)
    epochs = config.total_epochs(facts.rows)
    optimiser = config.optimiser
    cohort = config.cohorts.present

    def rate(epoch: float) -> float:
        mini_batches = cohort.mini_batches(epoch, steps)
        full = learning_rate(optimiser.recipe, config.learning_rate, epoch, mini_batches, epochs, optimiser.drops)
        return full * warm_up(epoch, optimiser.rate_warmup, steps)

    return rate
