"""A run in virtual time, from its folder to its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.core import console
from pipeline.core.errors import DivergenceError, JobError, UsageError
from pipeline.core.shardset.ratios import Ratios
from trainer.checkpoints.read import newest_state, unevaluated
from trainer.checkpoints.write import mark_evaluated
from trainer.config import CHANNEL, CROP_FLIP, Config, RunFacts
from trainer.context import RunContext
from trainer.data.example_table import table_warning
from trainer.data.holdout import trained_fingerprint
from trainer.data.network import build_network
from trainer.exchange.all_reduce import adds_by_torch
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.leader.next_stage import find_continuation
from trainer.leader.peer_checkpoints import describe_memory
from trainer.lifecycle.ends import conclude, log_start
from trainer.lifecycle.interruption import RunInterruptedError, describe_interruption, interruptible
from trainer.lifecycle.prepare import check_network, check_size, ensure_checkpoint
from trainer.lifecycle.row_storage import RowReads, row_storage
from trainer.models.devices import pick_device, preserve_torch_state
from trainer.models.flat_vector import FlatModel
from trainer.models.own import describe_error
from trainer.options import Options
from trainer.plan import check_shares, describe, plan
from trainer.regroup import confirm, describe_cohorts, regrouped
from trainer.report.progress import ProgressLine
from trainer.run_files import CHECKPOINTS, METRICS
from trainer.runlog.event_tail import EventTail
from trainer.runlog.events import CLOCK
from trainer.runlog.kinds.run import WarningEvent
from trainer.runlog.read import iter_events
from trainer.runlog.result import Result, read_result
from trainer.runlog.run_folder import Start, prepare_folder, resolve_output
from trainer.runlog.run_record import RunRecord, SavedRun, saved_run
from trainer.sampling.shuffle import ShuffleSampler
from trainer.simulation.compute import COMPUTES, Compute, facts_of
from trainer.simulation.engine import Engine, describe_vectors
from trainer.simulation.options import SimulationSettings
from trainer.simulation.peers.engine import PeerEngine
from trainer.transport.status import RunStatus

if TYPE_CHECKING:
    from trainer.evaluation.evaluator import Evaluator

SHOW_S = 0.5


def run(config: Config, simulated: SimulationSettings, options: Options) -> Result:
    """Simulate a run to its end and return its result. Raises UsageError, DataError and JobError."""
    output = resolve_output(config.run.output)
    return run_in(RunContext.from_config(config, output), simulated, options)


def run_in(context: RunContext, simulated: SimulationSettings, options: Options) -> Result:
    """Simulate a run whose home is a local folder, to its end, and return its result.

    A finished run in the folder is not repeated. Raises UsageError, DataError and JobError."""
    saved = saved_run(context.home, overwrite=options.overwrite)
    context = pinned_context(context, simulated, saved)
    look = partial(regrouped, context, workers=simulated.workers, options=options, compute=simulated.compute)
    context = look(saved)
    if options.resume and simulated.workers is None:
        simulated = _with_saved_workers(simulated, context, saved)
    if context.config.cohorts.entries and not (options.quiet or options.silent):
        print(describe_cohorts(context), flush=True)
    config = context.config
    output = context.home
    assert isinstance(output, Path), "resolve_output refuses other places"
    num_workers, rows, shards_digest = workers_rows_digest(context, simulated)
    check_shares(config, num_workers, drawn_ratios(context, simulated, num_workers))
    simulated.check(max([num_workers, *(each.workers for each in config.cohorts.entries)]))
    check_exchange(config, num_workers, simulated.compute)
    check_rows(config, simulated.compute)
    record = RunRecord(config, num_workers, rows, shards_digest, simulated.to_json())

    def check(record: RunRecord, saved: SavedRun) -> RunRecord:
        confirm(context, look(saved))
        if saved.record is None:
            config.protocol.check_steps(config.steps_per_worker(rows))
        if simulated.compute == "real":  # toy computations have no model to check
            _check(context, num_workers, None if options.overwrite else output / CHECKPOINTS)
        return record

    # Locks the folder, and decides whether the run is new, resumes or has ended already.
    with prepare_folder(output, record, resume=options.resume, overwrite=options.overwrite, check=check) as start:
        if start is Start.FINISHED:
            return read_result(output)
        with (
            preserve_torch_state() if simulated.compute == "real" else nullcontext(),
            _stored(context, simulated, output) as (stored, storage),
        ):
            compute = COMPUTES[simulated.compute](stored, num_workers)
            facts = facts_of(compute, num_workers, rows)
            ensure_checkpoint(config, facts, compute.start(), output)
            return _run(stored, facts, simulated, compute, options, storage)


def pinned_context(context: RunContext, simulated: SimulationSettings, saved: SavedRun) -> RunContext:
    """Return the context of a run, pinned to a generation if it reads rows of a set that grows. See RunContext.pinned."""
    reads_rows = simulated.compute == "real" and context.config.data.shards
    return context.pinned(saved) if reads_rows else context


@contextmanager
def _stored(context: RunContext, simulated: SimulationSettings, output: Path) -> Iterator[tuple[RunContext, str]]:
    """Yield the context of a run with its rows in memory or mapped, and the choice as a line; "" without rows.

    Raises JobError if the disk has no room for mapped rows."""
    if simulated.compute != "real":
        yield context, ""
        return
    shards = context.shards
    work = WorkFolder(Folders.from_home(output))
    # This process has the rows of all virtual workers, and evaluates.
    targets = build_network(context.config, shards).targets
    reads = RowReads([shards.files()], shards.eval_files(), targets, in_virtual_time=True)
    with row_storage(context.config, shards, reads, work, leads=True) as storage:
        stored_shards = replace(shards, mapped=work.folders.rows, kept=work.folders.kept)
        yield replace(context, opened=lambda: stored_shards), storage


def _with_saved_workers(simulated: SimulationSettings, context: RunContext, saved: SavedRun) -> SimulationSettings:
    """Return the settings of a resume with the workers of the run, which need not be one per shard."""
    if saved.record is None or saved.record.simulated is None:
        return simulated
    return replace(simulated, workers=context.config.cohorts.present.workers or saved.record.simulated.get("workers"))


def _check(context: RunContext, num_workers: int, root: Path | None) -> None:
    """Raise UsageError for a configuration that no worker could compute, DataError for a checkpoint of another size.

    root: folder of checkpoints; None if they are to be deleted."""
    config = context.config
    shards = context.shards
    pick_device(config.processes.device, 0)
    network = build_network(config, shards)
    check_network(config, network, shards, num_workers)
    if warning := table_warning(config.sampler, trained_fingerprint(shards, config)):
        console.say("sharding.training", warning, text=f"warning: {warning}", level="warning")
    flat = FlatModel(network.model)
    if root and (state := newest_state(root)):
        check_size(flat.num_parameters + flat.num_buffers, root, state)


def check_rows(config: Config, compute: str) -> None:
    """Raise UsageError for an option that needs rows, which only real gradients have.

    compute: the kind of gradients, as in SimulationSettings."""
    uses = (
        (config.sampler != ShuffleSampler(), f"--sampling {config.sampler.name} draws from rows"),
        (config.run.example_ledger, "--example-ledger keeps losses of rows"),
        (bool(config.data.gossip), f"--gossip {config.data.gossip} exchanges rows"),
        (config.data.augmentation != CROP_FLIP, f"--augmentation {config.data.augmentation} changes images of rows"),
        (config.data.normalise != CHANNEL, f"--normalise {config.data.normalise} changes images of rows"),
        (config.run.evaluation_mode != "clean", f"--evaluation-mode {config.run.evaluation_mode} evaluates rows"),
        (config.run.precision != "fp32", f"--precision {config.run.precision} computes gradients of rows"),
        (config.data.repartition != "fixed", f"--repartition {config.data.repartition} divides rows"),
    )
    use = next((use for applies, use in uses if applies), None)
    if use and compute != "real":
        raise UsageError(f"{use}, --compute {compute} has none: use --compute real")
    # It would end such a run at once.
    if config.optimiser.tolerance and compute == "none":
        raise UsageError(
            f"--tolerance {config.optimiser.tolerance:g} ends a run whose model hardly changes, which --compute none never"
            " changes: leave it out"
        )


def check_exchange(config: Config, num_workers: int, compute: str) -> None:
    """Raise UsageError if the exchange of a run cannot be simulated, before its folder is changed.

    compute: the kind of gradients, as in SimulationSettings."""
    exchange = config.exchange
    if not exchange.in_virtual_time:
        raise UsageError(
            f"--exchange {exchange.name} has no virtual time: leave it out, or train with python -m trainer"
        )
    if adds_by_torch(exchange):
        raise UsageError(
            "--collective torch has no virtual time: leave it out, for sums that differ from torch's by rounding alone"
        )
    # Such as a topology that these workers cannot have.
    exchange.plan(num_workers, config.run.seed)
    if exchange.switches_by_rule and compute != "real":
        raise UsageError(
            f"--alpha auto reads the loss of evaluations, --compute {compute} has none: give --alpha SHARE"
        )
    if config.run.patience is not None and compute != "real":
        raise UsageError(
            f"--patience {config.run.patience} reads the loss of evaluations, --compute {compute} has none: leave it out"
        )


def drawn_ratios(context: RunContext, simulated: SimulationSettings, num_workers: int) -> Ratios:
    """Return the ratios in which virtual workers draw rows of the set; empty if shares are equal or without rows."""
    return context.shards.ratios_of(num_workers) if simulated.compute == "real" else ()


def workers_rows_digest(context: RunContext, simulated: SimulationSettings) -> tuple[int, int, str]:
    """Return (workers, rows, digest of the shards) of a virtual run; "none" is the digest without shards.

    Raises UsageError if the number of workers is unknown, or real gradients are asked for without shards."""
    if context.config.data.shards:
        shards = context.shards
        return context.config.num_workers(simulated.workers or shards.num_workers), shards.rows, shards.digest
    if simulated.compute == "real":
        raise UsageError("--compute real trains on shards: give --shards, or --compute quadratic or none")
    num_workers = context.config.num_workers(simulated.workers or 0)
    if not num_workers:
        raise UsageError("without --shards nothing says how many workers there are: give --workers N")
    return num_workers, simulated.rows, "none"


def _run(
    context: RunContext,
    facts: RunFacts,
    simulated: SimulationSettings,
    compute: Compute,
    options: Options,
    storage: str,
) -> Result:
    """Simulate a run in its prepared folder and return its result. Raises as ``run``.

    However the run ends, its end is logged and its result is written. An interruption requests a last checkpoint first.

    Args:
        context: the configuration and the shards.
        facts: the facts of the run.
        simulated: the virtual cluster.
        compute: computes the gradients.
        options: how this host takes part.
        storage: where the rows are, in words.
    """
    config = context.config
    assert isinstance(context.home, Path), "resolve_output refuses other places"
    folders = Folders.from_home(context.home)
    planned = plan(config, facts)  # before anything is logged, because it raises if the run does not fit
    if not (options.quiet or options.silent):
        displayed = plan(config, facts, continuation=find_continuation(config, facts, folders.checkpoints))
        displayed = displayed if simulated.compute == "real" else replace(displayed, model=simulated.compute)
        memory = describe_memory(facts) if planned.has_own_models else describe_vectors(facts)
        print(describe(displayed, storage, memory), flush=True)
    evaluator = _evaluator(context, folders) if simulated.compute == "real" else None  # toy losses have no model
    watcher = _Watcher(folders.work, evaluator, options)
    world: type[PeerEngine] | type[Engine] = PeerEngine if planned.has_own_models else Engine
    engine: World = world(config, facts, simulated, compute, folders, watcher)
    # Events of the log get virtual times until this run ends.
    token = CLOCK.set(lambda: engine.now)
    cause = "failed"
    failure: Exception | None = None
    try:
        log_start(config, planned, folders, simulated.to_json())
        with interruptible(watcher):
            engine.run()
        try:
            watcher.evaluate(engine)
        except KeyboardInterrupt:  # checkpoints are whole at any time
            raise RunInterruptedError from None
        status = engine.status()
        if status.diverged:
            raise DivergenceError(f"the run diverged: {status.diverged} (see {folders.home})")
        if not status.finished:
            idle = "the virtual run stands still: nobody has anything to do, and it has not ended"
            raise JobError(engine.trouble() or idle)
        cause = "finished"
    except RunInterruptedError:
        cause = "interrupted"
        if not engine.status().finished:
            engine.interrupt()
        # The version of the checkpoint: a run of neighbours, or without its server, has not written one now.
        raise RunInterruptedError(describe_interruption(folders.checkpoints)) from None
    except SystemExit as error:  # by the user's model, while it computes
        failure = JobError(f"the run failed in the model: {describe_error(error)}")
        raise failure from error
    except Exception as error:
        failure = error
        raise
    finally:
        watcher.close()
        result = conclude(WorkFolder(folders), options, engine.status(), cause, failure)
        CLOCK.reset(token)
    return result


def _evaluator(context: RunContext, folders: Folders) -> Evaluator:
    from trainer.evaluation.evaluator import Evaluator

    return Evaluator(context.config, context.shards, folders)


class World(Protocol):
    """The simulation of a run: of one with servers (Engine) or of one among workers (PeerEngine).

    Attributes:
        now: virtual seconds.
        has_snapshot: True after a checkpoint, until the observer resets it.
    """

    now: float
    has_snapshot: bool

    def run(self) -> None: ...

    def status(self) -> RunStatus: ...

    def trouble(self) -> str | None: ...

    def interrupt(self) -> None: ...


class _Watcher:
    """The observer of a simulation, which evaluates checkpoints as they are written, and shows progress.

    Args:
        output: folder of the run.
        evaluator: evaluates checkpoints; None for toy losses.
        options: quiet, silent and tensorboard apply.
    """

    def __init__(self, output: Path, evaluator: Evaluator | None, options: Options) -> None:
        self.output = output
        self.evaluator = evaluator
        self.progress = ProgressLine(quiet=options.quiet or options.silent)
        self.has_board = options.tensorboard
        self.events = EventTail(self.output / METRICS)
        self.interrupted = False
        self._last_shown = 0.0

    def __call__(self, engine: World) -> None:
        """Evaluate new checkpoints and show progress. Called by the engine after every event.

        Raises RunInterruptedError after a signal to stop."""
        if self.interrupted:
            raise RunInterruptedError
        if engine.has_snapshot:
            self.evaluate(engine)
        if time.monotonic() - self._last_shown >= SHOW_S:
            self._last_shown = time.monotonic()
            status = engine.status()
            if status.ready:
                self.progress.update(status)

    def evaluate(self, engine: World) -> None:
        """Evaluate the checkpoints that are not evaluated yet. Without a model they are only marked as evaluated."""
        engine.has_snapshot = False
        root = self.output / CHECKPOINTS
        for state in unevaluated(root):
            if self.evaluator:
                self.evaluator.handle(state)
            else:
                mark_evaluated(root, state)
        if self.evaluator:
            self.evaluator.keep_best()
        for event in self.events.new():
            if isinstance(event, WarningEvent):
                self.progress.message(event.message)

    def close(self) -> None:
        """Close the progress line and, with --tensorboard, write all events of the run for TensorBoard."""
        self.progress.close()
        if self.has_board:
            from trainer.report.tensorboard import TensorBoardWriter

            board = TensorBoardWriter(self.output)
            for event in iter_events(self.output / METRICS):
                board.add(event)
            board.close()
