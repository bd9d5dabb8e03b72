"""Components of variance in a crossed design: every shard set is trained with every seed of all else. Pure.

Where shards and all else change together from seed to seed, nobody can say which of them makes the spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

from pipeline.core.arrays import Floats
from trainer.study.analysis.statistics import LEVEL, NO_INTERVAL, NOTHING, Interval


class Components(NamedTuple):
    """The standard deviations that shard sets, seeds of all else, and their combination cause.

    Attributes:
        sets, seeds: numbers of shard sets, and of seeds of all else.
        set_sd: estimated effect of the set; 0 if sets differ less than chance makes them.
        set_interval: 95 %, exact for the ratio of its variance to rest_sd squared.
        set_p: p-value of no effect of the set, by the F test; NaN, as the interval, if the combination causes nothing.
        adjusted_set_p: adjusted over all members and settings of the study.
        seed_sd: estimated effect of the other seeds.
        rest_sd: of the combination, with everything that a repetition of the run would change.
        set_means: mean of each set over the seeds that all sets have, set after set.
    """

    sets: int
    seeds: int
    set_sd: float
    set_interval: Interval
    set_p: float
    seed_sd: float
    rest_sd: float
    set_means: tuple[float, ...]
    adjusted_set_p: float = math.nan


def components_of(values: Mapping[int, float], shards: Mapping[int, str], sets: int) -> Components | None:
    """Return the components of values by run seed.

    None unless two sets and two seeds have a value in all combinations, and all sets differ: equal sets have no effect.

    Args:
        values: by run seed.
        shards: digests of the shards, by run seed.
        sets: number of shard sets; run seed r has set r % sets and seed r // sets of all else.
    """
    if sets < 2 or len({shards[seed] for seed in values}) < sets:
        return None
    rows = sorted({seed // sets for seed in values})
    complete = [row for row in rows if all(row * sets + number in values for number in range(sets))]
    if len(complete) < 2:
        return None
    table = np.array([[values[row * sets + number] for row in complete] for number in range(sets)])
    return crossed_components(table)


def crossed_components(table: Floats) -> Components:
    """Return the components of values [sets, seeds], by the analysis of variance of two crossed random effects."""
    sets, seeds = table.shape
    mean = table.mean()
    set_means = table.mean(axis=1, keepdims=True)
    seed_means = table.mean(axis=0, keepdims=True)
    rest = (sets - 1) * (seeds - 1)
    set_square = seeds * float(((set_means - mean) ** 2).sum()) / (sets - 1)
    seed_square = sets * float(((seed_means - mean) ** 2).sum()) / (seeds - 1)
    rest_square = float(((table - set_means - seed_means + mean) ** 2).sum()) / rest
    # Smaller mean squares are the rounding of values that do not vary.
    set_square, seed_square, rest_square = (
        square if square > NOTHING**2 else 0.0 for square in (set_square, seed_square, rest_square)
    )
    set_sd = math.sqrt(max(0.0, set_square - rest_square) / seeds)
    seed_sd = math.sqrt(max(0.0, seed_square - rest_square) / sets)
    means = tuple(set_means.ravel().tolist())
    if not rest_square:
        return Components(sets, seeds, set_sd, NO_INTERVAL, math.nan, seed_sd, 0.0, means)
    ratio = set_square / rest_square
    # The ratio of mean squares, over 1 + seeds * (set variance / rest variance), has the F distribution.
    ends = [
        (ratio / float(stats.f.ppf(share, sets - 1, rest)) - 1) / seeds * rest_square
        for share in (1 - LEVEL / 2, LEVEL / 2)
    ]
    low, high = (math.sqrt(max(0.0, end)) for end in ends)
    p = float(stats.f.sf(ratio, sets - 1, rest))
    return Components(sets, seeds, set_sd, Interval(low, high), p, seed_sd, math.sqrt(rest_square), means)
