"""The plan of a run: mini-batches, rates, steps, updates, processes. Pure except for counting cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.core.errors import UsageError
from pipeline.core.machine import usable_cores
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.shardset.ratios import Ratios, ratios_text
from pipeline.core.sizes import bytes_in_words
from trainer.config import ADAM, SGD, Config, RunFacts
from trainer.coordination.schedules import COSINE, INVERSE_SQRT, drops
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.stages import Continuation, Stage, build_stages

FLOAT_BYTES = 4


@dataclass(frozen=True)
class RunPlan:
    """The numbers that follow from the configuration of a run and its shards.

    Attributes:
        model, protocol: names.
        synchronous: whether all gradients of an update are computed with the version that it updates.
        clock_bound: steps by which a worker that starts one may be ahead of the slowest; None for no bound.
        num_workers, num_servers: processes in the whole run.
        workers_here: workers on this host, which share its cores.
        threads_per_worker: threads that compute in each worker.
        rows: distinct training examples.
        batch_size: the requested global mini-batch B.
        worker_batches: examples per step of each worker.
        effective_batch: sum of worker_batches.
        learning_rate: the single-process rate a.
        worker_rate: factor of a fresh gradient in an update of update_size gradients; a/n except for n-softsync.
        momentum: its coefficient.
        looks_ahead: whether momentum decays per round of workers instead of per update, and workers compute at the
            point to which it will move the parameters.
        recipe: the schedule of the rate, apart from the epochs of --drops.
        drops: epochs of this run at which the rate is divided by ten.
        rate_warmup: epochs in which the rate rises linearly.
        epochs: length of the run.
        steps_per_epoch, steps_per_worker: mini-batches per worker in an epoch, and in the run.
        update_size: pushes per update.
        local_steps: mini-batches whose gradients a push sums at most.
        updates: updates of the run, without those that stop="local" may add.
        num_parameters, num_buffers: the lengths P and Q of the two parts of the flat vector.
        push_mb: size of one push in MB (10^6 bytes), summed over servers; the reply has the same size.
        exchange: name.
        has_own_models: whether each worker has a model of its own, to which its own gradient is applied.
        stages: each stage of a run with a switch, in words, "" for a stage that a continued run has left; empty for other
            runs. The values above that depend on the protocol come from the last stage, except for updates.
        optimiser: the update rule.
    """

    model: str
    protocol: str
    synchronous: bool
    clock_bound: int | None
    num_workers: int
    num_servers: int
    workers_here: int
    threads_per_worker: int
    rows: int
    batch_size: int
    worker_batches: tuple[int, ...]
    effective_batch: int
    learning_rate: float
    worker_rate: float
    momentum: float
    looks_ahead: bool
    recipe: str
    drops: tuple[float, ...]
    epochs: float
    steps_per_epoch: int
    steps_per_worker: int
    update_size: int
    updates: int
    num_parameters: int
    num_buffers: int
    push_mb: float
    exchange: str = ParameterServer.name  # plans logged before there were others do not name theirs
    has_own_models: bool = False
    stages: tuple[str, ...] = ()
    local_steps: int = 1
    optimiser: str = SGD  # plans logged before there were others do not name theirs
    rate_warmup: float = 0.0  # as in runs logged before it could be set


def plan(
    config: Config,
    facts: RunFacts,
    cores: int | None = None,
    workers_here: int | None = None,
    continuation: Continuation | None = None,
) -> RunPlan:
    """Return the plan of a run. Raises UsageError if its batch size or number of servers does not fit.

    Args:
        config, facts: the run.
        cores: cores of this machine (default: counted).
        workers_here: workers on this host (default: all).
        continuation: where a start continues a run with stages, of which it leaves out those before (default: nowhere).
    """
    workers = facts.num_workers
    stages = build_stages(config, workers, facts.rows)
    if len(stages) > 1:
        return _plan_stages(stages, facts, cores, workers_here, continuation)
    workers_on_host = workers if workers_here is None else workers_here
    check_shares(config, workers, facts.ratios)
    size = config.protocol.update_size(workers)
    if not config.sampler.fixed_size and config.data.batch_size > facts.rows:
        raise UsageError(f"--batch-size {config.data.batch_size} is more than the {facts.rows} examples of the set")
    if config.processes.servers > facts.num_parameters:
        raise UsageError(
            f"--servers {config.processes.servers} is more than the {facts.num_parameters} parameters of the model"
        )
    synchronous = config.protocol.synchronous
    # The sum of these can be less than batch_size: each worker's share is rounded down.
    batches = config.worker_batches(workers, facts.ratios)
    steps = config.steps_per_worker(facts.rows)
    steps_per_epoch = config.steps_per_epoch(facts.rows)
    epochs = config.total_epochs(facts.rows)
    cohort = config.cohorts.present
    gradients = cohort.total(steps, workers) - cohort.accepted
    return RunPlan(
        model=config.model.name,
        protocol=config.protocol.name,
        synchronous=synchronous,
        clock_bound=config.protocol.clock_bound(),
        num_workers=workers,
        num_servers=config.processes.servers,
        workers_here=workers_on_host,
        threads_per_worker=config.processes.threads or max(1, (cores or usable_cores()) // max(1, workers_on_host)),
        rows=facts.rows,
        batch_size=config.data.batch_size,
        worker_batches=batches,
        effective_batch=sum(batches),
        learning_rate=config.learning_rate,
        worker_rate=_worker_rate(config, workers),
        momentum=config.coefficient,
        optimiser=config.optimiser.optimiser,
        looks_ahead=config.optimiser.momentum_rule != "nesterov" and config.momentum_of(workers).at_once > 0,
        recipe=config.optimiser.recipe,
        drops=drops(config.optimiser.recipe, epochs, config.optimiser.drops),
        rate_warmup=config.optimiser.rate_warmup,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        steps_per_worker=config.mini_batches_per_worker(facts.rows),
        update_size=size,
        updates=cohort.version + -(-gradients // (size * config.protocol.most_local_steps())),
        num_parameters=facts.num_parameters,
        num_buffers=facts.num_buffers,
        push_mb=facts.elements * FLOAT_BYTES / 1e6,
        exchange=config.exchange.name,
        has_own_models=isinstance(config.exchange, NeighbourExchange),
        local_steps=config.protocol.most_local_steps(),
    )


def _plan_stages(
    stages: Sequence[Stage],
    facts: RunFacts,
    cores: int | None,
    workers_here: int | None,
    continuation: Continuation | None,
) -> RunPlan:
    """Return the plan of a run with stages. See ``plan`` for the other arguments.

    A stage that cannot have any gradient is left out: the run is then planned as one without a switch."""
    plans = [plan(stage.config, facts, cores, workers_here) for stage in stages]
    config = stages[0].config
    workers = facts.num_workers
    cohort = config.cohorts.present
    total = cohort.total(config.steps_per_worker(facts.rows), workers)
    ends = [total if stage.until is None else stage.until for stage in stages]
    begins = [cohort.accepted, *ends[:-1]]
    # A rule may give gradients to a stage for which the plan leaves none.
    used = [at for at in range(len(stages)) if begins[at] < ends[at] or (at and stages[0].may_end_early)]
    last = plans[used[-1]]
    if len(used) == 1:
        return last
    start = continuation or Continuation(0, cohort.version, cohort.accepted)
    # A rule may have ended the stage before sooner than planned.
    begins[start.stage] = start.accepted
    # A rule ends the first stage at the latest with its planned end.
    most = "at the latest " if stages[0].may_end_early else ""
    words = []
    for at in used:
        epoch = cohort.gradients(ends[at], workers) / (workers * last.steps_per_epoch)
        end = f"{most if at == 0 else ''}to epoch {epoch:.4g}"
        rules = f"{_rates(plans[at])}; momentum {_momentum(plans[at])}"
        words.append("" if at < start.stage else f"{end} by {stages[at].config.exchange.name}: {rules}")
    left = [at for at in used if at >= start.stage]
    updates = sum(-(-max(0, ends[at] - begins[at]) // plans[at].update_size) for at in left)
    return replace(last, updates=start.version + updates, stages=tuple(words))


def check_shares(config: Config, num_workers: int, ratios: Ratios = ()) -> None:
    """Raise UsageError if a worker would draw no example, or the protocol does not support ``num_workers``.

    ratios: the ratios of the shards, empty if they are equal."""
    if config.data.batch_size < num_workers:
        raise UsageError(
            f"--batch-size {config.data.batch_size} is the mini-batch of all {num_workers} workers together:"
            f" give at least {num_workers}, one example each"
        )
    if ratios and not min(config.worker_batches(num_workers, ratios)):
        raise UsageError(
            f"--batch-size {config.data.batch_size} in the set's ratios {ratios_text(ratios)} leaves a worker without"
            f" examples: use at least {-(-sum(ratios) // min(ratios))}"
        )
    for stage in config.stage_configs():
        stage.protocol.check(num_workers)
        # The table of the plan divides by it.
        if not _worker_rate(stage, num_workers):
            raise UsageError(
                f"--learning-rate {stage.learning_rate:g}, divided by {num_workers} workers, is 0: give a larger rate"
            )


def _worker_rate(config: Config, num_workers: int) -> float:
    """Return the factor of a fresh gradient in an update. config: of a stage."""
    return config.learning_rate / num_workers * config.protocol.weight(0, num_workers)


def smallest_pass(config: Config, num_workers: int, ratios: Ratios = ()) -> int:
    """Return the examples in the smallest forward pass of any worker: a mini-batch, or a micro-batch of it.

    Args:
        config: the run.
        num_workers: n.
        ratios: ratios of the shards, empty if they are equal.
    """
    if not config.sampler.fixed_size:
        return 1
    share = min(config.worker_batches(num_workers, ratios))
    # A pool may have the examples of a single worker.
    share = min(share, config.data.gossip or share)
    return max(1, share // max(stage.protocol.parts_of_a_step() for stage in config.stage_configs()))


def describe(plan: RunPlan, storage: str = "", memory: str = "") -> str:
    """Return the plan as a short table, which is printed before the run.

    storage: where workers keep their rows; memory: what the workers of a run in virtual time take. Both are in words, and
    "" leaves out the line."""
    lines = [("rows", storage), ("memory", memory)]
    return two_column_table(describe_plan(plan) + [(name, text) for name, text in lines if text])


def describe_plan(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the plan as names and sentences."""
    # Each stage has its own rate and momentum.
    momentum = ("momentum", _momentum(plan)) if plan.optimiser == SGD else ("optimiser", _optimiser(plan))
    rules = [("learning rate", _rates(plan)), momentum]
    if plan.stages:
        rules = [(f"stage {number}", text) for number, text in enumerate(plan.stages, 1) if text]
    statistics = f" and {plan.num_buffers:,} running statistics" if plan.num_buffers else ""
    return [
        ("model", f"{plan.model}: {plan.num_parameters:,} parameters{statistics}"),
        ("mini-batch", _batches(plan)),
        *rules,
        ("epoch", f"{plan.steps_per_epoch:,} steps per worker: {plan.rows:,} examples / {plan.batch_size}"),
        ("run", f"{plan.epochs:.4g} epochs, {plan.steps_per_worker:,} steps per worker, {plan.updates:,} updates"),
        ("processes", _processes(plan)),
        _messages(plan),
    ]


