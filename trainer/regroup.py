"""The change of the workers of a run when it is resumed: their number and the mini-batch that they divide."""

from __future__ import annotations

from dataclasses import replace

from pipeline.core.errors import UsageError
from trainer.checkpoints.read import newest, read_state
from trainer.checkpoints.slice_file import broken
from trainer.checkpoints.state import STATE, RunState, folder_of
from trainer.config import Config
from trainer.context import RunContext
from trainer.coordination.cohorts import CheckpointProgress, Cohort, Cohorts, next_cohort
from trainer.exchange.neighbours import NeighbourExchange
from trainer.run_files import CHECKPOINTS
from trainer.runlog.run_folder import RunRecord, digest, saved_run
from trainer.sampling.shuffle import ShuffleSampler


def regrouped(context: RunContext, workers: int | None, *, resume: bool, has_rows: bool = True) -> RunContext:
    """Return the context of a resumed run, with the cohorts of its workers.

    If a start asks for another number of workers or another mini-batch than the run had, these count from its newest
    checkpoint on. The context of another start is returned unchanged.

    Args:
        context: the run that the start asks for.
        workers: the number of workers that it asks for; None for the number that the run had.
        resume: whether it resumes a run.
        has_rows: whether gradients are computed from rows of the set.
    Raises:
        UsageError: the run cannot be resumed with other workers.
        DataError: config.json or a checkpoint is damaged.
    """
    saved = saved_run(context.home) if resume else None
    root = context.home / CHECKPOINTS
    version = newest(root, verify=True) if saved else None
    # A start on another set is refused later.
    if saved is None or version is None or (has_rows and saved.shards != digest(context.shards)):
        return context
    # A cohort without an update has left nothing.
    entries = saved.config.cohorts.up_to(version)
    present = entries[-1] if entries else Cohort(saved.num_workers, saved.config.data.batch_size)
    request = Cohort(workers or saved.num_workers, context.config.data.batch_size)
    is_changed = (request.workers, request.batch_size) != (present.workers, present.batch_size)
    if is_changed and workers is None:
        raise UsageError(
            f"{context.home} holds a run with --batch-size {present.batch_size}, not {request.batch_size}: give"
            f" --batch-size {present.batch_size}, or also --workers, which divides the rows anew"
        )
    if is_changed or len(entries) > 1:
        _check(context.config, present, request)
    if not is_changed:
        return _with_cohorts(context, entries if len(entries) > 1 else ())
    state = read_state(root, version)
    if sorted(state.clocks) != list(range(present.workers)):
        raise broken(
            folder_of(root, version) / STATE, f"has clocks of {len(state.clocks)} workers, not {present.workers}"
        )
    entries = entries or (present,)
    result = _with_cohorts(context, (*entries, _next(context, entries, request, state, saved, has_rows=has_rows)))
    if state.final and result.config.steps_per_worker(saved.rows) <= result.config.cohorts.present.clock:
        raise UsageError(
            f"{context.home} holds a finished run: {_words(request)} instead of {_words(present)} need a larger --epochs or"
            " --steps too"
        )
    return result


def describe_cohorts(context: RunContext) -> str:
    """Return in words since when a run has its present workers."""
    cohorts = context.config.cohorts
    present = cohorts.present
    text = f"{context.home}: {_words(present)} from version {present.version} on, {_words(cohorts.previous)} before"
    if present.left_out:
        text += (
            f"; {present.left_out:,} rows of passes 1 to {present.turn} are left out, because fast workers were far ahead of"
            " slow ones"
        )
    return text


def _with_cohorts(context: RunContext, entries: tuple[Cohort, ...]) -> RunContext:
    return replace(context, config=replace(context.config, cohorts=Cohorts(entries)))


def _next(
    context: RunContext,
    entries: tuple[Cohort, ...],
    request: Cohort,
    state: RunState,
    saved: RunRecord,
    *,
    has_rows: bool,
) -> Cohort:
    """Return the cohort that a start asks for, as it continues from a checkpoint.

    Args:
        context: the run.
        entries: the cohorts so far.
        request: number of workers and mini-batch.
        state: of the checkpoint.
        saved: the record of the run.
        has_rows: whether gradients are computed from rows of the set.
    """
    turn = 0  # without rows there are no passes
    left_out = 0
    if has_rows:
        from trainer.data.cohorts import passes_left  # loads torch, which takes a second

        clocks = [state.clocks[worker] for worker in sorted(state.clocks)]
        turn, _, left_out = passes_left(context.config, context.shards, entries, clocks, request.workers)
    before = replace(context.config, data=replace(context.config.data, batch_size=entries[-1].batch_size))
    per_epoch = before.steps_per_epoch(saved.rows), context.config.steps_per_epoch(saved.rows)
    return next_cohort(
        entries[-1],
        workers=request.workers,
        batch_size=request.batch_size,
        progress=CheckpointProgress(state.version, state.accepted, state.clocks),
        turn=turn,
        left_out=left_out,
        steps_per_epoch=per_epoch,
    )


def _check(config: Config, present: Cohort, request: Cohort) -> None:
    """Raise UsageError for a run whose workers cannot change.

    Args:
        config: the run.
        present: the cohort that the run has.
        request: the cohort that a start asks for.
    """
    name = config.exchange.name
    # Each of these keeps something per worker, or per pass of a worker, that cannot be divided anew.
    for is_given, reason in (
        (config.sampler.name != ShuffleSampler.name, f"--sampling {config.sampler.name} has no passes to divide anew"),
        (config.data.repartition != "fixed", f"--repartition {config.data.repartition} divides the rows by itself"),
        (bool(config.data.mix), "--mix has no passes over one set to divide anew"),
        (config.data.follow or config.data.generation is not None, "the set is of a stream, whose passes grow"),
        (isinstance(config.exchange, NeighbourExchange), f"--exchange {name} keeps a model per worker"),
        (bool(config.exchange.stages()), f"--exchange {name} plans its switch for one number of workers"),
        (bool(config.optimiser.tolerance), "--tolerance compares mini-batches of one number of workers"),
    ):
        if is_given:
            raise UsageError(
                f"{_words(request)} instead of {_words(present)}: {reason}; resume with --workers {present.workers}"
                f" --batch-size {present.batch_size}"
            )


def _words(cohort: Cohort) -> str:
    return f"--workers {cohort.workers} --batch-size {cohort.batch_size}"
