"""Replay of a run from its log: the same gradients in the same order give the same parameters, bit for bit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from pipeline.core.errors import DataError, JobError, UsageError
from trainer.checkpoints.read import newest, read_state, read_vector
from trainer.checkpoints.slice_file import Float32s
from trainer.config import Config, RunFacts
from trainer.context import RunContext
from trainer.coordination.cohorts import FIRST
from trainer.exchange.all_reduce import adds_by_torch
from trainer.exchange.neighbours import NeighbourExchange
from trainer.gossip.rounds import EMPTY, Pool
from trainer.home.place import Place
from trainer.leader.peer_checkpoints import PeerTimes, stored_plans
from trainer.report.progress import is_terminal
from trainer.rules import build_slice, build_weights, enter_cohort, enter_stage, local_plan, slots_of, worker_rate
from trainer.run_files import CHECKPOINTS, CONFIG, METRICS, PUSHES
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.kinds.run import StageEvent, StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.runlog.read import iter_events, read_pushes, surviving_events
from trainer.runlog.run_record import read_record
from trainer.simulation.compute import COMPUTES, Compute, facts_of
from trainer.simulation.peers.history import PeerHistory
from trainer.simulation.peers.replay import PeerReplay

USED = ("version", "worker", "clock", "version_pulled", "examples")  # the columns of the log that a replay needs


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        version: of the newest checkpoint.
        pushes: number of gradients that were computed.
        replayed: float32 [P + Q], the parameters of that version as replayed.
        logged: float32 [P + Q], the parameters of that version in the checkpoint.
    """

    version: int
    pushes: int
    replayed: Float32s
    logged: Float32s

    @property
    def is_equal(self) -> bool:
        """Whether the parameters are equal bit for bit."""
        return self.replayed.tobytes() == self.logged.tobytes()


def _bar_interval_s() -> float:
    """Return the least seconds between two updates of a progress bar: few of them if they go to a file."""
    return 0.1 if is_terminal(sys.stderr) else 10.0


def replay(run: Place, *, quiet: bool = True) -> ReplayResult:
    """Compute the gradients of a real or virtual run again, in the order of its log, up to its newest checkpoint.

    Keeps the parameters of every version at which a later gradient was computed. Each gradient is computed once, in
    this process, with as many threads as a worker of the run had, because another number of threads rounds differently.
    Another machine may round differently too. Returns the replayed parameters and the checkpoint's. Raises
    DataError if the folder has no such run, UsageError if the run followed a stream, or used an exchange or a collective
    that a replay cannot compute."""
    config, compute_name, num_workers, rows, configs_by_version = _read_run(run)
    live = _events_of(run)
    switches = stage_begins(live)

    def build(start: Config) -> tuple[RunFacts, Compute]:
        """Return the facts and the computation of the workers that a start had."""
        workers = start.cohorts.present.workers or config.cohorts.first.workers or num_workers
        # All else as the last start has it, such as the address of a set that was moved.
        own = replace(config, data=replace(config.data, batch_size=start.data.batch_size), cohorts=start.cohorts)
        compute = COMPUTES[compute_name](RunContext.from_config(own, run), workers)
        adopt_pools(compute, live, start.cohorts.present.version, workers)
        return facts_of(compute, workers, rows), compute

    version = newest(run / CHECKPOINTS)
    if version is None:
        raise DataError(f"{run} has no complete checkpoint with which a replay could be compared")
    pushes = read_pushes(run / PUSHES, ["accepted", *USED])
    used = pushes[(pushes["accepted"] == 1) & (pushes["version"] <= version)]
    if isinstance(config.exchange, NeighbourExchange):
        rounds = workers_of_rounds(used, version)
        values = _replay_models(run, version, configs_by_version, build, rounds, quiet=quiet)
        return ReplayResult(version, len(used), values, read_vector(run / CHECKPOINTS, version))
    # Without every version from 1 on, the replay would silently compute something else.
    if (len(used) and int(used["version"].iloc[-1]) != version) or used["version"].nunique() != version:
        raise DataError(f"{run / PUSHES} lacks updates of the {version} that its newest checkpoint has: it is damaged")
    models = ServerReplay(configs_by_version, switches, build, used["version_pulled"].tolist())
    for update in tqdm(_updates(used), total=version, unit=" updates", disable=quiet, mininterval=_bar_interval_s()):
        models.apply(update)
    return ReplayResult(version, len(used), models.part.values, read_vector(run / CHECKPOINTS, version))


