"""The step that keeps rows with the same value of a column at one worker, whatever the strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from pyspark import RDD

from pipeline.assignment.bundles import MOST_CELLS, BundleCells, count_cells, merge_cells, place_bundles
from pipeline.assignment.groups import GroupTable, check_copies, group_table
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.input.dataset import Dataset, results_or_error
from pipeline.input.formats.tables.columns import first_true
from pipeline.output.entries import describe_neighbourhoods
from pipeline.output.placement import BundledDealing, Dealing, bundle_keys
from pipeline.runs.request import Request
from pipeline.runs.steps.place import MOST_SHARES, PlacedRows, deal
from pipeline.runs.steps.run import ShardingRun
from pipeline.spark.source import ScannedInput
from pipeline.strategies import FitResult, Strategy
from pipeline.strategies.base import deals_counts
from pipeline.strategies.checks import check_fit

BLOCKS_AT_ONCE = 512  # blocks of 2,048 rows whose cells a task merges at once


def check_bundles(request: Request, dataset: Dataset) -> None:
    """Raise UsageError if the rows do not have the column of the bundles."""
    has = {"label": dataset.layout.labelled, "coarse_label": bool(dataset.layout.coarse)}
    if request.group_by and not has.get(request.group_by, True):
        raise UsageError(f"{dataset.uri} has no column {request.group_by} to keep rows together by; name another one")


def place_rows(
    run: ShardingRun, source: ScannedInput, fit_result: FitResult, strategy: Strategy, *, stored: bool = False
) -> PlacedRows:
    """Deal the groups of a fit to workers, row by row, or bundle by bundle if the request groups rows by a column.

    With bundles nothing is copied, because a copied row would part its bundle. Raises UnsuitableError if copies would
    more than double the rows, JobError if the fit does not fit the rows.

    stored: whether the groups are those of a committed set, which the options of this run cannot change."""
    check_fit(fit_result, strategy.name, source.bounds)
    request = run.request
    if request.group_by is None:
        groups = group_table(fit_result.counts.sum(axis=0), request.num_workers, sparse_if=fit_result.sparse_if)
        if stored:
            remedies = f"fewer workers, or shard the input again with {strategy.larger_groups} or --sparse-if never"
        else:
            remedies = f"fewer workers, {strategy.larger_groups}, or --sparse-if never"
        check_copies(groups.copies, source.scan.rows, remedies)
        return deal(fit_result, request.num_workers, request.ratios)
    placed_rows = deal(replace(fit_result, sparse_if="never"), request.num_workers, request.ratios)
    dealing = placed_rows.placement
    assert isinstance(dealing, Dealing), "made by deal"
    with run.progress.phase("bundle"):
        bundles = place_bundles(
            collect_cells(run, source, dealing, request.group_by),
            targets(dealing.table, fit_result, request.num_workers),
            strategy.bundle_order,
            strategy.seed if strategy.uses_seed() else 0,
        )
        largest = int(bundles.sizes.max())
        run.progress.report(f"{len(bundles.keys):,} values of {request.group_by}, of at most {largest:,} rows")
    # The strategy's own groups stay in the manifest; only their division among the workers is another.
    near = dealing.grouping.neighbourhoods
    return PlacedRows(
        BundledDealing(dealing.grouping, request.group_by, bundles.keys, bundles.owners, request.num_workers),
        0,
        {**placed_rows.params, "bundles": len(bundles.keys), "largest_bundle": largest},
        describe_neighbourhoods(dealing.table) if near else None,
        bundles.table.T if placed_rows.histogram is not None else None,
        np.bincount(bundles.owners, bundles.sizes, request.num_workers).astype(np.int64),
    )


def targets(table: GroupTable, fit_result: FitResult, num_workers: int) -> Ints:
    """Return the rows of each group that a worker should get, int64 [groups, workers].

    If the strategy places single rows by a rule of its own, the groups are the workers that it chose. Raises UsageError
    if there are too many to hold."""
    if num_workers * max(len(table.sizes), num_workers * (not deals_counts(fit_result.grouping))) > MOST_SHARES:
        raise UsageError(f"--group-by needs at most {MOST_SHARES:,} groups x workers; use fewer workers")
    rows: Ints = fit_result.grouping.rows_by_worker(table)
    return rows.T if deals_counts(fit_result.grouping) else np.diag(rows.sum(axis=1))


def collect_cells(run: ShardingRun, source: ScannedInput, dealing: Dealing, bundle: str) -> BundleCells:
    """Return the rows of bundles by group. One pass over the rows and a shuffle of 20 bytes per chunk and cell.

    Images are read only if the grouping needs them. Raises DataError for a row without a value, UsageError for more
    cells than the driver may hold."""
    dataset = source.dataset
    bounds = source.bounds
    by_count = deals_counts(dealing.grouping)
    buckets = min(len(bounds), run.context.defaultParallelism)

    def count(chunk: int) -> Iterator[tuple[int, BundleCells | str]]:
        """Yield the cells of a chunk by bucket, or an error text."""
        parts: list[BundleCells] = []
        try:
            for deliveries in dealing.deliveries(chunk, dataset.read(*bounds[chunk], images=dealing.reads_images)):
                block = deliveries.block
                values = block.columns.attributes.get(bundle)
                if values is not None and values.null_count:
                    row = int(block.ids[first_true(values.is_null())])
                    yield 0, f"{dataset.where(row)}: {bundle} is null; give every row a value, or leave the rows out"
                    return
                # Nothing is copied here, so every row of the block is delivered once.
                groups = deliveries.groups if by_count else deliveries.workers[deliveries.row_order]
                parts.append(count_cells(bundle_keys(block, bundle), groups))
                # A chunk may have more rows than fit into memory as cells, and far fewer bundles.
                if len(parts) == BLOCKS_AT_ONCE:
                    parts = [merge_cells(parts)]
        except JobError as error:
            yield 0, str(error)
            return
        if not parts:  # a chunk without rows, as with images of more than 64 MiB
            return
        cells = merge_cells(parts)
        places = (cells.keys >> np.uint64(32)).astype(np.int64) * buckets >> 32
        for bucket in np.unique(places).tolist():
            inside = places == bucket
            yield bucket, BundleCells(cells.keys[inside], cells.groups[inside], cells.rows[inside])

    def merge(parts: Iterable[tuple[int, BundleCells | str]]) -> Iterator[BundleCells | str]:
        try:
            if cells := results_or_error(part for _, part in parts):
                yield merge_cells(cells)
        except DataError as error:
            yield str(error)

    chunks = run.context.parallelize(range(len(bounds)), len(bounds))
    merged: RDD[BundleCells | str] = chunks.flatMap(count).partitionBy(buckets, int).mapPartitions(merge)
    # Their number first, because the driver must not receive more cells than it can hold; the shuffle is not repeated.
    if (num_cells := merged.map(len).sum()) > MOST_CELLS:
        raise UsageError(
            f"--group-by {bundle}: {num_cells:,} pairs of a value and a group are more than {MOST_CELLS:,}; group by a"
            " column of fewer values"
        )
    return merge_cells(results_or_error(merged.collect()))
