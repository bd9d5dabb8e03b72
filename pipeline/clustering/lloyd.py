"""K-means on integer points, exact and therefore free of order: Lloyd's iterations in (local, merge, finish) parts.

Points and centres are integers on one grid, small enough that every squared distance is an integer below 2^53, exact
in float64 whatever its BLAS does. Sums are integers too. So the same points give the same centres, bit for bit, for any
partitioning, in one task or in many. Ties go to the lower index. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError
from pipeline.core.hashing import keyed_hash

Ints = npt.NDArray[np.int64]
BLOCK_ROWS = 2048
SAMPLE_ROWS = 4096  # at least; four a cluster, where there are many
MOST_CLUSTERS = 1 << 16
MOST_COMPARED = 1 << 22  # distances that are held at once
MANY_CLUSTERS = 1024  # from here on the start tries one row a centre, not the best of several
ONE_HOT = 64  # clusters, up to which a product is the fastest way to sum rows by cluster


@dataclass(frozen=True)
class KMeansSettings:
    """k clusters at most; at most max_iter iterations of each of n_init starts; tol: see ``iterate``."""

    k: int
    max_iter: int
    tol: float
    seed: int
    n_init: int = 1

    def __post_init__(self) -> None:
        if min(self.k, self.n_init, self.max_iter) < 1:
            raise UsageError(
                f"clusters, starts and iterations must be at least 1, got {self.k}, {self.n_init}, {self.max_iter}"
            )


@dataclass(frozen=True)
class Sums:
    """One pass over points: sums int64 [k, p], counts int64 [k], inertia: the summed squared distance, exact."""

    sums: Ints
    counts: Ints
    inertia: int


@dataclass(frozen=True)
class Fit:
    """centres int64 [k, p], in canonical order: clusters by size descending, then lexicographically. far_groups: how many
    centres began at groups of far rows."""

    centres: Ints
    sizes: Ints
    inertia: int
    iterations: int
    far_groups: int = 0


def nearest(points: npt.NDArray[np.int32], centres: Ints) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Index of the nearest centre, int64 [rows], and the squared distance, float64 [rows] holding integers.

    2 * rows * k * p flop."""
    index = np.empty(len(points), np.int64)
    distance = np.empty(len(points))
    c = centres.astype(np.float64)
    c_squared = np.einsum("kp,kp->k", c, c)
    minus_2c = -2 * c.T
    step = block_rows(len(centres))
    for low in range(0, len(points), step):
        block = points[low : low + step].astype(np.float64)
        to_centres = block @ minus_2c + c_squared
        best = to_centres.argmin(axis=1)
        index[low : low + len(block)] = best
        squared = np.einsum("np,np->n", block, block)
        distance[low : low + len(block)] = to_centres[np.arange(len(block)), best] + squared
    return index, distance


def nearest_of_class(
    labels: npt.NDArray[np.integer[Any]], points: npt.NDArray[np.int32], centres: tuple[Ints, ...]
) -> Ints:
    """The number of each row's nearest centre of its class, int64 [rows]; centres are numbered class by class."""
    firsts = np.cumsum([0, *map(len, centres)])
    result = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = labels == label
        result[rows] = firsts[label] + nearest(points[rows], centres[label])[0]
    return result


def exact_sum(values: npt.NDArray[np.float64]) -> int:
    """The sum of integers below 2^53, of any number of them."""
    return whole_sum(values.astype(np.int64))


def whole_sum(values: Ints) -> int:
    """The sum of any number of integers, beyond 64 bits where need be."""
    return (int((values >> 26).sum()) << 26) + int((values & ((1 << 26) - 1)).sum())


