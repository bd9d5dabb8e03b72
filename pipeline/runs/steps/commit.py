"""The last steps: describe the set in its manifest, and commit it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from pipeline.core.errors import DataError
from pipeline.core.provenance import provenance
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import Move, publish, refuse_unless
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet, read_committed
from pipeline.core.shardset.parts import Evaluation, Input, Worker
from pipeline.core.storage.retries import with_retries
from pipeline.input.quarantine import (
    QuarantineChange,
    count_records,
    lines_of,
    path_of,
    repeat_quarantine,
    restore_quarantine,
    write_quarantine,
)
from pipeline.output.entries import (
    describe_assigned_workers,
    describe_assignment,
    describe_eval,
    describe_image,
    describe_labels,
    describe_workers,
    library_versions,
)
from pipeline.runs.steps.current import SetGoal, is_current
from pipeline.runs.steps.run import ShardingResult, ShardingRun
from pipeline.runs.steps.write import WrittenSet
from pipeline.spark.source import ScannedInput
from pipeline.spark.tables import ID_COLUMN
from pipeline.strategies.checks import check_shares


def describe_set(run: ShardingRun, goal: SetGoal, written_set: WrittenSet, models: list[Move]) -> Manifest:
    """Return the manifest of a written set, whose paths carry no stamps yet. models: the files of fitted models."""
    strategy = goal.strategy
    request = run.request
    source = written_set.inputs.source
    placed_rows = written_set.placed_rows
    # The paths get their stamps when the number of the version is known, in the commit.
    return Manifest(
        strategy=strategy.name,
        params={**strategy.params(), **placed_rows.params},
        asked=strategy.params(),
        seed=strategy.seed,
        num_workers=request.num_workers,
        ratios=list(request.ratios) if request.ratios else None,
        group_by=request.group_by,
        rows=source.scan.rows,
        copies=placed_rows.copies,
        interval=request.interval,
        input=replace(_describe_input(run, source), quarantined=written_set.inputs.quarantined),
        image=describe_image(source),
        labels=describe_labels(source),
        columns=list(source.dataset.layout.attributes),
        chunks=[list(part) for part in source.parts],
        workers=_describe_workers(run, written_set, strategy.name),
        neighbourhoods=placed_rows.neighbourhoods,
        evaluation=_describe_eval(run, written_set),
        repeats=written_set.inputs.repeats,
        model=[path for _, path in models] or None,
        assignment=describe_assignment(written_set.rows.assignment),
        assignment_only=request.assignment_only,
        identity=goal.identity,
        seconds=dict(run.progress.seconds),
        versions=library_versions(),
        made={**provenance(), "master": str(run.context.master)},
    )


def _describe_input(run: ShardingRun, source: ScannedInput) -> Input:
    """Return the manifest's entry of an input, with the id column of a table."""
    request = run.request
    is_table = source.dataset.uri in request.tables.values()
    return replace(source.describe(), id_column=(request.id_column or ID_COLUMN) if is_table else None)


def _describe_workers(run: ShardingRun, written_set: WrittenSet, strategy: str) -> list[Worker]:
    """Return the manifest's entry of every worker; without files after --assignment-only.

    Raises JobError if their rows are not those that the strategy has counted."""
    allowed = run.request.allow_empty
    histogram = written_set.placed_rows.histogram
    if written_set.rows.tally:
        workers = describe_assigned_workers(written_set.rows.tally, allowed, histogram)
    else:
        num_classes = written_set.inputs.source.scan.num_classes
        chunks = written_set.rows.chunks
        workers = describe_workers(chunks, run.request.num_workers, num_classes, allowed, histogram)
    check_shares(workers, histogram, strategy)
    return workers


def _describe_eval(run: ShardingRun, written_set: WrittenSet) -> Evaluation | None:
    """Return the manifest's entry of the evaluation rows, or None without any."""
    evaluation = written_set.inputs.evaluation
    if not evaluation:
        return None
    chunks = written_set.evaluation.chunks if written_set.evaluation else []
    num_classes = written_set.inputs.source.scan.num_classes
    return describe_eval(evaluation, chunks, _describe_input(run, evaluation), num_classes)


def commit(
    run: ShardingRun, goal: SetGoal, attempt: Attempt, written_set: WrittenSet, models: list[Move]
) -> ShardingResult:
    """Move the files of an attempt to their places and commit the manifest of the set.

    A set that another run has committed meanwhile is returned if it is the goal, too.

    Args:
        run: configuration of the run.
        goal: the set to commit.
        attempt: the claim of this run.
        written_set: the rows of the set.
        models: current path and unstamped path under OUTPUT of the files of fitted models.

    Raises:
        UsageError: another run has committed another set meanwhile, and --overwrite is not set.
        JobError: another run considered this one dead and deleted its files.
    """

    def supersedes(other: ShardSet) -> bool:
        """Return False for a set that is the goal, and True for another one that --overwrite replaces.

        Raises UsageError for another set without --overwrite."""
        if is_current(run, goal, other, written_set.inputs):
            return False
        refuse_unless(run.request.overwrite, other, "run, committed while this one worked")
        return True

    manifest = describe_set(run, goal, written_set, models)
    # Before the commit, so that no committed set lacks its list, and again after it if another job has changed the list
    # meanwhile. If the run is killed before the commit, its list stands beside the old set until it is run again.
    list_path = path_of(run.request.output, 0)
    change = write_quarantine(run.store, list_path, lines_of(written_set.inputs.bad_records))
    try:
        committed = publish(attempt, manifest, written_set.moves() + models, before=goal.before, supersedes=supersedes)
    except BaseException:
        # The set that stays gets its own list back. Not if the store does not tell which set that is.
        with suppress(OSError, DataError):
            _settle_list(run, goal, attempt, change)
        raise
    is_fresh = committed.manifest.generation.endswith(attempt.id)
    if is_fresh:
        with_retries(repeat_quarantine)(run.store, list_path, change)
    return ShardingResult(committed, is_fresh)


def _settle_list(run: ShardingRun, goal: SetGoal, attempt: Attempt, change: QuarantineChange) -> None:
    """Restore the list of bad records unless this run's set is the committed one. change: made by this run.

    Raises OSError and DataError if the committed set cannot be read."""
    path = path_of(run.request.output, 0)
    committed = read_committed(run.store, run.request.output)
    if committed and committed.manifest.generation.endswith(attempt.id):
        repeat_quarantine(run.store, path, change)
        return
    # Another job that has committed meanwhile either wrote its list earlier, which is restored, or it wrote a list of the
    # same content afterwards, as for the same input. Then the list before this run's is not its own, or there was none.
    if committed and committed != goal.before:
        expected = committed.manifest.input.quarantined
        before, after = count_records(change.before), count_records(change.after)
        if expected and (not change.before or before != after == expected):
            return
    restore_quarantine(run.store, path, change)
