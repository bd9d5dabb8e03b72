"""Resharding of a committed set from N to M workers: its neighbourhoods are dealt again, not fitted again."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

from pyspark import SparkContext

from pipeline.assignment.chunks import ChunkCounts, count_by_chunk, sum_counts
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.generations import STREAM_STATE, name_of_model
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.shardset.versions import NAME
from pipeline.doctor.beforehand import check_inputs
from pipeline.input.committed import CommittedDataset, committed_dataset
from pipeline.input.dataset import Dataset
from pipeline.input.formats import DataFile
from pipeline.runs.request import Request, grouped_by
from pipeline.runs.steps.bundle import place_rows
from pipeline.runs.steps.commit import commit
from pipeline.runs.steps.current import define_goal, keep_committed, scan_unless_current
from pipeline.runs.steps.inputs import Inputs, check_num_workers
from pipeline.runs.steps.place import fitting_context
from pipeline.runs.steps.run import ShardingResult, ShardingRun, open_run
from pipeline.runs.steps.write import check_models, copy_models, write_rows
from pipeline.spark.images import Images, run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.source import ScannedInput
from pipeline.strategies import STRATEGIES, Context, FitResult, Strategy
from pipeline.strategies.base import StoredGroups

# The keys that the manifest of any set sharded from an input has.
NEEDED = ("strategy", "asked", "params", "seed", "input", "eval", "model", "neighbourhoods")
ASSIGNED = "assigned"  # the strategy of a set whose rows were placed by a table


def reshard(context: SparkContext, request: Request, progress: PhaseLog) -> ShardingResult:
    """Deal a committed set to another number of workers.

    The result equals, file for file, the output of the original job for that number. Neighbourhoods do not depend on
    the number of workers; a strategy without neighbourhoods is fitted again. Raises DataError for a damaged set."""
    run = open_run(context, request, progress)
    with progress.phase("discover"):
        shards = open_committed(run.store, run.request.input)
        check_inputs(context, run.store, {"--input": run.request.input})
        refuse_other_manifests(shards)
        strategy = read_strategy(shards)
        run = replace(run, request=keep_same_columns(run.request, shards))
        dataset = committed_dataset(shards)
        progress.report(f"{dataset.rows:,} rows of {strategy.name} for {shards.num_workers} workers")
    check_num_workers(run.request, dataset)
    goal = define_goal(run, strategy, Inputs(dataset, evaluation_rows(shards, dataset)))
    scans = scan_unless_current(run, goal)
    if scans is None:
        return keep_committed(run, goal)
    check_models(run.store, stored_models(shards))
    # Whatever fails from here on, the end of the attempt deletes its files.
    with Attempt(run.store, run.request.output) as attempt:
        refuse_other_rows(shards, scans.source)
        fit_result = refit(run, shards, strategy, dataset, fitting_context(run, scans.source, attempt.folder))
        placed_rows = place_rows(run, scans.source, fit_result, strategy, stored=True)
        written_set = write_rows(run, scans, placed_rows, attempt.folder)
        with progress.phase("commit"):
            models = copy_models(run.store, stored_models(shards), attempt.folder)
            return commit(run, goal, attempt, written_set, models)


def evaluation_rows(shards: ShardSet, dataset: Dataset) -> Dataset | None:
    """Return the evaluation rows of a set, or None. They are read from the set: the original input is not needed."""
    if not (files_of_set := shards.eval_files()):
        return None
    # The columns of a set have its own names, whatever the input's were.
    label = "label" if dataset.layout.labelled else ""
    files = tuple(
        DataFile(f"{shards.uri}/{file.path}", file.bytes, 0, file.rows, image_column="image", label_column=label)
        for file in files_of_set
    )
    return Dataset(shards.store, f"{shards.uri}/_eval", "parquet", files, replace(dataset.layout, attributes=()))


def refit(
    run: ShardingRun, shards: ShardSet, strategy: Strategy, dataset: CommittedDataset, fitting: Context
) -> FitResult:
    """Return the groups of a committed set, or the result of a new fit if the set stores none.

    Args:
        run: configuration of the run.
        shards: the set.
        strategy: the strategy that made it.
        dataset: its rows.
        fitting: inputs and tools of the fit.
    """
    strategy.check_ratios(run.request.ratios)
    if not dataset.neighbourhoods:
        return strategy.with_source_digest(run.store, run_on(run.context)).fit(fitting)
    with run.progress.phase("assign"):
        counts = neighbourhood_counts(run.context, dataset, len(shards.manifest.neighbourhoods or ()), fitting.bounds)
    return strategy.refit(fitting, StoredGroups(counts, resolved_params(shards.manifest)))


def refuse_other_rows(shards: ShardSet, source: ScannedInput) -> None:
    """Raise DataError if the rows of a set, or their kept columns, are not the ones that its manifest describes."""
    described = shards.manifest.input
    for actual, expected, part in (
        (source.fingerprint(), described.fingerprint, "rows"),
        (source.attributes(), described.attributes, "kept columns"),
    ):
        if actual != expected:
            raise DataError(f"{shards.uri}: its {part} ({actual}) differ from its manifest's; the set is damaged")


def refuse_other_manifests(shards: ShardSet) -> None:
    """Raise DataError if a manifest lacks a key that resharding needs."""
    missing = next((key for key in NEEDED if key in shards.manifest.absent), None)
    if missing or shards.manifest.input.fingerprint is None:
        raise DataError(f"{shards.uri}/{NAME} is damaged: it lacks {missing or 'input.fingerprint'}; restore it")


def keep_same_columns(request: Request, shards: ShardSet) -> Request:
    """Return the request with a set's column of bundles and its kept columns, unless it names columns of its own."""
    columns = request.read_options.columns or tuple(column.name for column in shards.manifest.columns)
    options = replace(request.read_options, columns=columns)
    # Bundles need their column in any case, or the new set could not be resharded.
    return grouped_by(replace(request, read_options=options), shards.manifest.group_by)