def main(run: Place, *, quiet: bool = False) -> int:
    """Replay a run, print the result and return 0.

    Raises JobError if the parameters differ, DataError if the model has another number of them."""
    result = replay(run, quiet=quiet)
    if result.is_equal:
        print(f"{run}: {result.pushes:,} gradients in {result.version:,} updates, the same parameters bit for bit")
        return 0
    # A run of an earlier version may have a loss table of another size.
    if len(result.replayed) != len(result.logged):
        raise DataError(
            f"{run}: the checkpoint of version {result.version} has {len(result.logged):,} values, the model of this program"
            f" {len(result.replayed):,}; replay it with the version that trained it"
        )
    gap = float(np.max(np.abs(result.replayed - result.logged)))
    raise JobError(
        f"{run}: at version {result.version} the replayed parameters differ from the run's by {gap:.3g} at most"
    )


def configurations(events: Iterable[LogEvent]) -> list[tuple[int, Config]]:
    """Return the configurations of a run with the first version that each applies to, ascending.

    The configuration of a start applies from the update after the checkpoint from which the start resumed, until a
    later start. ``processes.threads`` is the number of threads per worker of that start. Raises KeyError, TypeError or
    ValueError for a start that cannot be read."""
    configs_by_version: list[tuple[int, Config]] = []
    current: Config | None = None
    for event in events:
        back_to = event.resumes_from()
        if back_to is None:
            continue
        if isinstance(event, StartEvent):
            current = _config_of(event)
        # A start contains the newest checkpoint; the generation event after it contains the sound one that was loaded.
        first = back_to + 1
        configs_by_version = [entry for entry in configs_by_version if entry[0] < first]
        if current is not None and (not configs_by_version or configs_by_version[-1][1] is not current):
            configs_by_version.append((first, current))
    return configs_by_version


def stage_begins(live: Iterable[LogEvent]) -> dict[int, int]:
    """Return the number of each stage by the version with which it begins. live: the events that count."""
    return {event.version: event.stage for event in live if isinstance(event, StageEvent)}


def adopt_pools(compute: Compute, live: Iterable[LogEvent], version: int, num_workers: int) -> None:
    """Have the workers of a cohort use the examples of others from the steps on from which they did.

    Args:
        compute: of these workers.
        live: the events that count. Later workers have pools of later steps, which these never make.
        version: updates before the cohort. Examples that earlier workers were to use later are not theirs.
        num_workers: number of its workers.
    Raises:
        DataError: the log lacks the round of a pool.
    """
    compute.keep_pools()
    ids_by_round: dict[int, dict[str, list[int]]] = {}
    for event in live:
        # A round that is repeated after a roll-back may have other examples, for the pools that follow it.
        if isinstance(event, GossipEvent):
            ids_by_round[event.round] = event.ids
        elif isinstance(event, PoolEvent) and event.version_or_zero() > version and event.worker < num_workers:
            if event.round not in ids_by_round:
                raise DataError(f"the log lacks round {event.round} of the examples that worker {event.worker} used")
            others = [ids for worker, ids in ids_by_round[event.round].items() if worker != str(event.worker)]
            examples = EMPTY._replace(ids=np.concatenate(others).astype(np.int64))
            compute.adopt(event.worker, Pool(event.round, event.clock, event.first, examples))


def _config_of(start: StartEvent) -> Config:
    """Return the configuration of a ``start`` event, with ``processes.threads`` set to the threads per worker.

    The number has three sources. On real processes it is in the plan, as configured or as the host's cores divided by
    its workers. In virtual time it is the configured number or, by default, 1, because a single process computes all
    gradients in turn; the plan in that log describes processes that never started."""
    config = Config.from_json(start.config)
    threads = int((start.plan or {})["threads_per_worker"])
    if start.simulated is not None:
        threads = config.processes.threads or 1
    return replace(config, processes=replace(config.processes, threads=threads))