def _batches(plan: RunPlan) -> str:
    """Return the line about mini-batches: their examples over all workers, and of each."""
    least = min(plan.worker_batches)
    most = max(plan.worker_batches)
    larger = plan.worker_batches.count(most)
    if list(plan.worker_batches) == sorted(plan.worker_batches, reverse=True) and most - least == 1:
        each = f"{most} for the first {larger} and {least} for the others"
    else:
        each = f"{least} each" if least == most else f"{least} to {most} by the ratios of the shards"
    remark = f"; {plan.batch_size} was requested, and --worker-batch exact uses all of it"
    shortfall = remark if plan.effective_batch != plan.batch_size else ""
    return f"{plan.effective_batch} over all {_count(plan.num_workers, 'worker')}, {each}{shortfall}"


def _messages(plan: RunPlan) -> tuple[str, str]:
    """Return the line about the messages of a step."""
    if plan.has_own_models:
        size = bytes_in_words(plan.num_parameters * FLOAT_BYTES)
        return plan.exchange, f"{size} from each worker to each of its neighbours in a round"
    push_bytes = plan.push_mb * 1e6
    if plan.exchange == AllReduce.name:
        size = bytes_in_words(2 * (plan.num_workers - 1) / plan.num_workers * push_bytes)
        return plan.exchange, f"{size} from each worker in a step, and as much to it"
    return "push", f"{bytes_in_words(push_bytes)} over {_count(plan.num_servers, 'server')}, and as much back"


