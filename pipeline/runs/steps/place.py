"""The steps that decide which workers get a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import MOST_COUNTS, GroupTable, group_table
from pipeline.core.arrays import Ints
from pipeline.core.shardset.parts import Neighbourhood
from pipeline.output.entries import describe_neighbourhoods
from pipeline.output.placement import Dealing, Placement
from pipeline.runs.steps.run import ShardingRun
from pipeline.spark.images import Images
from pipeline.spark.source import ScannedInput
from pipeline.strategies import Context, FitResult
from pipeline.strategies.base import Grouping, deals_counts

MOST_SHARES = 1 << 24  # limit of workers x groups that the driver sums: 128 MiB


@dataclass(frozen=True)
class PlacedRows:
    """The placement of the rows, and its description for the manifest.

    Attributes:
        placement: decides which workers get a row.
        copies: number of copies.
        params: parameters that the fit decided.
        neighbourhoods: the manifest's entries, or None.
        histogram: int64 [workers, neighbourhoods], rows of each by worker, or None.
        shares: int64 [workers], rows by worker, if they are known before the write.
    """

    placement: Placement
    copies: int
    params: dict[str, Any]
    neighbourhoods: list[Neighbourhood] | None = None
    histogram: Ints | None = None
    shares: Ints | None = None


def fitting_context(run: ShardingRun, source: ScannedInput, folder: str) -> Context:
    """Return the inputs and tools of a fit. folder: the attempt's, for files of tasks."""
    return Context(
        images=Images(run.context, source.dataset),
        scan=source.scan,
        bounds=source.bounds,
        num_workers=run.request.num_workers,
        phase=run.progress.phase,
        report=run.progress.report,
        scratch=f"{folder}/groups",
        ratios=tuple(run.request.ratios) if run.request.ratios else None,
    )


def deal(fit_result: FitResult, num_workers: int, ratios: Sequence[int] | None) -> PlacedRows:
    """Deal the groups of a fit to workers. ratios: shares of the workers; None: equal."""
    grouping = fit_result.grouping
    table = group_table(
        fit_result.counts.sum(axis=0),
        num_workers,
        fit_result.start,
        fit_result.sparse_if,
        tuple(ratios) if ratios else None,
        fit_result.table,
    )
    # A histogram with too many entries is left out of the manifest.
    is_listed = grouping.neighbourhoods and num_workers * len(table.sizes) <= MOST_COUNTS
    return PlacedRows(
        Dealing(grouping, table, offsets_by_chunk(fit_result.counts)),
        table.copies,
        fit_result.params,
        describe_neighbourhoods(table) if grouping.neighbourhoods else None,
        grouping.rows_by_worker(table) if is_listed else None,
        shares(grouping, table),
    )


def shares(grouping: Grouping, table: GroupTable) -> Ints | None:
    """Return the rows of each worker, copies included, int64 [workers].

    Returns None if the grouping deals rows by a rule that it does not count, or if there are very many groups."""
    counts = deals_counts(grouping) or type(grouping).rows_by_worker is not Grouping.rows_by_worker
    if not counts or table.num_workers * len(table.sizes) > MOST_SHARES:
        return None
    rows: Ints = grouping.rows_by_worker(table).sum(axis=1)
    return rows
