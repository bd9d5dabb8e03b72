"""Exact k-means on integer points: Lloyd's iterations in (local, merge, finish) parts. Pure numpy.

Points and centres are integers on one grid, small enough that every squared distance is an integer below 2^53, which
float64 represents exactly in any BLAS. Sums are integers too. The same points therefore give bit-identical centres for
any partitioning, in one task or in many. Ties go to the lower index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import keyed_hash

BLOCK_ROWS = 2048
SAMPLE_ROWS = 4096  # rows of the seeding sample at least; four per cluster if that is more
MOST_CLUSTERS = 1 << 16
MOST_COMPARED = 1 << 22  # the most distances in memory at once
MANY_CLUSTERS = 1024  # above, the start tries one row per centre instead of the best of several
ONE_HOT = 64  # the largest number of clusters for which a matrix product is the fastest sum of rows by cluster


@dataclass(frozen=True)
class KMeansSettings:
    """The settings of a fit.

    k: the most clusters. max_iter: the most iterations of each of n_init starts. tol: see ``iterate``."""

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
    """The result of one pass over points.

    sums: int64 [k, p]. counts: int64 [k]. inertia: the summed squared distance, exact."""

    sums: Ints
    counts: Ints
    inertia: int


@dataclass(frozen=True)
class Fit:
    """The result of k-means.

    Attributes:
        centres: int64 [k, p] in canonical order: by cluster size descending, then lexicographically.
        sizes: rows per cluster, int64 [k].
        inertia: the summed squared distance, exact.
        iterations: the number of iterations.
        far_groups: the number of centres that started at groups of far rows.
    """

    centres: Ints
    sizes: Ints
    inertia: int
    iterations: int
    far_groups: int = 0


def nearest(points: npt.NDArray[Any], centres: Ints) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Return the index of the nearest centre, int64 [rows], and its squared distance, float64 [rows] holding integers.

    points: integers, int32, or float64 for rows outside of the fit, which may be far out. Costs 2 * rows * k * p flop."""
    index = np.empty(len(points), np.int64)
    distance = np.empty(len(points))
    c = centres.astype(np.float64)
    c_squared = np.einsum("kp,kp->k", c, c)
    minus_2c = -2 * c.T
    step = block_rows(len(centres))
    for low in range(0, len(points), step):
        # |x|^2 is the same for all centres, so it is added only to the distance of the nearest.
        block = points[low : low + step].astype(np.float64)
        to_centres = block @ minus_2c + c_squared
        best = to_centres.argmin(axis=1)
        index[low : low + len(block)] = best
        norms = np.einsum("np,np->n", block, block)
        distance[low : low + len(block)] = to_centres[np.arange(len(block)), best] + norms
    return index, distance


def nearest_of_class(labels: npt.NDArray[np.integer[Any]], points: npt.NDArray[Any], centres: tuple[Ints, ...]) -> Ints:
    """Return the number of the nearest centre of its own class for each row, int64 [rows].

    Centres are numbered through, class by class. centres: per class."""
    firsts = np.cumsum([0, *map(len, centres)])
    result = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = labels == label
        result[rows] = firsts[label] + nearest(points[rows], centres[label])[0]
    return result


def exact_sum(values: npt.NDArray[np.float64]) -> int:
    """Return the sum of any number of integers below 2^53."""
    return whole_sum(values.astype(np.int64))


def whole_sum(values: Ints) -> int:
    """Return the sum of any number of integers, which may exceed 64 bits."""
    return (int((values >> 26).sum()) << 26) + int((values & ((1 << 26) - 1)).sum())