def _rates(plan: RunPlan) -> str:
    """Return the line about the learning rate: its factor for a gradient without staleness, and its drops."""
    rate = f"{plan.learning_rate:g}"
    each = f"{rate} / {plan.learning_rate / plan.worker_rate:.4g} = {plan.worker_rate:.4g}"
    # The three kinds of updates: of each worker's model, of all gradients together, of one or some of them.
    if plan.has_own_models:
        text = f"every worker applies {rate} to the gradient of its own model"
    elif plan.synchronous and plan.update_size == plan.num_workers:
        text = f"{plan.protocol} applies {rate} to the mean of {_count(plan.num_workers, 'push', 'pushes')}"
    elif plan.local_steps > 1:
        text = f"{plan.protocol} applies {each} to each gradient, on the worker and in pushes of {plan.local_steps}"
    elif plan.update_size == 1:
        text = f"{plan.protocol} applies {each} to each push"
    else:
        text = f"{plan.protocol} applies {each} to each of {plan.update_size} pushes per update"
    if plan.rate_warmup:
        text += f"; rises to this rate until epoch {plan.rate_warmup:.4g} of the run"
    if plan.recipe == INVERSE_SQRT:
        return text + "; divided by the square root of t in mini-batch t"
    if plan.recipe == COSINE:
        return text + "; falls to 0 along a cosine"
    falls = " and ".join(f"{drop:.4g}" for drop in plan.drops)
    return text + (f"; falls to a tenth at epoch {falls}" if falls else "")


def _momentum(plan: RunPlan) -> str:
    """Return the line about momentum: its coefficient, and the point at which workers compute."""
    if not plan.looks_ahead:
        return f"{plan.momentum:g} per update"
    pushes = _count(plan.num_workers, "push", "pushes")
    extrapolation = "workers compute gradients at the parameters that momentum will probably reach by then"
    return f"{plan.momentum:g} in {pushes}; {extrapolation}"


def _optimiser(plan: RunPlan) -> str:
    """Return the line about an update rule other than SGD."""
    decay = f"; the first moment decays by {plan.momentum:g} per update" if plan.optimiser == ADAM else ""
    return f"{plan.optimiser}, of the mean gradient of each update{decay}"


def _processes(plan: RunPlan) -> str:
    """Return the line about processes and threads, in the whole run and on this host."""
    each = f"of {_count(plan.threads_per_worker, 'thread')} each"
    if plan.workers_here < plan.num_workers:
        each = f"({plan.workers_here} here, {each})" if plan.workers_here else "(none here)"
    servers = "" if plan.has_own_models else f"{_count(plan.num_servers, 'server')}, "
    return f"{servers}{_count(plan.num_workers, 'worker')} {each}, 1 evaluator"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
