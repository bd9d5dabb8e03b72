"""A complete fit of k-means: a sample of the rows, groups far from all others, several starts, and the best result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.clustering.far import RowScan, find_far_groups
from pipeline.clustering.lloyd import (
    Fit,
    KMeansSettings,
    SeedingSample,
    Sums,
    draw_sample,
    iterate,
    nearest,
    plus_plus,
    sample_rows,
)
from pipeline.clustering.passes import Pass
from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash

ROUGH_ITERATIONS = 20
ROUGH_CLUSTERS = 256
PRICE = 1.25  # the largest accepted growth of the ordinary rows' inertia
REFINEMENT_ROWS = 1 << 18
MANY_ROWS = 4 * REFINEMENT_ROWS
ONE_TASK_PRODUCTS = 1 << 32  # rows * k * p of a pass, beyond which several tasks are faster than one
TINY = 64  # a sample cluster that represents at most this many rows, or has at most 2 sample rows, may be a far group


def fit(
    make_pass: Callable[[int], Callable[[Ints], Sums]],
    rows: RowScan,
    sample: SeedingSample,
    settings: KMeansSettings,
    refine: Callable[[Ints, float], Ints],
    report: Callable[[int, int], None] = lambda iteration, inertia: None,
) -> Fit:
    """Return the fit of the start with the smallest inertia, the first of equal ones.

    Far groups (far.py) get a centre each, if ordinary rows can spare it. The other centres start at ordinary rows of
    the sample, i.e. rows that are nearer to a centre of the rough fit than to a far group.

    Args:
        make_pass: make_pass(k) returns the function that runs one pass over all rows with k centres.
        rows: rows(look, merge) applies ``look(ids, points)`` to all parts of the rows and merges the results.
        sample: the sample that starts are drawn from.
        settings: number of clusters, iterations, starts.
        refine: refine(centres, mean_variance) returns the centres after iterations on a subset of the rows
            (``refinement_sample``). Used for very many rows, where a pass is expensive and a good start needs fewer passes.
        report: report(iteration, inertia) is called after each pass.
    """
    ordinary = sample.points
    groups = np.empty((0, sample.points.shape[1]), np.int64)
    if sample.count > len(sample.points) and settings.k > 1:  # else the sample is all rows
        rough = rough_centres(sample, settings)
        groups = find_far_groups(rows, sample.count, rough, settings.k // 2)
        ordinary = ordinary[nearest(ordinary, np.vstack([rough, groups]))[0] < len(rough)]
        groups = groups[: affordable_groups(ordinary, len(groups), sample.mean_variance, settings)]
    fits = []
    for start in range(settings.n_init):
        centres = np.vstack([plus_plus(ordinary, settings.k - len(groups), settings.seed + start), groups])
        # A smaller sample means that rows repeat so often that a subset is not representative.
        full = len(sample.points) == sample_rows(settings.k)
        if full and sample.count > MANY_ROWS and REFINEMENT_ROWS * centres.size <= ONE_TASK_PRODUCTS:
            centres = refine(centres, sample.mean_variance)
        fits.append(iterate(make_pass(len(centres)), centres, settings, sample.mean_variance, report))
    return replace(min(fits, key=lambda one: one.inertia), far_groups=len(groups))


def refinement_limit(count: int) -> int:
    """Return the limit below which the hashes of about REFINEMENT_ROWS of ``count`` rows lie."""
    return (REFINEMENT_ROWS << 64) // count


def refinement_sample(limit: int, seed: int, ids: Ints, points: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the rows of a part whose hash is below the limit, int32 [rows, p].

    Args:
        limit: see ``refinement_limit``.
        seed: the seed of the hash.
        ids: int64 [rows].
        points: int32 [rows, p].
    """
    return points[keyed_hash(ids, seed) < np.uint64(limit)]


def refine_centres(
    points: npt.NDArray[np.int32], settings: KMeansSettings, centres: Ints, mean_variance: float
) -> Ints:
    """Return the centres after Lloyd's iterations on the given points alone, int64 [k, p]."""
    return iterate(Pass(points, len(centres)), centres, settings, mean_variance).centres


def affordable_groups(
    ordinary: npt.NDArray[np.int32], groups: int, mean_variance: float, settings: KMeansSettings
) -> int:
    """Return the number of far groups that may have a centre without moving ordinary rows much farther from theirs.

    Every far group takes a centre from the ordinary rows. The effect is measured by fits of the sample: if the data
    have as many clusters as there are centres, none can be spared.

    Args:
        ordinary: the ordinary rows of the sample, int32 [rows, p].
        groups: the number of far groups.
        mean_variance: the tolerance's unit, see ``iterate``.
        settings: the settings of the whole fit.
    """
    few = replace(settings, k=min(settings.k, ROUGH_CLUSTERS), max_iter=ROUGH_ITERATIONS)

    def inertia(k: int) -> int:
        """Return the inertia of a short fit of the ordinary rows with k centres."""
        start = plus_plus(ordinary, k, settings.seed)
        return iterate(Pass(ordinary, len(start)), start, few, mean_variance).inertia

    whole = inertia(few.k) if groups else 0
    extra = min(groups, few.k // 2)
    while extra and inertia(few.k - extra) > PRICE * whole:
        extra //= 2
    return extra


def rough_centres(sample: SeedingSample, settings: KMeansSettings) -> Ints:
    """Return the centres of a short fit of the sample, int64 [k, p], without the clusters of a few rows.

    A cluster of a few rows may be a far group whose rows are in the sample by chance, and far.py must find it like any
    other."""
    start = plus_plus(sample.points, min(settings.k, ROUGH_CLUSTERS), settings.seed)
    few = replace(settings, max_iter=ROUGH_ITERATIONS)
    rough = iterate(Pass(sample.points, len(start)), start, few, sample.mean_variance)
    stands_for = sample.count / len(sample.points)
    many = np.maximum(2, TINY / stands_for)
    return rough.centres[: max(1, int((rough.sizes > many).sum()))]  # by size descending


def fit_in_process(ids: Ints, points: npt.NDArray[np.int32], settings: KMeansSettings) -> Fit:
    """Return the fit of points that this process holds, without Spark. ids: int64 [rows]. points: int32 [rows, p]."""
    sample = draw_sample(ids, points, settings)

    def refine(centres: Ints, mean_variance: float) -> Ints:
        subset = refinement_sample(refinement_limit(sample.count), settings.seed, ids, points)
        return refine_centres(subset, settings, centres, mean_variance)

    return fit(lambda k: Pass(points, k), lambda look, merge: look(ids, points), sample, settings, refine)
