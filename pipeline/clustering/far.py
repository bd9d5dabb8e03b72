"""A search of all rows for tiny groups far from the others, so that such a group gets a centre in any size of data.

The start of k-means draws its centres from a sample, which holds fewer rows of a group the more other rows there are,
and the objective would hardly change without the group. Therefore, after a rough fit of the sample, one pass over all
rows keeps those farthest from their centres. Two kinds of them are far groups:

- If the squared distances fall by a factor of ``GAP``, the rows above this step, single or together.
- Three or more rows below the step that lie close together (within a quarter of their distance to the nearest centre),
  if every other row is nearer to a centre than to them. A second pass checks this, if there are such rows.

Ordinary data have neither: there is no step, and the few rows that lie together have others around them. The start is
then computed from the sample alone. Heavy-tailed data have single rows above a step: single rows and pairs come last,
and their number is limited. fit.py limits the cost to the other rows.

All values are integers and the parts can be merged, so the result does not depend on order. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.clustering.lloyd import BLOCK_ROWS, nearest
from pipeline.core.arrays import Ints

FAR_ROWS = 4096  # the most rows that the search keeps
SHARE = 32  # it keeps at most 1/32 of all rows, because the farthest rows of a small input are not far
GAP = 1.3  # the ratio of successive squared distances that makes a step
TOGETHER = 4  # rows above the step belong together within half of their distance to the nearest centre (squared: 1/4)
TIGHT = 16  # rows below the step belong together within a quarter of that distance (squared: 1/16)
FEW_ROWS = 256  # rows whose distances to all far rows are in the driver's memory at once
FEW = 3  # the fewest rows below the step that make a group, because two can lie together by chance
T = TypeVar("T")
SquaredDistances = npt.NDArray[np.float64]


class RowScan(Protocol):
    """A function that applies ``look(ids, points)`` to all parts of the rows and merges the results."""

    def __call__(self, look: Callable[[Ints, npt.NDArray[np.int32]], T], merge: Callable[[T, T], T], /) -> T: ...


@dataclass(frozen=True)
class Farthest:
    """The rows farthest from their nearest centre, the farthest first, ties by id.

    distances: squared, float64 [m] holding integers. ids: int64 [m]. points: int32 [m, p]."""

    distances: SquaredDistances
    ids: Ints
    points: npt.NDArray[np.int32]


def find_far_groups(rows: RowScan, count: int, rough: Ints, most: int) -> Ints:
    """Return the centres of far groups, int64 [groups, p], the rounded means of their rows.

    Groups of three or more rows come first, then by distance. Costs one pass over the rows, or two, of 2 * rows * k * p
    flop each, and O(far rows^2 * p).

    Args:
        rows: applies a function to all rows.
        count: the number of rows.
        rough: int64 [k, p], the centres of a fit of the sample.
        most: the limit of groups.
    """
    keep = min(FAR_ROWS, count // SHARE)
    if not keep:
        return np.empty((0, rough.shape[1]), np.int64)
    far_rows: Farthest = rows(partial(_farthest_from, rough, keep), partial(_merge, keep))
    # Rows above the step need no second pass: their distance alone sets them apart.
    above = rows_above_step(far_rows.distances)
    sure = group_nearby_rows(far_rows, range(above), TOGETHER)
    below = group_nearby_rows(far_rows, range(above, min(keep, len(far_rows.ids))), TIGHT)
    tight = [group for group in below if len(group) >= FEW][:most]
    if tight:
        # Drop a group if a row beyond its limit is nearer to it than to a rough centre: it is not isolated.
        centres = np.array([_mean(far_rows, group) for group in tight])
        widest = rows(partial(_largest_distances, rough, centres), np.maximum)
        limits = [far_rows.distances[group[0]] / TIGHT for group in tight]
        tight = [group for group, reach, limit in zip(tight, widest, limits, strict=True) if reach <= limit]
    several = [group for group in sorted([*sure, *tight]) if len(group) >= FEW]
    single = [group for group in sure if len(group) < FEW]
    groups = [*several, *single[: most // 4]][:most]
    return np.array([_mean(far_rows, group) for group in groups], np.int64).reshape(len(groups), rough.shape[1])


def rows_above_step(distances: SquaredDistances) -> int:
    """Return the number of rows above the last step by ``GAP``, or 0 if there is no step. distances: descending."""
    steps = np.flatnonzero((distances[:-1] >= GAP * distances[1:]) & (distances[:-1] > 0))
    return int(steps[-1]) + 1 if len(steps) else 0


def group_nearby_rows(far_rows: Farthest, among: range, share: int) -> list[list[int]]:
    """Divide rows into groups. The first row of a group, its leader, is its farthest from the centres.

    A row joins the first group whose leader is nearer to it than 1 / ``share`` of the leader's own squared distance, or
    else starts a group.

    Args:
        far_rows: the far rows.
        among: the positions of the rows to divide.
        share: the divisor of the leader's squared distance.
    """
    points = far_rows.points[among.start : among.stop].astype(np.float64)
    limits = far_rows.distances[among.start : among.stop]
    norms = np.einsum("np,np->n", points, points)
    leads = np.zeros(len(points), np.bool_)
    groups: dict[int, list[int]] = {}
    for low in range(0, len(points), FEW_ROWS):
        block = slice(low, low + FEW_ROWS)
        # Squared distances by a matrix product; points are integers, so float64 is exact.
        near = share * (norms[block][:, None] + norms - 2 * (points[block] @ points.T)) < limits
        for row, to_others in enumerate(near, start=low):
            leaders = np.flatnonzero(to_others[:row] & leads[:row])
            leads[row] = not len(leaders)
            groups.setdefault(int(leaders[0]) if len(leaders) else row, []).append(among.start + row)
    return list(groups.values())


def _mean(far_rows: Farthest, rows: list[int]) -> Ints:
    total: Ints = far_rows.points[rows].sum(axis=0, dtype=np.int64)
    return (2 * total + len(rows)) // (2 * len(rows))


def _farthest_from(centres: Ints, keep: int, ids: Ints, points: npt.NDArray[np.int32]) -> Farthest:
    return _farthest_rows(keep, Farthest(nearest(points, centres)[1], ids, points))


def _merge(keep: int, left: Farthest, right: Farthest) -> Farthest:
    """Return the ``keep`` + 1 farthest rows of two parts together, see ``_farthest_rows``."""
    distances = np.concatenate([left.distances, right.distances])
    ids = np.concatenate([left.ids, right.ids])
    return _farthest_rows(keep, Farthest(distances, ids, np.concatenate([left.points, right.points])))


def _farthest_rows(keep: int, rows: Farthest) -> Farthest:
    """Return the ``keep`` + 1 farthest rows; equally far ones in the order of ids.

    A step is found by comparing each row with the next one, so the last row needs one more."""
    order = np.lexsort((rows.ids, -rows.distances))[: keep + 1]
    return Farthest(rows.distances[order], rows.ids[order], rows.points[order])


def _largest_distances(rough: Ints, centres: Ints, ids: Ints, points: npt.NDArray[np.int32]) -> SquaredDistances:
    """Return for each centre the largest squared distance of a row that is nearer to it than to any rough centre.

    Rows count even if another of the centres is nearer: otherwise a chain of rows that is cut into groups would look
    like separate groups.

    Args:
        rough: int64 [k, p], the centres of the rough fit.
        centres: int64 [groups, p], the centres of possible far groups.
        ids: int64 [rows], not used.
        points: int32 [rows, p].
    """
    widest = np.zeros(len(centres))
    c = centres.astype(np.float64)
    for low in range(0, len(points), BLOCK_ROWS):
        block = points[low : low + BLOCK_ROWS]
        x = block.astype(np.float64)
        to_centres = np.einsum("np,np->n", x, x)[:, None] + np.einsum("kp,kp->k", c, c) - 2 * (x @ c.T)
        nearer = to_centres < nearest(block, rough)[1][:, None]
        np.maximum(widest, to_centres.max(axis=0, initial=0, where=nearer), out=widest)
    return widest
