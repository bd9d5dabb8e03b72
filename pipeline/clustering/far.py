"""Tiny groups of rows far from all others, looked for among all rows: so that such a group gets a centre whether it is eight
of twenty thousand rows or of ten million.

The start of k-means draws its centres from a sample, which holds less and less of a group as the other rows grow in number,
and the objective would not miss it. So after a rough fit of the sample, one pass over all rows keeps those farthest from
their centres. Two kinds of them are far groups:

- Where the squared distances fall by a step of ``GAP``, the rows above it, whether alone or together.
- Three rows below it, or more, that lie together, within a quarter of their distance to the nearest centre, if no other
  row of all is nearer to them than to a centre. A second pass tells, where there are such rows.

Ordinary data have neither: no step, and the few rows that lie together have others around them. Then the start is what the
sample alone gives. Integers throughout, mergeable, and therefore free of order. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.arrays import Ints
from pipeline.clustering.lloyd import nearest

FAR_ROWS = 4096  # that are kept at most, and
SHARE = 32  # at most one of so many rows: in a small input the farthest are not far
GAP = 1.3  # of squared distances
TOGETHER = 4  # in the squared distance to the nearest centre, of rows above the step: half as far away
TIGHT = 16  # of rows below it: a quarter as far away
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
    first that of the farthest row. rough: int64 [k, p], centres of a fit of the sample.

    One pass over the rows, or two; 2 * rows * k * p flop each. O(far rows^2 * p) beside."""
    keep = min(FAR_ROWS, count // SHARE)
    if not keep:
        return np.empty((0, rough.shape[1]), np.int64)
    found: Farthest = rows(partial(_farthest_from, rough, keep), partial(_merge, keep))
    above = rows_above_step(found.distances)
    sure = together(found, range(above), TOGETHER)
    tight = [group for group in together(found, range(above, min(keep, len(found.ids))), TIGHT) if len(group) >= FEW]
    if tight:
        widest = rows(partial(_widest, rough, np.array([_mean(found, group) for group in tight])), np.maximum)
        limits = [found.distances[group[0]] / TIGHT for group in tight]
        tight = [group for group, reach, limit in zip(tight, widest, limits, strict=True) if reach <= limit]
    groups = sorted([*sure, *tight])[:most]
    return np.array([_mean(found, group) for group in groups], np.int64).reshape(len(groups), rough.shape[1])


def rows_above_step(distances: Found) -> int:
    """How many of the farthest rows lie above the last step by ``GAP``; 0 where there is none. distances: descending."""
    steps = np.flatnonzero((distances[:-1] >= GAP * distances[1:]) & (distances[:-1] > 0))
    return int(steps[-1]) + 1 if len(steps) else 0


def together(found: Farthest, among: range, share: int) -> list[list[int]]:
    """Groups of rows: each row is of the first group whose farthest row it lies near, less than a ``share`` of that row's
    squared distance away, or begins a group."""
    points = found.points.astype(np.int64)
    groups: list[list[int]] = []
    for row in among:
        leaders = [group[0] for group in groups]
        apart = ((points[leaders] - points[row]) ** 2).sum(axis=1)
        near = np.flatnonzero(share * apart < found.distances[leaders])
        if len(near):
            groups[near[0]].append(row)
        else:
            groups.append([row])
    return groups


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
    to_rough = nearest(points, rough)[1]
    for at, centre in enumerate(centres):
        to_centre = nearest(points, centre[None])[1]
        widest[at] = to_centre.max(initial=0, where=to_centre < to_rough)
    return widest
