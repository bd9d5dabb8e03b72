"""A shard set from an assignment and its input: rows are written as a table says, without a fit.

A line is a row of the table, because the word row means a row of the input here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
from pyspark import SparkContext

from pipeline.assignment.ranks import split_by_key
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.damage import content_digest, damage_of
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.specs import option
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import names_dataframe, names_table
from pipeline.doctor.beforehand import check_inputs
from pipeline.input.assignment_table import AssignmentTable, open_table, read_lines
from pipeline.input.dataset import Dataset, results_or_error
from pipeline.output.tabled import LineCheck, TablePlacement, check_and_write_lines
from pipeline.runs.request import Request
from pipeline.runs.reshard import (
    ASSIGNED,
    keep_same_columns,
    read_strategy,
    refuse_other_manifests,
    resolved_params,
    stored_models,
)
from pipeline.runs.steps.commit import commit
from pipeline.runs.steps.current import define_goal, keep_committed, scan_unless_current
from pipeline.runs.steps.inputs import check_num_workers, discover_inputs
from pipeline.runs.steps.place import PlacedRows
from pipeline.runs.steps.run import ShardingResult, ShardingRun, open_run
from pipeline.runs.steps.write import check_models, copy_models, write_rows
from pipeline.spark.images import run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.source import ScannedInput
from pipeline.spark.store import open_store
from pipeline.strategies import Context, FitResult, Strategy


@dataclass(frozen=True)
class Tables(Strategy):
    """A placeholder for the strategy in the manifest of a set made from a user's table."""

    name: ClassVar[str] = ASSIGNED
    summary: ClassVar[str] = "the assignment of a table of (id, worker)"
    table: str = option("", "digest of the table's files")

    def fit(self, context: Context) -> FitResult:
        raise AssertionError("rows are placed by the table")


def materialize(
    context: SparkContext, request: Request, assignment: str, num_workers: int | None, progress: PhaseLog
) -> ShardingResult:
    """Write the shards that an assignment describes.

    With the assignment of a committed set, the files equal the output of the set's own job. The rows of the assignment
    go through one shuffle (32 bytes each); images are not shuffled.

    Args:
        context: runs the tasks.
        request: input and output; its number of workers is replaced.
        assignment: the path of a committed set, or of a table of (id, worker).
        num_workers: number of shards, or None for the number of workers in the assignment.
        progress: times the phases.

    Raises:
        UsageError: the request does not fit the assignment.
        DataError: the table lacks a row, repeats one, or belongs to other rows.
    """
    run = open_run(context, request, progress)
    with progress.phase("discover"):
        table = open_table(run.store, assignment)
        check_inputs(context, run.store, {"--assignment": table.uri})
        if table.made_by:
            refuse_other_manifests(table.made_by)
            run = replace(run, request=keep_same_columns(run.request, table.made_by))
        inputs = discover_inputs(run)
        workers = _num_workers(context, table, num_workers, allow_empty=request.allow_empty)
        run = replace(run, request=replace(run.request, num_workers=workers, ratios=_ratios(table)))
        progress.report(
            f"{inputs.dataset.rows:,} rows for {workers} workers by {len(table.files)} files of {table.uri}"
        )
    if num_workers is None:
        refuse_gaps(table, workers, inputs.dataset)
    check_num_workers(run.request, inputs.dataset)
    goal = define_goal(run, _strategy(context, table), inputs)
    scans = scan_unless_current(run, goal)
    if scans is None:
        return keep_committed(run, goal)
    check_models(run.store, stored_models(table.made_by))
    # Whatever fails from here on, the end of the attempt deletes its files.
    with Attempt(run.store, run.request.output) as attempt:
        if table.made_by:
            check_rows(context, table.made_by, scans.source)
        placed_rows = place_by_table(run, table, scans.source, attempt.folder)
        written_set = write_rows(run, scans, placed_rows, attempt.folder)
        with progress.phase("commit"):
            models = copy_models(run.store, stored_models(table.made_by), attempt.folder)
            return commit(run, goal, attempt, written_set, models)


