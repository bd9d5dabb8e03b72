"""Importance-aware assignment: rows are ranked by their losses, and divided over workers by rank. Pure.

The pipeline and the trainer use the same rule. Source: Sheikholeslami et al., "The Impact of Importance-aware Dataset
Partitioning on Data-parallel Training of Deep Neural Networks", DAIS 2023, and its code."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Floats, Ints
from pipeline.core.shardset.ratios import largest_remainder

Measure = Literal["average", "variance"]
Heuristic = Literal["stripes", "blocks"]

MEASURE_HELP = "importance of a row: the average of its losses over the epochs, or their variance"
HEURISTIC_HELP = (
    "division of the rows, which are sorted by importance: to the workers in turn (stripes), or in consecutive pieces"
    " (blocks)"
)
IGNORE_HELP = "number of first epochs whose losses are ignored"


def importance(
    places: Ints,
    epochs: Ints,
    losses: npt.NDArray[np.floating],
    *,
    rows: int,
    measure: Measure,
    num_epochs: int,
) -> Floats:
    """Return the importance of each row, float64 [rows]; NaN for a row without a loss.

    Losses of a row in the same epoch count as one, their mean. The variance is the unbiased one, and 0 for a row with
    losses of a single epoch; if that holds for all rows, the average is returned, as by the authors' code. The result has
    the same bits for any order of the losses.

    Args:
        places: the row of each loss, in [0, rows), int64 [L].
        epochs: the epoch of each loss, counted from 1, int64 [L].
        losses: [L].
        rows: number of rows.
        measure: average or variance of a row's losses over the epochs.
        num_epochs: number of epochs that have losses of any row, some of which may not be given here.
    """
    # In a fixed order, because sums of floats depend on it.
    order = np.lexsort((losses, epochs, places))
    if not len(order):
        return np.full(rows, np.nan)
    place = places[order]
    epoch = epochs[order]
    is_new = np.concatenate([[True], (np.diff(place) != 0) | (np.diff(epoch) != 0)])
    cells = np.cumsum(is_new) - 1
    # bincount adds one number after the other. Other sums may use an order that depends on the number of rows.
    means = np.bincount(cells, losses[order].astype(np.float64)) / np.bincount(cells)
    of_cell = place[is_new]
    cells_of_row = np.bincount(of_cell, minlength=rows)
    has_loss = cells_of_row > 0
    sums = np.bincount(of_cell, means, minlength=rows)
    averages: Floats = np.where(has_loss, sums / np.maximum(cells_of_row, 1), np.nan)
    if measure == "average" or num_epochs == 1:
        return averages
    squares = np.bincount(of_cell, (means - averages[of_cell]) ** 2, minlength=rows)
    variances: Floats = np.where(has_loss, squares / np.maximum(cells_of_row - 1, 1), np.nan)
    return variances


def ranks(values: Floats) -> Ints:
    """Return the rank of each row by descending importance, ties by the number of the row: int64 [rows]."""
    result = np.empty(len(values), np.int64)
    result[np.argsort(-values, kind="stable")] = np.arange(len(values))
    return result


def stripes(values: Floats, num_workers: int) -> Ints:
    """Return the worker of each row, int64 [rows], if ranks are dealt in turn. values: importance, float64 [rows]."""
    return ranks(values) % num_workers


def blocks(values: Floats, num_workers: int) -> Ints:
    """Return the worker of each row, int64 [rows], if each worker gets consecutive ranks, worker 0 the greatest values.

    values: importance, float64 [rows]."""
    sizes = largest_remainder(np.array([len(values)]), (1,) * num_workers)[0]
    return workers_of_blocks(ranks(values), sizes)


def workers_of_blocks(ranks: Ints, sizes: Ints) -> Ints:
    """Return the worker of each rank, int64 [ranks], if worker w gets ``sizes[w]`` ranks, after worker w - 1."""
    return np.searchsorted(np.cumsum(sizes), ranks, side="right")