def block_rows(k: int) -> int:
    """Rows whose distances to k centres are held at once."""
    return max(64, min(BLOCK_ROWS, MOST_COMPARED // k))


def one_pass(points: npt.NDArray[np.int32], centres: Ints) -> Sums:
    """Every row to its nearest centre. See passes.py for passes that are repeated."""
    index, distance = nearest(points, centres)
    sums = np.zeros(centres.shape, np.int64)
    add_rows(sums, points, np.arange(len(points)), index, 1)
    counts = np.bincount(index, minlength=len(centres)).astype(np.int64)
    return Sums(sums, counts, exact_sum(distance))


def add_rows(sums: Ints, points: npt.NDArray[np.int32], rows: Ints, clusters: Ints, sign: int) -> None:
    """Add rows of the points to (or take them from) the sums of their clusters: by a one-hot product of blocks where
    clusters are few, else in their order. Integers, so the same either way."""
    k = len(sums)
    if k > ONE_HOT:
        order = np.argsort(clusters, kind="stable")
        firsts = np.flatnonzero(np.diff(clusters[order], prepend=-1))
        if len(firsts):
            blocks = points[rows[order]].astype(np.int64)
            sums[clusters[order][firsts]] += sign * np.add.reduceat(blocks, firsts, axis=0)
        return
    for low in range(0, len(rows), BLOCK_ROWS):
        part = clusters[low : low + BLOCK_ROWS]
        one_hot = np.zeros((k, len(part)))
        one_hot[part, np.arange(len(part))] = sign
        block = points[rows[low : low + BLOCK_ROWS]].astype(np.float64)
        sums += (one_hot @ block).astype(np.int64)


def merge(left: Sums, right: Sums) -> Sums:
    return Sums(left.sums + right.sums, left.counts + right.counts, left.inertia + right.inertia)


def move(centres: Ints, total: Sums) -> Ints:
    """Each centre to the rounded mean of its rows; a centre without rows stays."""
    counts = np.maximum(total.counts, 1)[:, None]
    means = (2 * total.sums + counts) // (2 * counts)  # round half up, in integers
    return np.where(total.counts[:, None] > 0, means, centres)


@dataclass(frozen=True)
class SeedingSample:
    """The rows with the smallest hash of id, and the moments of all rows: mergeable, so independent of partitioning.

    keys uint64 [m], each once, as rows with one id are equal; points int32 [m, p]; count; sums, squares: Python integers by
    feature."""

    keys: npt.NDArray[np.uint64]
    points: npt.NDArray[np.int32]
    count: int
    sums: tuple[int, ...]
    squares: tuple[int, ...]

    @property
    def mean_variance(self) -> float:
        """The mean over features of the population variance, as scikit-learn scales its tolerance."""
        features = zip(self.sums, self.squares, strict=True)
        return sum((q * self.count - s * s) / self.count**2 for s, q in features) / len(self.sums)


def sample_rows(k: int) -> int:
    return max(SAMPLE_ROWS, 4 * k)


def _smallest(keys: npt.NDArray[np.uint64], most: int) -> Ints:
    """Where the smallest keys are, each once, ascending."""
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    first: Ints = order[np.r_[True, ascending[1:] != ascending[:-1]][: len(order)]]
    return first[:most]


def draw_sample(ids: Ints, points: npt.NDArray[np.int32], settings: KMeansSettings) -> SeedingSample:
    keys = keyed_hash(ids, settings.seed)
    order = _smallest(keys, sample_rows(settings.k))
    whole = points.astype(np.int64)
    squares = [exact_sum((whole[:, j] ** 2).astype(np.float64)) for j in range(points.shape[1])]
    sums = [int(s) for s in whole.sum(axis=0)]
    return SeedingSample(keys[order], points[order], len(ids), tuple(sums), tuple(squares))


def merge_samples(k: int, left: SeedingSample, right: SeedingSample) -> SeedingSample:
    keys = np.concatenate([left.keys, right.keys])
    order = _smallest(keys, sample_rows(k))
    points = np.concatenate([left.points, right.points])[order]
    return SeedingSample(
        keys[order],
        points,
        left.count + right.count,
        tuple(a + b for a, b in zip(left.sums, right.sums, strict=True)),
        tuple(a + b for a, b in zip(left.squares, right.squares, strict=True)),
    )


def plus_plus(points: npt.NDArray[np.int32], k: int, seed: int) -> Ints:
    """Greedy k-means++ (Arthur and Vassilvitskii 2007, with scikit-learn's 2 + log k trials a centre; one, where they are
    many). O(k * trials * rows * p).

    int64 [min(k, distinct points), p]: fewer centres where the sample holds fewer distinct points."""
    rng = np.random.Generator(np.random.PCG64(seed))
    whole = points.astype(np.float64)
    trials = 2 + int(np.log(k)) if 1 < k <= MANY_CLUSTERS else 1
    squared = np.einsum("np,np->n", whole, whole)

    def distances(rows: Ints) -> npt.NDArray[np.float64]:
        """From some rows to all, squared: integers, exact."""
        return np.asarray(squared[rows][:, None] + squared - 2 * (whole[rows] @ whole.T))

    first = int(rng.integers(len(points)))
    centres = [points[first].astype(np.int64)]
    closest = distances(np.array([first]))[0]
    while len(centres) < k and closest.any():
        cumulative = np.cumsum(closest)
        picks = np.searchsorted(cumulative, rng.random(trials) * cumulative[-1], side="right")
        picks = np.minimum(picks, len(points) - 1)
        options = np.minimum(closest, distances(picks))
        best = int(options.sum(axis=1).argmin())
        centres.append(points[picks[best]].astype(np.int64))
        closest = options[best]
    return np.array(centres)


def iterate(
    run_pass: Callable[[Ints], Sums],
    centres: Ints,
    settings: KMeansSettings,
    mean_variance: float,
    report: Callable[[int, int], None] = lambda iteration, inertia: None,
) -> Fit:
    """Lloyd's iterations to a fixed point, to a total squared movement of ``tol * mean_variance``, or ``max_iter``."""
    iterations = 0
    for iterations in range(1, settings.max_iter + 1):
        total = run_pass(centres)
        report(iterations, total.inertia)
        moved = move(centres, total)
        shift = exact_sum(((moved - centres) ** 2).sum(axis=1).astype(np.float64))
        centres = moved
        if shift <= settings.tol * mean_variance:
            break
    total = run_pass(centres)
    order = np.lexsort((*centres.T[::-1], -total.counts))
    return Fit(centres[order], total.counts[order], total.inertia, iterations)