def with_id_column(context: SparkContext, request: Request, assignment: str) -> Request:
    """Return the request with the id column of the assignment's own table, if it reads a table and names no column.

    Args:
        context: has the settings of the store.
        request: input and output.
        assignment: the path of a committed set, or of a table of (id, worker).

    Raises:
        UsageError: the request names another column than the one that gave the ids of the same table.
        DataError: there is no such assignment.
    """
    if all(uri is None or not names_table(uri) for uri in (request.input, request.eval_input)):
        return request
    made_by = open_table(open_store(context), assignment).made_by
    if made_by is None:
        return request
    manifest = made_by.manifest
    origin = manifest.input
    # Only the evaluation rows may be a table's.
    column = origin.id_column or (manifest.evaluation.input.id_column if manifest.evaluation else None)
    # Any two DataFrames have one address, and may have other names for one column.
    is_same = request.input == origin.uri and not names_dataframe(origin.uri)
    if is_same and None not in (request.id_column, origin.id_column) and request.id_column != origin.id_column:
        raise UsageError(
            f"--id-column {request.id_column}: {made_by.uri} assigns the rows of {origin.uri} in the order of"
            f" {origin.id_column}; leave it out"
        )
    return replace(request, id_column=request.id_column or column)


def _strategy(context: SparkContext, table: AssignmentTable) -> Strategy:
    """Return the strategy that the manifest names as the origin of the assignment."""
    if not table.made_by:
        return Tables(table=content_digest(table.store, table.files, run_on(context)))
    manifest = table.made_by.manifest
    return Tables(**manifest.asked) if manifest.strategy == ASSIGNED else read_strategy(table.made_by)


def _ratios(table: AssignmentTable) -> tuple[int, ...] | None:
    ratios = table.made_by.manifest.ratios if table.made_by else None
    return tuple(ratios) if ratios else None


def _num_workers(context: SparkContext, table: AssignmentTable, requested: int | None, *, allow_empty: bool) -> int:
    """Return the number of workers of the assignment. The files of a table are read for it only if no number is
    requested.

    Raises UsageError if a committed set has another number than requested, and DataError for a table that numbers
    workers from 1.

    Args:
        context: runs the tasks.
        table: the assignment.
        requested: the requested number, or None.
        allow_empty: accept a table without worker 0.
    """
    if table.made_by:
        set_workers = table.made_by.num_workers
        if requested not in (None, set_workers):
            raise UsageError(
                f"{table.uri} assigns {set_workers} workers, not {requested};"
                " sharding reshard changes the number of workers of a set"
            )
        return set_workers
    if requested is not None:
        return requested
    ranges_or_errors = run_on(context)(partial(_worker_range, table.store), table.files)
    ranges = [each for each in results_or_error(ranges_or_errors) if each]
    lowest = min((low for low, _ in ranges), default=0)
    highest = max((high for _, high in ranges), default=0)
    # Numbers from 1 would leave worker 0 empty.
    if lowest > 0 and not allow_empty:
        raise DataError(
            f"{table.uri} names workers {lowest} to {highest} and no worker 0; number them from 0, or pass --allow-empty"
        )
    return highest + 1


def _worker_range(store: Store, path: str) -> tuple[int, int] | str | None:
    """Return the lowest and highest worker of a file, None if it has no lines, or an error text if it is broken."""
    try:
        ranges = [(int(lines[1].min()), int(lines[1].max())) for lines in read_lines(store, path) if lines.size]
    except DataError as error:
        return str(error)
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def refuse_gaps(table: AssignmentTable, num_workers: int, dataset: Dataset) -> None:
    """Raise DataError if a user's table numbers workers with gaps, which would make many empty workers."""
    if not table.made_by and num_workers > dataset.rows:
        raise DataError(
            f"{table.uri} names worker {num_workers - 1}, and there are {dataset.rows} rows; number them from 0"
        )


