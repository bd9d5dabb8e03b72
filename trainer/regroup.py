"""The change of the workers of a run when it is resumed: their number, their mini-batch, their shares of a mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from pipeline.core.errors import DataError, UsageError
from trainer.checkpoints.decisions import has_converged, stop_of
from trainer.checkpoints.resumption import Resumption, read_resumption
from trainer.checkpoints.slice_file import broken
from trainer.checkpoints.state import STATE, folder_of
from trainer.config import Config
from trainer.context import RunContext
from trainer.coordination.cohorts import (
    SINGLE,
    CheckpointProgress,
    Cohort,
    Cohorts,
    CohortSize,
    next_cohort,
    own_clocks,
)
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.gossip.rounds import first_step
from trainer.gossip.weave import foreign_steps
from trainer.home.place import Place, listing
from trainer.options import Options
from trainer.run_files import FOLLOWED
from trainer.runlog.run_record import RunRecord, SavedRun, is_finished
from trainer.sampling.mixture import changed_mix


class Regrouping(NamedTuple):
    """The workers and the mini-batch with which a start would continue the run in its folder.

    record: the run; request: its workers and mini-batch from now on."""

    record: RunRecord
    request: CohortSize

    @property
    def present(self) -> CohortSize:
        """The workers and the mini-batch that the run has."""
        return self.record.cohorts.present.size

    @property
    def keeps_all(self) -> bool:
        """True if the run has never changed its workers, and does not change them now."""
        return len(self.record.cohorts.entries) == 1 and self.request == self.present


def regrouped(
    context: RunContext, saved: SavedRun, workers: int | None, options: Options, *, compute: str | None = None
) -> RunContext:
    """Return the context of a start in the folder of a run, with the history of its shares and the cohorts of its workers.

    If a resume asks for another number of workers or another mini-batch than the run has, these count from its newest
    checkpoint on. If a start asks for other shares of the sets of a mixture, these count from the first clock that no
    worker has reached, so that the mini-batches before it stay the same. The context of another start is returned
    unchanged.

    Args:
        context: the run that the start asks for.
        saved: the run in the folder.
        workers: the number of workers that the start asks for; None for the number that the run has.
        options: resume and batch_size_given apply.
        compute: the kind of gradients of a run in virtual time, as in SimulationSettings; None on real processes.
    Raises:
        UsageError: the run cannot be resumed with other workers.
        DataError: a checkpoint is damaged.
    """
    record = saved.intact() if context.config.data.mix else saved.record
    history = record.config.data.mix if record and context.config.data.mix else ""
    change = requested_change(context, saved, workers, options, compute)
    resumption = Resumption()
    # A start that changes neither workers nor shares reads no checkpoints.
    if record and (history or (change and not change.keeps_all)):
        resumption = read_resumption(context.checkpoints, _with_cohorts(context, record.cohorts).config)
    if history:
        context = _with_data(context, mix=changed_mix(history, context.config.data.mix, resumption.clock))
    # Without a checkpoint nothing was trained, so that this start begins anew.
    if change is None or not (options.resume or resumption.newest):
        return context
    _check_batch(context, workers, change, options)
    context = _with_data(context, batch_size=change.request.batch_size)
    if change.keeps_all:
        return context
    if options.resume:
        return _resumed(context, change, resumption, has_rows=compute in (None, "real"))
    # Without --resume a start can only find out whether the run has finished.
    if change.request != change.present:
        raise UsageError(
            f"{context.home} holds a run with {change.present}, not {change.request}; --resume changes them, --overwrite"
            " starts anew"
        )
    return _with_cohorts(context, change.record.cohorts)


def requested_change(
    context: RunContext, saved: SavedRun, workers: int | None, options: Options, compute: str | None
) -> Regrouping | None:
    """Return the workers with which a start would continue a run; None if it begins one, or is refused later.

    Reads no checkpoint. Raises UsageError and DataError. See ``regrouped`` for the arguments."""
    changes = options.resume and workers is not None
    # A damaged record is refused here if it says how many workers the run has, otherwise later.
    record = saved.intact() if changes else saved.record
    if record is None:
        return None
    if _compute_of(record) != compute:
        if changes:
            _refuse_kind(context, record)
        return None
    cohorts = record.cohorts
    if len(cohorts.entries) == 1 and not options.resume:
        return None
    change = Regrouping(record, _request(context, workers, cohorts.present.size, options))
    if change.keeps_all or _has_rows_of(context, record, compute):
        return change
    if changes and context.config.data.shards:
        raise UsageError(
            f"{context.home} holds a run with another shard set, whose workers do not change: give its --shards, choose"
            " another --output, or --overwrite"
        )
    return None


def confirm(context: RunContext, locked: RunContext) -> None:
    """Raise UsageError if the run has changed since a start has looked at it.

    Args:
        context: the context that ``regrouped`` has returned, before the folder was locked.
        locked: the one that it returns with the folder locked.
    """
    # Another start may have written a later checkpoint, and its rows are not among those that the cohorts say are drawn.
    if locked.config != context.config:
        raise UsageError(f"{context.home} was written by another start just now: give the same command again")


def describe_cohorts(context: RunContext) -> str:
    """Return in words since when a run has its present workers."""
    cohorts = context.config.cohorts
    present = cohorts.present
    text = f"{context.home}: {present.size} from version {present.version} on, {cohorts.previous.size} before"
    if present.left_out:
        # The sets of a mixture have passes of their own.
        passes = f"passes 1 to {present.turn}" if present.turn else "old passes"
        text += (
            f"; {present.left_out:,} rows of {passes} were left out then, because some workers were whole passes ahead of"
            " others"
        )
    return text


def _compute_of(record: RunRecord) -> str | None:
    return None if record.simulated is None else str(record.simulated.get("compute"))


def _request(context: RunContext, workers: int | None, present: CohortSize, options: Options) -> CohortSize:
    """Return the number of workers and the mini-batch that a start asks for.

    Args:
        context: the run that the start asks for.
        workers: the number of workers that it asks for.
        present: the workers that the run has.
        options: batch_size_given applies.
    """
    # A default of the command line is no wish.
    is_forgotten = workers is not None and options.batch_size_given is False
    batch_size = present.batch_size if is_forgotten else context.config.data.batch_size
    return CohortSize(workers or present.workers, batch_size)


def _check_batch(context: RunContext, workers: int | None, change: Regrouping, options: Options) -> None:
    """Raise UsageError for another mini-batch than the run has, unless a start says that it may change.

    Args:
        context: the run that the start asks for.
        workers: the number of workers that it asks for.
        change: the workers and the mini-batch of the run, and those that it asks for.
        options: resume and batch_size_given apply.
    """
    present = change.present
    may_change = workers is not None and (options.batch_size_given or workers != present.workers)
    if change.request.batch_size == present.batch_size or may_change:
        return
    other = f"{context.home} holds a run with --batch-size {present.batch_size}, not {change.request.batch_size}"
    if not options.resume:
        raise UsageError(f"{other}; choose another --output, or --overwrite")
    raise UsageError(f"{other}: give --batch-size {present.batch_size}, or also --workers, which divides the rows anew")


def _has_rows_of(context: RunContext, saved: RunRecord, compute: str | None) -> bool:
    """Return whether a start has the set of a run. Another set is refused later."""
    if context.config.data.shards:
        return saved.shards == context.shards.digest
    return compute not in (None, "real")


def _with_data(context: RunContext, **values: Any) -> RunContext:
    """Return the context of a run with other options about its data. values: by name."""
    config = context.config
    return replace(context, config=replace(config, data=replace(config.data, **values)))


def _with_cohorts(context: RunContext, cohorts: Cohorts) -> RunContext:
    return replace(context, config=replace(context.config, cohorts=cohorts))


def _resumed(context: RunContext, change: Regrouping, resumption: Resumption, *, has_rows: bool) -> RunContext:
    """Return the context of a resume, with the cohorts of the workers.

    Args:
        context: the run.
        change: the run in the folder, and what the resume asks for.
        resumption: its checkpoints.
        has_rows: whether gradients are computed from rows of the set.
    Raises:
        UsageError: the workers of the run cannot change.
        DataError: a checkpoint is damaged.
    """
    record, request = change
    progress = _progress(context.checkpoints, record, resumption)
    # A cohort without an update has left nothing: it begins again, maybe from another checkpoint.
    entries = record.cohorts.up_to(progress.version)
    last = entries[-1]
    is_changed = request != last.size
    reason = None
    if is_changed or len(entries) > 1:
        reason = obstacle(
            context.config, request.workers, has_followed=has_followed_stream(context.config, context.home)
        )
    if reason and is_changed:
        raise UsageError(f"{request} instead of {last.size}: {reason}; resume with {last.size}")
    if reason:
        raise UsageError(f"{context.home} has changed its workers, and {reason}: leave it out")
    if sorted(progress.clocks) != list(range(last.workers)):
        raise broken(
            folder_of(context.checkpoints, progress.version) / STATE,
            f"has clocks of {len(progress.clocks)} workers, not {last.workers}",
        )
    if not is_changed:
        return _with_cohorts(context, Cohorts(entries) if len(entries) > 1 else SINGLE)
    if isinstance(context.config.exchange, NeighbourExchange):
        progress = progress.count_rounds(last)
    result = _with_cohorts(
        context, Cohorts((*entries, _next(context, entries, request, progress, record.rows, has_rows=has_rows)))
    )
    if stop_of(context.checkpoints, _with_cohorts(context, record.cohorts).config):
        raise UsageError(
            f"{context.home} holds a run that --patience ends early: {request} instead of {last.size} need another"
            " --patience, or none, too"
        )
    # Its newest checkpoint would be written again as the end of a run of the new workers, who have done nothing. A run that
    # has converged is finished at any of its steps.
    is_over = result.config.steps_per_worker(record.rows) <= result.config.cohorts.present.clock
    if is_over or _may_have_converged(context, record, resumption):
        keeps_length = context.config.data.repartition == "importance"
        need = (
            "another --output, because --repartition importance keeps its length"
            if keeps_length
            else "a larger --epochs or --steps too"
        )
        raise UsageError(
            f"{context.home} holds a run that is finished at this length: {request} instead of {last.size} need {need}"
        )
    return result


def _progress(root: Place, record: RunRecord, resumption: Resumption) -> CheckpointProgress:
    """Return the progress of a run in the checkpoint with which it continues: the newest, or the one that a rule chose.

    Raises DataError if all of its checkpoints are damaged. root: their folder."""
    if state := resumption.next:
        return CheckpointProgress(state.version, state.accepted, state.clocks, state.gossip)
    if resumption.has_updates:
        raise DataError(f"{root} holds no whole checkpoint; choose another --output, or --overwrite")
    # A first checkpoint without its last file is written again.
    return CheckpointProgress(0, 0, dict.fromkeys(range(record.cohorts.first.workers), 0))


def _may_have_converged(context: RunContext, record: RunRecord, resumption: Resumption) -> bool:
    """Return whether a run has converged at the length of a start, or may have, if an earlier version finished it.

    record: the run; resumption: its checkpoints."""
    run, before = context.config.run, record.config.run
    if not context.config.optimiser.tolerance or (run.epochs, run.steps) != (before.epochs, before.steps):
        return False
    state = resumption.next
    return is_finished(context.home) or (state is not None and has_converged(state, record.config, record.rows))


def _refuse_kind(context: RunContext, saved: RunRecord) -> NoReturn:
    """Raise UsageError for a run of another kind than a start that changes its workers."""
    kind = "on real processes" if saved.simulated is None else "in virtual time, or with other gradients"
    raise UsageError(f"{context.home} holds a run {kind}; choose another --output, or --overwrite")


def _next(
    context: RunContext,
    entries: tuple[Cohort, ...],
    request: CohortSize,
    progress: CheckpointProgress,
    rows: int,
    *,
    has_rows: bool,
) -> Cohort:
    """Return the cohort that a start asks for, as it continues from a checkpoint.

    Args:
        context: the run.
        entries: the cohorts so far.
        request: number of workers and mini-batch.
        progress: of the checkpoint.
        rows: distinct training examples of the run.
        has_rows: whether gradients are computed from rows of the set.
    """
    turn = 0  # without rows there are no passes
    left_out = 0
    foreign = _foreign_steps(context.config, progress)
    if has_rows:
        from trainer.data.cohort_passes import passes_left  # loads pyarrow

        own = own_clocks([progress.clocks[worker] for worker in sorted(progress.clocks)], foreign)
        turn, _, left_out = passes_left(context.config, context.shards, entries, own, request.workers)
    before = _with_data(context, batch_size=entries[-1].batch_size).config
    return next_cohort(
        entries[-1],
        size=request,
        progress=progress,
        turn=turn,
        left_out=left_out,
        steps_per_epoch=(before.steps_per_epoch(rows), context.config.steps_per_epoch(rows)),
        foreign=foreign,
    )


def _foreign_steps(config: Config, progress: CheckpointProgress) -> tuple[int, ...]:
    """Return how many mini-batches of other workers' examples each worker has made in its cohort; empty for a run without.

    The workers of a cohort begin without such examples. progress: of a checkpoint."""
    if not config.data.gossip:
        return ()
    every = config.data.gossip_every
    return tuple(
        foreign_steps(clock, first_step(progress.gossip, worker), every)
        for worker, clock in sorted(progress.clocks.items())
    )


def departure_obstacle(config: Config, workers: int, *, has_followed: bool) -> str | None:
    """Return why a run keeps the workers of a host that is to end; None if it continues without them.

    Args:
        config: the run.
        workers: the number of workers without them; 0 if all hosts are to end.
        has_followed: see ``obstacle``.
    """
    protocols = [stage.protocol for stage in config.stage_configs()]
    if all(protocol.reproducible for protocol in protocols):
        name = config.protocol.name if config.exchange.name == ParameterServer.name else config.exchange.name
        return f"with other workers a run of {name} would end with other bits"
    try:
        for protocol in protocols:
            protocol.check(workers or config.cohorts.present.workers)
    except UsageError as error:
        return str(error)
    return obstacle(config, workers or None, has_followed=has_followed)


def has_followed_stream(config: Config, home: Place) -> bool:
    """Return whether workers of a run have added rows of a stream to their shards. Raises OSError. home: its folder."""
    return config.data.generation is not None and bool(listing(home / FOLLOWED))


def obstacle(config: Config, workers: int | None, *, has_followed: bool) -> str | None:
    """Return why the workers of a run cannot change; None if they can.

    Most causes keep something per worker, or per pass of a worker, that cannot be divided anew.

    Args:
        config: the run.
        workers: the number of workers that is asked for, if it is known.
        has_followed: whether its workers have added rows of a stream, maybe with an earlier start's --follow.
    """
    name = config.exchange.name
    table = config.table_sampler
    # The first one that applies is reported.
    causes = (
        (
            config.data.follow,
            "--follow adds the rows of a stream to the shard of each worker, each after passes of its own",
        ),
        (
            has_followed,
            "its workers have added rows of a stream to their shards with --follow, each after passes of its own",
        ),
        (
            isinstance(config.exchange, NeighbourExchange) and table and table.has_owners and not table.has_row_entries,
            f"--exchange {name} keeps the losses of --sampling {config.sampler.name} in the worker's own model",
        ),
        (bool(config.data.gossip) and workers == 1, "--gossip exchanges examples among at least two workers"),
    )
    return next((reason for applies, reason in causes if applies), None)