def block_rows(k: int) -> int:
    """Return the number of rows whose distances to k centres are computed at once."""
    return max(64, min(BLOCK_ROWS, MOST_COMPARED // k))


def one_pass(points: npt.NDArray[np.int32], centres: Ints) -> Sums:
    """Assign every row to its nearest centre, and return the sums over each centre's rows. passes.py repeats this."""
    index, distance = nearest(points, centres)
    sums = np.zeros(centres.shape, np.int64)
    add_rows(sums, points, np.arange(len(points)), index, 1)
    counts = np.bincount(index, minlength=len(centres)).astype(np.int64)
    return Sums(sums, counts, exact_sum(distance))


def add_rows(sums: Ints, points: npt.NDArray[np.int32], rows: Ints, clusters: Ints, sign: int) -> None:
    """Add rows of the points to the sums of their clusters, or subtract them.

    Few clusters are summed by one-hot products of blocks, many in the order of the clusters. Both are exact in
    integers.

    Args:
        sums: int64 [k, p], changed in place.
        points: int32 [rows, p].
        rows: the positions of the rows to add.
        clusters: the cluster of each of these rows.
        sign: 1 to add, -1 to subtract.
    """
    k = len(sums)
    if k > ONE_HOT:
        # Sorted by cluster, every cluster is one run of rows, which reduceat sums.
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


def move_centres(centres: Ints, total: Sums) -> Ints:
    """Return each centre moved to the rounded mean of its rows; a centre without rows stays."""
    counts = np.maximum(total.counts, 1)[:, None]
    means = (2 * total.sums + counts) // (2 * counts)  # round half up, in integers
    return np.where(total.counts[:, None] > 0, means, centres)


@dataclass(frozen=True)
class SeedingSample:
    """The rows with the smallest hashes of their ids, and the moments of all rows. Mergeable in any order.

    Attributes:
        keys: the hashes, uint64 [m], without duplicates, as rows with one id are equal.
        points: int32 [m, p].
        count: the number of all rows.
        sums: Python integers per feature.
        squares: sums of squares, Python integers per feature.
    """

    keys: npt.NDArray[np.uint64]
    points: npt.NDArray[np.int32]
    count: int
    sums: tuple[int, ...]
    squares: tuple[int, ...]

    @property
    def mean_variance(self) -> float:
        """The mean over features of the population variance, with which scikit-learn scales its tolerance."""
        features = zip(self.sums, self.squares, strict=True)
        return sum((q * self.count - s * s) / self.count**2 for s, q in features) / len(self.sums)


def sample_rows(k: int) -> int:
    return max(SAMPLE_ROWS, 4 * k)


def _smallest(keys: npt.NDArray[np.uint64], most: int) -> Ints:
    """Return the positions of the ``most`` smallest keys, by ascending key and without duplicates."""
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    # Keep the first of equal keys. Without any key r_ still contains its True, which the slice removes.
    first: Ints = order[np.r_[True, ascending[1:] != ascending[:-1]][: len(order)]]
    return first[:most]


def draw_sample(ids: Ints, points: npt.NDArray[np.int32], settings: KMeansSettings) -> SeedingSample:
    """Return the seeding sample of some rows: those with the smallest hashes of their ids, and the moments of all."""
    keys = keyed_hash(ids, settings.seed)
    order = _smallest(keys, sample_rows(settings.k))
    whole = points.astype(np.int64)
    squares = [exact_sum((whole[:, j] ** 2).astype(np.float64)) for j in range(points.shape[1])]
    sums = [int(s) for s in whole.sum(axis=0)]
    return SeedingSample(keys[order], points[order], len(ids), tuple(sums), tuple(squares))


def merge_samples(k: int, left: SeedingSample, right: SeedingSample) -> SeedingSample:
    """Return the seeding sample of two disjoint parts of the rows. k: the number of clusters, which sets the sample's
    size."""
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
    """Return the centres of greedy k-means++, int64 [min(k, distinct points), p].

    Arthur and Vassilvitskii 2007, with scikit-learn's 2 + log k trials per centre, or one trial for many centres. There
    are fewer centres than k if the sample has fewer distinct points. O(k * trials * rows * p)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    whole = points.astype(np.float64)
    trials = 2 + int(np.log(k)) if 1 < k <= MANY_CLUSTERS else 1
    norms = np.einsum("np,np->n", whole, whole)

    def distances(rows: Ints) -> npt.NDArray[np.float64]:
        """Return the squared distances from some rows to all rows: exact integers."""
        return np.asarray(norms[rows][:, None] + norms - 2 * (whole[rows] @ whole.T))

    first = int(rng.integers(len(points)))
    centres = [points[first].astype(np.int64)]
    closest = distances(np.array([first]))[0]
    while len(centres) < k and closest.any():
        # Draw rows in proportion to their squared distance, and take the one that lowers the inertia most.
        cumulative = np.cumsum(closest)
        picks = np.searchsorted(cumulative, rng.random(trials) * cumulative[-1], side="right")
        picks = np.minimum(picks, len(points) - 1)
        options = np.minimum(closest, distances(picks))
        best = int(options.sum(axis=1).argmin())
        centres.append(points[picks[best]].astype(np.int64))
        closest = options[best]
    return np.array(centres)


def canonical_order(centres: npt.NDArray[Any], sizes: Ints) -> Ints:
    """Return the positions of the centres by size descending, then lexicographically, int64 [k]."""
    order: Ints = np.lexsort((*centres.T[::-1], -sizes))
    return order


def iterate(
    run_pass: Callable[[Ints], Sums],
    centres: Ints,
    settings: KMeansSettings,
    mean_variance: float,
    report: Callable[[int, int], None] = lambda iteration, inertia: None,
) -> Fit:
    """Run Lloyd's iterations until the centres' squared movement is at most ``tol * mean_variance``.

    At most ``max_iter`` iterations run, and one more pass that counts the rows.

    Args:
        run_pass: returns the sums of one pass for given centres.
        centres: the start, int64 [k, p].
        settings: max_iter and tol.
        mean_variance: the mean variance of the features.
        report: report(iteration, inertia) after each pass.
    """
    iterations = 0
    for iterations in range(1, settings.max_iter + 1):
        total = run_pass(centres)
        report(iterations, total.inertia)
        next_centres = move_centres(centres, total)
        shift = exact_sum(((next_centres - centres) ** 2).sum(axis=1).astype(np.float64))
        centres = next_centres
        if shift <= settings.tol * mean_variance:
            break
    total = run_pass(centres)
    order = canonical_order(centres, total.counts)
    return Fit(centres[order], total.counts[order], total.inertia, iterations)