def place_by_table(run: ShardingRun, table: AssignmentTable, source: ScannedInput, staging: str) -> PlacedRows:
    """Sort and check the rows of the table, and return the placement. Raises DataError.

    Args:
        run: configuration of the run.
        table: the assignment.
        source: the scanned input.
        staging: the attempt's folder, where tasks keep the table's rows of every chunk.
    """
    num_workers = run.request.num_workers
    with run.progress.phase("assign"):
        checks = _check_and_keep_lines(run.context, table, source.bounds, f"{staging}/groups", num_workers)
        paths = tuple(each.path for each in checks)
        copies = sum(each.copies for each in checks)
        run.progress.report(f"{source.scan.rows + copies:,} lines, {copies:,} of them copies")
    # A user's table has no manifest, so neither parameters nor neighbourhoods.
    if not table.made_by:
        return PlacedRows(TablePlacement(table.store, paths, num_workers, neighbourhoods=False), copies, {})
    manifest = table.made_by.manifest
    histograms = [worker.neighbourhood_histogram for worker in manifest.workers]
    return PlacedRows(
        TablePlacement(table.store, paths, num_workers, neighbourhoods=manifest.neighbourhoods is not None),
        copies,
        resolved_params(manifest),
        manifest.neighbourhoods,
        np.array(histograms, np.int64) if histograms[0] is not None else None,
    )


def check_rows(context: SparkContext, shards: ShardSet, source: ScannedInput) -> None:
    """Raise DataError if an assignment is damaged, or was made for other rows."""
    made_for = shards.manifest.input.fingerprint
    if made_for != source.fingerprint():
        raise DataError(
            f"{shards.uri} assigns other rows ({made_for}) than {source.dataset.uri} has ({source.fingerprint()});"
            f" it was made for {shards.manifest.input.uri}"
        )
    # With other kept columns the sums of both cannot be compared.
    has_same_columns = shards.manifest.columns == list(source.dataset.layout.attributes)
    if shards.manifest.group_by and has_same_columns and shards.manifest.input.attributes != source.attributes():
        raise DataError(
            f"{shards.uri} keeps the rows of a {shards.manifest.group_by} together, and the kept columns of"
            f" {source.dataset.uri} have changed since: make the assignment again"
        )
    damage = run_on(context)(partial(damage_of, shards.store, shards.uri), shards.assignment_files())
    if problem := next(filter(None, damage), None):
        raise DataError(f"{problem}; the set is damaged")


def _check_and_keep_lines(
    context: SparkContext, table: AssignmentTable, bounds: list[tuple[int, int]], scratch: str, num_workers: int
) -> list[LineCheck]:
    """Return the check of each chunk's lines, which are sorted and written to files. Raises DataError with the first
    problem.

    Args:
        context: runs the tasks.
        table: the assignment.
        bounds: the id range (first, end) of each chunk.
        scratch: folder for the files of lines.
        num_workers: number of shards.
    """
    store = table.store
    uri = table.uri
    rows = bounds[-1][1]
    starts = np.array([low for low, _ in bounds], np.int64)

    def lines_by_chunk(path: str) -> Iterator[tuple[int, Ints | str]]:
        """Yield the lines of a file, int64 [4, lines], by the number of their chunk, or its problem as text under chunk
        0."""
        try:
            for lines in read_lines(store, path):
                if len(beyond := np.flatnonzero(lines[0] >= rows)):
                    raise DataError(f"{path}: id {lines[0][beyond[0]]} is not one of the rows 0..{rows - 1}")
                for chunk, places in split_by_key(np.searchsorted(starts, lines[0], side="right") - 1):
                    yield chunk, lines[:, places]
        except DataError as error:
            yield 0, str(error)

    def keep(chunk: int, groups: Iterable[tuple[int, Iterable[Ints | str]]]) -> Iterator[LineCheck]:
        """Check and write the lines of one chunk, and yield the result.

        Partition i of the shuffle holds chunk i alone. groups: at most one pair of the chunk and all of its values,
        which are lines, int64 [4, lines], or error texts of files."""
        parts = [part for _, all_parts in groups for part in all_parts]
        if problems := [part for part in parts if isinstance(part, str)]:
            yield LineCheck(problem=min(problems))
            return
        lines = [part for part in parts if not isinstance(part, str)]
        check = check_and_write_lines(store, scratch, lines, bounds[chunk], num_workers)
        yield replace(check, problem=check.problem and f"{uri}: {check.problem}")

    # A table can be in any order: a shuffle brings the rows of each chunk to one task.
    table_parts = context.parallelize(table.files, min(len(table.files), 10_000)).flatMap(lines_by_chunk)
    checks = table_parts.groupByKey(len(bounds), lambda chunk: chunk).mapPartitionsWithIndex(keep).collect()
    if problem := next((each.problem for each in checks if each.problem), None):
        raise DataError(problem)
    return checks
