"""Tiny groups of rows far from all others, looked for among all rows: so that such a group gets a centre whether it is eight
of twenty thousand rows or of ten million.

The start of k-means draws its centres from a sample, which holds less and less of a group as the other rows grow in number,
and the objective would not miss it. So after a rough fit of the sample, one pass over all rows keeps those farthest from
their centres. Two kinds of them are far groups:

- Where the squared distances fall by a step of ``GAP``, the rows above it, whether alone or together.
- Three rows below it, or more, that lie together, within a quarter of their distance to the nearest centre, if no other
  row of all is nearer to them than to a centre. A second pass tells, where there are such rows.

Ordinary data have neither: no step, and the few rows that lie together have others around them. Then the start is what the
sample alone gives. Data with heavy tails have single rows above a step: these and pairs come last, and are few at most. What
a centre for a far group costs the other rows is weighed in fit.py.

Integers throughout, mergeable, and therefore free of order. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.clustering.lloyd import BLOCK_ROWS, nearest
from pipeline.core.arrays import Ints

FAR_ROWS = 4096  # that are kept at most, and
SHARE = 32  # at most one of so many rows: in a small input the farthest are not far
GAP = 1.3  # of squared distances
TOGETHER = 4  # in the squared distance to the nearest centre, of rows above the step: half as far away
TIGHT = 16  # of rows below it: a quarter as far away
FEW_ROWS = 256  # whose distances to all far rows are held at once: this runs on the driver
FEW = 3  # rows below it, and fewer are no group: two may lie together by chance
T = TypeVar("T")
Found = npt.NDArray[np.float64]


class Rows(Protocol):
    """All rows, wherever they are: what ``look(ids, points)`` finds in the parts of them, merged."""

    def __call__(self, look: Callable[[Ints, npt.NDArray[np.int32]], T], merge: Callable[[T, T], T], /) -> T: ...


@dataclass(frozen=True)
class Farthest:
    """The rows farthest from their nearest centre, first the farthest, ties by id.

    distances: squared, float64 [m] holding integers; ids int64 [m]; points int32 [m, p]."""

    distances: Found
    ids: Ints
    points: npt.NDArray[np.int32]


def find_far_groups(rows: Rows, count: int, rough: Ints, most: int) -> Ints:
    """The centres of the far groups of ``count`` rows, at most so many: int64 [groups, p], the rounded means of their rows,
    first the groups of three rows and more, then by distance. rough: int64 [k, p], centres of a fit of the sample.

    One pass over the rows, or two; 2 * rows * k * p flop each. O(far rows^2 * p) beside."""
    keep = min(FAR_ROWS, count // SHARE)
    if not keep:
        return np.empty((0, rough.shape[1]), np.int64)
    found: Farthest = rows(partial(_farthest_from, rough, keep), partial(_merge, keep))
    above = rows_above_step(found.distances)
    sure = together(found, range(above), TOGETHER)
    tight = [group for group in together(found, range(above, min(keep, len(found.ids))), TIGHT) if len(group) >= FEW]
    tight = tight[:most]
    if tight:
        centres = np.array([_mean(found, group) for group in tight])
        widest = rows(partial(_widest, rough, centres), np.maximum)
        limits = [found.distances[group[0]] / TIGHT for group in tight]
        tight = [group for group, reach, limit in zip(tight, widest, limits, strict=True) if reach <= limit]
    several = [group for group in sorted([*sure, *tight]) if len(group) >= FEW]
    single = [group for group in sure if len(group) < FEW]
    groups = [*several, *single[: most // 4]][:most]
    return np.array([_mean(found, group) for group in groups], np.int64).reshape(len(groups), rough.shape[1])


def rows_above_step(distances: Found) -> int:
    """How many of the farthest rows lie above the last step by ``GAP``; 0 where there is none. distances: descending."""
    steps = np.flatnonzero((distances[:-1] >= GAP * distances[1:]) & (distances[:-1] > 0))
    return int(steps[-1]) + 1 if len(steps) else 0


def together(found: Farthest, among: range, share: int) -> list[list[int]]:
    """Groups of rows: each row is of the first group whose farthest row it lies near, less than a ``share`` of that row's
    squared distance away, or begins a group."""
    points = found.points[among.start : among.stop].astype(np.float64)
    limits = found.distances[among.start : among.stop]
    squared = np.einsum("np,np->n", points, points)
    leads = np.zeros(len(points), np.bool_)
    groups: dict[int, list[int]] = {}
    for low in range(0, len(points), FEW_ROWS):
        block = slice(low, low + FEW_ROWS)
        near = share * (squared[block][:, None] + squared - 2 * (points[block] @ points.T)) < limits
        for row, to_others in enumerate(near, start=low):
            leaders = np.flatnonzero(to_others[:row] & leads[:row])
            leads[row] = not len(leaders)
            groups.setdefault(int(leaders[0]) if len(leaders) else row, []).append(among.start + row)
    return list(groups.values())


def _mean(found: Farthest, rows: list[int]) -> Ints:
    total: Ints = found.points[rows].sum(axis=0, dtype=np.int64)
    return (2 * total + len(rows)) // (2 * len(rows))


def _farthest_from(centres: Ints, keep: int, ids: Ints, points: npt.NDArray[np.int32]) -> Farthest:
    return _first(keep, Farthest(nearest(points, centres)[1], ids, points))


def _merge(keep: int, left: Farthest, right: Farthest) -> Farthest:
    distances = np.concatenate([left.distances, right.distances])
    ids = np.concatenate([left.ids, right.ids])
    return _first(keep, Farthest(distances, ids, np.concatenate([left.points, right.points])))


def _first(keep: int, rows: Farthest) -> Farthest:
    """One more than are kept, for the step below the last."""
    order = np.lexsort((rows.ids, -rows.distances))[: keep + 1]
    return Farthest(rows.distances[order], rows.ids[order], rows.points[order])


def _widest(rough: Ints, centres: Ints, ids: Ints, points: npt.NDArray[np.int32]) -> Found:
    """By centre: the largest squared distance of a row that is nearer to it than to any rough one, be it nearer still to
    another of the centres: otherwise a chain of rows, cut into groups, would hide that it goes on."""
    widest = np.zeros(len(centres))
    c = centres.astype(np.float64)
    for low in range(0, len(points), BLOCK_ROWS):
        block = points[low : low + BLOCK_ROWS]
        x = block.astype(np.float64)
        to_centres = np.einsum("np,np->n", x, x)[:, None] + np.einsum("kp,kp->k", c, c) - 2 * (x @ c.T)
        nearer = to_centres < nearest(block, rough)[1][:, None]
        np.maximum(widest, to_centres.max(axis=0, initial=0, where=nearer), out=widest)
    return widest