class ReplayedRun(NamedTuple):
    """The facts of a run that its replay needs.

    Attributes:
        config: the configuration, with the threads per worker of the last start.
        compute_name: the key in ``COMPUTES`` of the way in which the gradients were computed.
        num_workers: number of workers.
        rows: distinct training examples.
        configs_by_version: (first version computed with it, configuration) of every start that counts; see
            ``configurations``.
    """

    config: Config
    compute_name: str
    num_workers: int
    rows: int
    configs_by_version: list[tuple[int, Config]]


def _read_run(run: Place) -> ReplayedRun:
    """Read the facts of a run. Raises DataError if there is no run or it is damaged, UsageError if a replay cannot
    compute its gradients."""
    try:
        record = read_record(run)
        configs_by_version = configurations(iter_events(run / METRICS))
        threads = configs_by_version[-1][1].processes.threads
    except FileNotFoundError:
        raise DataError(f"{run} holds no run: {run / CONFIG} does not exist") from None
    except (ValueError, KeyError, TypeError, IndexError, UsageError) as error:
        problem = f"its configuration cannot be read ({error})"
        raise DataError(f"{run} is damaged, or of another version: {problem}") from None
    if record.config.data.follow:
        raise UsageError(
            f"{run} followed a stream, whose order of rows a replay cannot reproduce; replay a run without --follow"
        )
    if not record.config.exchange.in_virtual_time:
        raise UsageError(f"{run} exchanged gradients by {record.config.exchange.name}, which a replay cannot compute")
    if adds_by_torch(record.config.exchange):
        raise UsageError(f"{run} added up gradients by --collective torch, whose rounding a replay cannot repeat")
    # A real run has no virtual settings, and its gradients are the model's.
    compute_name = (record.simulated or {}).get("compute", "real")
    config = replace(record.config, processes=replace(record.config.processes, threads=threads))
    return ReplayedRun(config, compute_name, record.num_workers, record.rows, configs_by_version)


def _replay_models(
    run: Place,
    version: int,
    configs_by_version: Sequence[tuple[int, Config]],
    build: Callable[[Config], tuple[RunFacts, Compute]],
    rounds: Sequence[list[int]],
    *,
    quiet: bool,
) -> Float32s:
    """Return the mean of all models at a checkpoint, for an exchange among neighbours. Raises DataError.

    Args:
        run: the run's folder.
        version: of the checkpoint.
        configs_by_version: see ``configurations``.
        build: see ServerReplay.
        rounds: see ``workers_of_rounds``.
        quiet: as in ``replay``.
    """
    root = run / CHECKPOINTS
    state = read_state(root, version)
    # A later start may have changed the workers: they have no rounds yet, and no plan there.
    cohorts = configs_by_version[-1][1].cohorts.up_to(version) or (FIRST,)
    plans = list(zip([each.version for each in cohorts], stored_plans(root, state), strict=False))
    final = PeerTimes.from_state(state).begun
    history = PeerHistory(plans, _events_of(run), rounds, final)
    models = PeerReplay(configs_by_version, build, history)
    for _ in tqdm(rounds, unit=" updates", disable=quiet, mininterval=_bar_interval_s()):
        models.step()
    return models.mean(state)


def _events_of(run: Place) -> list[LogEvent]:
    """Return the events of a run that no roll-back has made void, without the ``train`` events of each second."""
    return surviving_events(event for event in iter_events(run / METRICS) if not isinstance(event, TrainEvent))


def workers_of_rounds(used: pd.DataFrame, version: int) -> list[list[int]]:
    """Return, by round, the workers whose gradients are in the log of a run among neighbours.

    A round has none if its only worker was killed before its report. Others may have used its model.

    Args:
        used: the pushes of all rounds.
        version: of the checkpoint at which the replay ends, which is the number of rounds.
    """
    rounds: list[list[int]] = [[] for _ in range(version)]
    for reached, worker in zip(used["version"].tolist(), used["worker"].tolist(), strict=True):
        rounds[reached - 1].append(worker)
    return rounds


def _updates(used: pd.DataFrame) -> Iterator[list[tuple[int, int, int, int, int]]]:
    """Return the gradients of each update, in the order in which they were summed.

    A gradient is (version, worker, clock, version_pulled, examples)."""
    rows = zip(*(used[name].tolist() for name in USED), strict=True)
    return (list(group) for _, group in groupby(rows, itemgetter(0)))