def resolved_params(manifest: Manifest) -> dict[str, Any]:
    """Return the parameters that the fit of a set decided, including those that replace requested values."""
    flags = manifest.asked
    return {key: value for key, value in manifest.params.items() if key not in flags or flags[key] != value}


def stored_models(shards: ShardSet | None) -> tuple[tuple[str, str], ...]:
    """Return the files of a set's fitted models, or none without a set: (current path, path under _model).

    The counters of a stream are left out: it may delete them meanwhile, and a set that does not grow needs none."""
    if shards is None:
        return ()
    names = [(path, name_of_model(path)) for path in shards.manifest.model or ()]
    return tuple((f"{shards.uri}/{path}", name) for path, name in names if not name.startswith(f"{STREAM_STATE}/"))


def read_strategy(shards: ShardSet) -> Strategy:
    """Return the strategy with its configuration from the manifest. Raises DataError."""
    manifest = shards.manifest
    if manifest.strategy == ASSIGNED:
        raise DataError(f"{shards.uri} was made from a table of workers; make another with sharding materialize")
    kind = STRATEGIES.get(manifest.strategy)
    if kind is None:
        raise DataError(
            f"{shards.uri} was made by {manifest.strategy!r}, which this version does not know; register a strategy of your"
            " own first"
        )
    # Parameters that this version of the strategy does not have are ignored.
    field_names = {field.name for field in fields(kind)} - {"seed"}
    params = {key: value for key, value in manifest.asked.items() if key in field_names}
    try:
        return build(kind, params | {"seed": manifest.seed})
    except (ValueError, UsageError) as error:
        raise DataError(f"{shards.uri}/{NAME} is damaged: asked: {error}; restore it") from None


def neighbourhood_counts(
    context: SparkContext, dataset: CommittedDataset, groups: int, bounds: list[tuple[int, int]]
) -> Ints:
    """Return the rows by (chunk, neighbourhood), int64 [chunks, neighbourhoods]. Images are not read.

    Args:
        context: runs the tasks.
        dataset: the rows of the committed set.
        groups: number of neighbourhoods.
        bounds: the id range (first, end) of each chunk.
    """

    def count(piece: tuple[int, int]) -> ChunkCounts:
        """Return the counts of the rows of one task."""
        block_counts = []
        for block in dataset.read(*piece, images=False):
            block_counts.append(count_by_chunk(block.ids, block.neighbourhoods, groups, bounds))
        return reduce(add, block_counts)

    return sum_counts(run_on(context)(count, Images(context, dataset).pieces()), len(bounds), groups)
