"""Checks of what a strategy returns, so that the fault of a user's own strategy names it and not the input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import JobError
from pipeline.core.shardset.parts import Worker
from pipeline.strategies.base import FitResult, Grouping


def check_fit(fit_result: FitResult, strategy: str, bounds: Sequence[tuple[int, int]]) -> None:
    """Raise JobError if a fit does not count the rows, chunk by chunk, or no manifest can hold its parameters.

    strategy: its name; bounds: the id range [low, high) of each chunk."""
    counts = np.asarray(fit_result.counts)  # of a user's own strategy, whose types nobody has checked
    rows = [high - low for low, high in bounds]
    shape_fits = counts.ndim == 2 and len(counts) == len(rows) and counts.shape[1] > 0
    if not shape_fits or not np.issubdtype(counts.dtype, np.integer):
        raise JobError(
            f"the strategy {strategy} returned counts {counts.dtype} {list(counts.shape)}: they must be int64"
            f" [{len(rows)} chunks, groups]"
        )
    chunk = next((chunk for chunk, total in enumerate(counts.sum(axis=1)) if total != rows[chunk]), None)
    if chunk is not None or counts.min() < 0:
        detail = "" if chunk is None else f": {counts[chunk].sum():,} of the {rows[chunk]:,} rows of chunk {chunk}"
        raise JobError(f"the strategy {strategy} counts other rows than there are{detail}")
    try:
        json.dumps(fit_result.params, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise JobError(
            f"the strategy {strategy} returned parameters that the manifest cannot hold ({error}); convert them to int,"
            " float or text"
        ) from None


def check_numbers(values: Any, method: str, grouping: Grouping, rows: int, end: int) -> Ints:
    """Return the groups or workers of a block's rows, int64 [rows]. O(rows).

    Raises JobError if a grouping returned other values than whole numbers in [0, end), one per row.

    method: groups or workers, for the message."""
    if isinstance(values, np.ndarray) and values.shape == (rows,) and np.issubdtype(values.dtype, np.integer):
        if not rows or (values.min() >= 0 and values.max() < end):
            return values
        detail = f"{values.min()} to {values.max()}"
    else:
        detail = f"{getattr(values, 'dtype', type(values).__name__)} {list(np.shape(values))}"
    raise JobError(
        f"the grouping {type(grouping).__name__} returned {method} {detail}: {method}() must return int64 [{rows}] from 0 to"
        f" {end - 1}"
    )


def check_shares(workers: Sequence[Worker], histogram: Ints | None, strategy: str) -> None:
    """Raise JobError if a strategy deals other numbers of rows than its grouping has counted.

    histogram: int64 [workers, groups], rows as counted; None: they are not listed."""
    if histogram is None:
        return
    for worker in workers:
        counted = int(histogram[worker.index].sum())
        if counted != worker.rows:
            raise JobError(
                f"the strategy {strategy} deals {worker.rows:,} rows to worker {worker.index} and counts {counted:,}: a"
                " grouping that overrides workers() must override rows_by_worker() too, and groups() must agree with the"
                " counts of the fit"
            )
