"""A whole fit of k-means: a sample of the rows, the groups that are far from all others, starts, and the best of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.clustering.far import Rows, find_far_groups
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

ROUGH_ITERATIONS, ROUGH_CLUSTERS = 20, 256
PRICE = 1.25  # of the summed squared distances of ordinary rows
SETTLING_ROWS = 1 << 18
MANY_ROWS = 4 * SETTLING_ROWS
ONE_TASK_PRODUCTS = 1 << 32  # of a coordinate of a row and of a centre, in a pass: beyond, many tasks are faster
TINY = 64  # rows of all: a cluster of the sample that stands for fewer, or holds two of its rows, may be a far group


def fit(
    make_pass: Callable[[int], Callable[[Ints], Sums]],
    rows: Rows,
    drawn: SeedingSample,
    settings: KMeansSettings,
    settle: Callable[[Ints, float], Ints],
    report: Callable[[int, int], None] = lambda iteration, inertia: None,
) -> Fit:
    """The start of smallest inertia (the first one on a tie). make_pass(k): one pass over all rows for k centres.
    settle(centres, mean_variance): where they come to rest among ``settling`` rows; for very many rows, of which each pass
    is dear and which then need fewer.

    Far groups (far.py) get a centre each, if ordinary rows can spare it; the others begin at ordinary rows of the sample."""
    ordinary, groups = drawn.points, np.empty((0, drawn.points.shape[1]), np.int64)
    if drawn.count > len(drawn.points) and settings.k > 1:  # else the sample is all rows
        rough = rough_centres(drawn, settings)
        groups = find_far_groups(rows, drawn.count, rough, settings.k // 2)
        ordinary = ordinary[nearest(ordinary, np.vstack([rough, groups]))[0] < len(rough)]
        groups = groups[: affordable(ordinary, len(groups), drawn.mean_variance, settings)]
    fits = []
    for start in range(settings.n_init):
        centres = np.vstack([plus_plus(ordinary, settings.k - len(groups), settings.seed + start), groups])
        full = len(drawn.points) == sample_rows(settings.k)  # else rows repeat so often that few say nothing of all
        if full and drawn.count > MANY_ROWS and SETTLING_ROWS * centres.size <= ONE_TASK_PRODUCTS:
            centres = settle(centres, drawn.mean_variance)
        fits.append(iterate(make_pass(len(centres)), centres, settings, drawn.mean_variance, report))
    return replace(min(fits, key=lambda one: one.inertia), far_groups=len(groups))


def settling_limit(count: int) -> int:
    """Below it lie the hashes of about SETTLING_ROWS of ``count`` rows."""
    return (SETTLING_ROWS << 64) // count


def settling(limit: int, seed: int, ids: Ints, points: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Of a part, the rows whose hash lies below the limit: int32 [rows, p]."""
    return points[keyed_hash(ids, seed) < np.uint64(limit)]


def settled(points: npt.NDArray[np.int32], settings: KMeansSettings, centres: Ints, mean_variance: float) -> Ints:
    return iterate(Pass(points, len(centres)), centres, settings, mean_variance).centres


def affordable(ordinary: npt.NDArray[np.int32], groups: int, mean_variance: float, settings: KMeansSettings) -> int:
    """How many far groups may have a centre, so that the ordinary rows, which get as many fewer, lie not much farther from
    theirs. By fits of the sample: where there are as many centres as clusters, none can be spared."""
    few = replace(settings, k=min(settings.k, ROUGH_CLUSTERS), max_iter=ROUGH_ITERATIONS)

    def inertia(k: int) -> int:
        start = plus_plus(ordinary, k, settings.seed)
        return iterate(Pass(ordinary, len(start)), start, few, mean_variance).inertia

    whole = inertia(few.k) if groups else 0
    spared = min(groups, few.k // 2)
    while spared and inertia(few.k - spared) > PRICE * whole:
        spared //= 2
    return spared


def rough_centres(drawn: SeedingSample, settings: KMeansSettings) -> Ints:
    """Of the sample alone, after a few iterations, without those of a few rows: a far group that the sample happens to hold
    is to be found as the others are."""
    start = plus_plus(drawn.points, min(settings.k, ROUGH_CLUSTERS), settings.seed)
    few = replace(settings, max_iter=ROUGH_ITERATIONS)
    rough = iterate(Pass(drawn.points, len(start)), start, few, drawn.mean_variance)
    stands_for = drawn.count / len(drawn.points)
    many = np.maximum(2, TINY / stands_for)
    return rough.centres[: max(1, int((rough.sizes > many).sum()))]  # by size descending


def fit_here(ids: Ints, points: npt.NDArray[np.int32], settings: KMeansSettings) -> Fit:
    """Everything in this process."""
    drawn = draw_sample(ids, points, settings)

    def settle(centres: Ints, mean_variance: float) -> Ints:
        some = settling(settling_limit(drawn.count), settings.seed, ids, points)
        return settled(some, settings, centres, mean_variance)

    return fit(lambda k: Pass(points, k), lambda look, merge: look(ids, points), drawn, settings, settle)
