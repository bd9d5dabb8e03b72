"""Resharding of a committed set from N to M workers: its neighbourhoods are dealt again, not fitted again."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from pyspark import SparkContext

from pipeline.assignment.chunks import ChunkCounts, all_counts, count_by_chunk
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.shardset.versions import NAME
from pipeline.doctor.beforehand import check_inputs
from pipeline.input.committed import CommittedDataset, committed_dataset
from pipeline.input.dataset import Dataset
from pipeline.input.formats import DataFile
from pipeline.input.scan import Scan
from pipeline.runs.request import Request, check_output
from pipeline.runs.shard import ShardingResult, ShardingRun, check_num_workers
from pipeline.spark.images import Images, run_on
from pipeline.spark.progress import PhaseLog
from pipeline.spark.store import open_store
from pipeline.strategies import STRATEGIES, Context, Fitted, Strategy
from pipeline.strategies.base import StoredGroups

# The keys that the manifest of any set sharded from an input has.
NEEDED = ("strategy", "asked", "params", "seed", "input", "eval", "model", "neighbourhoods")
ASSIGNED = "assigned"  # the strategy of a set whose rows were placed by a table


def reshard(context: SparkContext, request: Request, progress: PhaseLog) -> ShardingResult:
    """Deal a committed set to another number of workers.

    The result equals, file for file, the output of the original job for that number. Neighbourhoods do not depend on
    the number of workers; a strategy without neighbourhoods is fitted again. Raises DataError for a damaged set."""
    store = open_store(context)
    output = check_output(store, request)
    with progress.phase("discover"):
        shards = open_committed(store, request.input)
        check_inputs(context, store, {"--input": request.input})
        refuse_other_manifests(shards)
        strategy = read_strategy(shards)
        dataset = committed_dataset(shards)
        # Evaluation rows are read from the set, too: the original input is not needed.
        beside = None
        if listed := shards.eval_files():
            files = tuple(DataFile(f"{shards.uri}/{file.path}", file.bytes, 0, file.rows) for file in listed)
            beside = Dataset(store, f"{shards.uri}/_eval", "parquet", files, dataset.layout)
        progress.report(f"{dataset.rows:,} rows of {strategy.name} for {shards.num_workers} workers")
    check_num_workers(request, dataset)

    def refit(fitting: Context) -> Fitted:
        refuse_other_rows(shards, fitting.scan)
        if not dataset.neighbourhoods:
            return strategy.prepared(store, run_on(context)).fit(fitting)
        with progress.phase("assign"):
            counts = neighbourhood_counts(context, dataset, len(shards.manifest.neighbourhoods or ()), fitting.bounds)
        return strategy.refit(fitting, StoredGroups(counts, resolved_params(shards.manifest)))

    return ShardingRun(
        context, request, strategy, progress, store, output, dataset, beside, fit=refit, models=carried_models(shards)
    ).carry_out()


def refuse_other_rows(shards: ShardSet, scan: Scan) -> None:
    """Raise DataError if the rows of a set are not the ones that its manifest describes."""
    fingerprint = f"{scan.rows}-{scan.fingerprint:016x}"
    if fingerprint != shards.manifest.input.fingerprint:
        raise DataError(f"{shards.uri}: its rows ({fingerprint}) are not those of its manifest; the set is damaged")


def refuse_other_manifests(shards: ShardSet) -> None:
    """Raise DataError if a manifest lacks a key that resharding needs."""
    missing = next((key for key in NEEDED if key in shards.manifest.absent), None)
    if missing or shards.manifest.input.fingerprint is None:
        raise DataError(f"{shards.uri}/{NAME} is damaged: it lacks {missing or 'input.fingerprint'}; restore it")


def resolved_params(manifest: Manifest) -> dict[str, Any]:
    """Return the parameters that the fit of a set decided, including those that replace requested values."""
    asked = manifest.asked
    return {key: value for key, value in manifest.params.items() if key not in asked or asked[key] != value}


def carried_models(shards: ShardSet) -> tuple[tuple[str, str], ...]:
    """Return the files of a set's fitted models: (current path, path under _model)."""
    return tuple((f"{shards.uri}/{path}", path.split("/", 2)[2]) for path in shards.manifest.model or ())


def read_strategy(shards: ShardSet) -> Strategy:
    """Return the strategy with its configuration from the manifest. Raises DataError."""
    manifest = shards.manifest
    kind = STRATEGIES.get(manifest.strategy)
    if kind is None:
        raise DataError(
            f"{shards.uri} was made by {manifest.strategy!r}, which this version does not know"
            if manifest.strategy != ASSIGNED
            else f"{shards.uri} was made from a table of workers; make another with jobs/materialize.py"
        )
    # Parameters that this version of the strategy does not have are ignored.
    known = {field.name for field in fields(kind)} - {"seed"}
    params = {key: value for key, value in manifest.asked.items() if key in known}
    try:
        return build(kind, params | {"seed": manifest.seed})
    except (ValueError, UsageError) as error:
        raise DataError(f"{shards.uri}/{NAME} is damaged: asked: {error}; restore it") from None


def neighbourhood_counts(
    context: SparkContext, dataset: CommittedDataset, groups: int, bounds: list[tuple[int, int]]
) -> Ints:
    """Return the rows by (chunk, neighbourhood), int64 [chunks, neighbourhoods], read from the narrow columns alone."""

    def count(piece: tuple[int, int]) -> ChunkCounts:
        found = []
        for block in dataset.read(*piece, images=False):
            near = block.columns.neighbourhoods
            assert near is not None
            found.append(count_by_chunk(block.ids, near.astype(np.int64), groups, bounds))
        return reduce(add, found)

    return all_counts(run_on(context)(count, Images(context, dataset).pieces()), len(bounds), groups)