class ServerReplay:
    """The parameters of a run whose workers share a model, after each of its updates.

    Args:
        configs_by_version: see ``configurations``.
        switches: see ``stage_begins``.
        build: returns the facts of a run and the computation of its gradients, for the configuration of a start.
        pulled: the version at which each gradient of the run was computed, which says how long a version is needed.

    Attributes:
        part: the parameters, and the update rule of the present stage.
    """

    def __init__(
        self,
        configs_by_version: Sequence[tuple[int, Config]],
        switches: Mapping[int, int],
        build: Callable[[Config], tuple[RunFacts, Compute]],
        pulled: Iterable[int],
    ) -> None:
        self.later = list(configs_by_version)
        # Later ones differ only in the length of the run, in threads and in workers.
        self.run = configs_by_version[0][1]
        self.switches = switches
        self.build = build
        self.facts, self.compute = build(self.run)
        self.stage = 0
        self.config = self.run.stage_configs()[self.stage]
        self.accepted = 0
        self._uses_left = Counter(pulled)  # by version: gradients still to be computed at it
        self._parameters: dict[int, Float32s] = {}  # by version, until their last use
        momentum = np.zeros(slots_of(self.config) * self.facts.num_parameters, np.float32)
        self._continue(0, self.compute.start().copy(), momentum)

    def apply(self, update: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Compute the gradients of the next update, and make it. update: see ``_updates``."""
        version = update[0][0]
        self._begin_starts(version)
        # Only now, because the newest checkpoint may be the one before the switch, whose momentum is the old one.
        self._begin_stage(version - 1)
        vectors = []
        steps = []  # of each push
        for _, worker, clock, pulled, _ in update:
            plan = local_plan(self.config, self.facts, clock)
            steps.append(len(plan.rates))
            vectors.append(self.compute.push(worker, clock, [self._parameters[pulled]], plan).vector)
            self._uses_left[pulled] -= 1
            if not self._uses_left[pulled]:
                del self._parameters[pulled]
        examples = [row[4] / count for row, count in zip(update, steps, strict=True)]
        gradients = self.config.cohorts.present.gradients(self.accepted, self.facts.num_workers)
        epoch = gradients / (self.facts.num_workers * self.config.steps_per_epoch(self.facts.rows))
        factors = self.weights.factors([version - 1 - row[3] for row in update], examples)
        rate = worker_rate(self.config, self.facts, epoch)
        self.part.apply(vectors, rate, factors, self.weights.correction(examples))
        self.accepted += sum(steps)
        if self._uses_left[version]:
            self._parameters[version] = self.part.values.copy()

    def _begin_starts(self, version: int) -> None:
        """Take over the configurations of starts that made the update of a version."""
        while self.later and self.later[0][0] <= version:
            cohorts = self.run.cohorts
            self.run = self.later.pop(0)[1]
            self.config = self.run.stage_configs()[self.stage]
            if self.run.cohorts != cohorts:
                self.facts, self.compute = self.build(self.run)
                # By the stage that made the checkpoint, even if the next stage begins with it, too.
                num_workers = self.facts.num_workers
                entered = enter_cohort(self.config, num_workers, version - 1, self.part.values, self.part.momentum)
                self._continue(version - 1, *entered)
            self.compute.set_threads(self.config.processes.threads)

    def _begin_stage(self, version: int) -> None:
        """Enter the stage that begins with the checkpoint of a version, if one does."""
        if self.switches.get(version, self.stage) == self.stage:
            return
        before = self.config
        self.stage = self.switches[version]
        self.config = self.run.stage_configs()[self.stage]
        num_workers = self.facts.num_workers
        entered = enter_stage(self.run, before, self.config, num_workers, self.part.values, self.part.momentum)
        self._continue(version, *entered)

    def _continue(self, version: int, values: Float32s, momentum: Float32s) -> None:
        """Continue from a version by the rules of the present stage and its workers."""
        self.part = build_slice(self.config, self.facts.num_workers, values, momentum, version)
        self.weights = build_weights(self.config, self.facts)
        self._parameters[version] = self.part.values.copy()
