"""From N to M workers out of a committed set: its neighbourhoods dealt again, not fitted again."""

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
from pipeline.core.shardset.manifest import ShardFile, ShardSet, open_committed
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

# What a manifest has of any set that was sharded from an input.
NEEDED = ("strategy", "asked", "params", "seed", "input", "eval", "model", "neighbourhoods")
ASSIGNED = "assigned"  # in the place of a strategy: rows that a table has placed


def reshard(context: SparkContext, request: Request, progress: PhaseLog) -> ShardingResult:
    """Deal a committed set to another number of workers. The result is, file for file, what the original job would
    write for that number. Neighbourhoods do not depend on it; a strategy without them looks at the rows again. Raises
    DataError for a damaged set."""
    store = open_store(context)
    output = check_output(store, request)
    with progress.phase("discover"):
        shards = open_committed(store, request.input)
        check_inputs(context, store, {"--input": request.input})
        refuse_other_manifests(shards)
        strategy = read_strategy(shards)
        dataset = committed_dataset(shards)
        beside = None
        if shards.manifest["eval"]:
            listed = [ShardFile.from_json(file) for file in shards.manifest["eval"]["files"]]
            files = tuple(DataFile(f"{shards.uri}/{file.path}", file.bytes, 0, file.rows) for file in listed)
            beside = Dataset(store, f"{shards.uri}/_eval", "parquet", files, dataset.layout)
        progress.report(f"{dataset.rows:,} rows of {strategy.name} for {shards.num_workers} workers")
    check_num_workers(request, dataset)

    def refit(fitting: Context) -> Fitted:
        refuse_other_rows(shards, fitting.scan)
        if not dataset.neighbourhoods:
            return strategy.prepared(store, run_on(context)).fit(fitting)
        with progress.phase("assign"):
            counts = neighbourhood_counts(context, dataset, len(shards.manifest["neighbourhoods"]), fitting.bounds)
        return strategy.refit(fitting, StoredGroups(counts, resolved_params(shards.manifest)))

    return ShardingRun(
        context, request, strategy, progress, store, output, dataset, beside, fit=refit, models=carried_models(shards)
    ).carry_out()


def refuse_other_rows(shards: ShardSet, scan: Scan) -> None:
    """Raise DataError where the rows of a set are not those that its manifest was written for."""
    fingerprint = f"{scan.rows}-{scan.fingerprint:016x}"
    if fingerprint != shards.manifest["input"]["fingerprint"]:
        raise DataError(f"{shards.uri}: its rows ({fingerprint}) are not those of its manifest; the set is damaged")


def refuse_other_manifests(shards: ShardSet) -> None:
    """Raise DataError where a manifest lacks what a set is dealt again by."""
    missing = next((key for key in NEEDED if key not in shards.manifest), None)
    if missing or "fingerprint" not in shards.manifest["input"]:
        raise DataError(f"{shards.uri}/{NAME} is damaged: it lacks {missing or 'input.fingerprint'}; restore it")


def resolved_params(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the fit of a set has resolved, beside or instead of what was asked for."""
    asked = manifest["asked"]
    return {key: value for key, value in manifest["params"].items() if key not in asked or asked[key] != value}


def carried_models(shards: ShardSet) -> tuple[tuple[str, str], ...]:
    """The files of a set's fitted models: (where, path under _model)."""
    files = shards.manifest["model"]["files"] if shards.manifest["model"] else []
    return tuple((f"{shards.uri}/{file['path']}", file["path"].split("/", 2)[2]) for file in files)


def read_strategy(shards: ShardSet) -> Strategy:
    """The strategy as it was configured, from the manifest."""
    manifest = shards.manifest
    kind = STRATEGIES.get(manifest["strategy"])
    if kind is None:
        raise DataError(
            f"{shards.uri} was made by {manifest['strategy']!r}, which this version does not know"
            if manifest["strategy"] != ASSIGNED
            else f"{shards.uri} was made from a table of workers; make another with jobs/materialize.py"
        )
    known = {field.name for field in fields(kind)} - {"seed"}
    params = {key: value for key, value in manifest["asked"].items() if key in known}
    try:
        return build(kind, params | {"seed": manifest["seed"]})
    except (ValueError, UsageError) as error:
        raise DataError(f"{shards.uri}/{NAME} is damaged: asked: {error}; restore it") from None


def neighbourhood_counts(
    context: SparkContext, dataset: CommittedDataset, groups: int, bounds: list[tuple[int, int]]
) -> Ints:
    """Rows by (chunk, neighbourhood), from the narrow columns alone."""

    def count(piece: tuple[int, int]) -> ChunkCounts:
        found = []
        for block in dataset.read(*piece, images=False):
            near = block.columns.neighbourhoods
            assert near is not None
            found.append(count_by_chunk(block.ids, near.astype(np.int64), groups, bounds))
        return reduce(add, found)

    return all_counts(run_on(context)(count, Images(context, dataset).pieces()), len(bounds), groups)
