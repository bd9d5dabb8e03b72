"""Ratios of standard deviations of several studies: against published ones, and pooled. Pure.

The logarithm of a ratio of the standard deviations of n normal values each is half the logarithm of a variable with the
F distribution. It is symmetric, and its variance is trigamma((n - 1) / 2) / 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

from trainer.study.analysis.results import Analysis
from trainer.study.analysis.sides import PRIMARY, ComparisonSide
from trainer.study.analysis.statistics import LEVEL, NO_INTERVAL, Interval

POINTS = 4000  # of a distribution's quantiles, over which its mean is taken
BASELINE = "random"  # the way of sharding to which pooled ratios refer
FEWEST_STUDIES = 2  # that are pooled


class RatioOfRatios(NamedTuple):
    """A ratio of standard deviations over another one. p: p-value of equal true ratios."""

    value: float
    interval: Interval
    p: float


class StudyRatio(NamedTuple):
    """A ratio of standard deviations in a study of n pairs of runs."""

    study: str
    ratio: float
    n: int


class PooledRatio(NamedTuple):
    """The common ratio of several studies.

    Attributes:
        ratio: mean of the logarithms, weighted by their inverse variances.
        interval: 95 %, by the normal distribution of the logarithm.
        p: p-value of a ratio of 1.
        heterogeneity_p: p-value of equal true ratios in all studies, by Cochran's Q; NaN for a single study.
    """

    ratio: float
    interval: Interval
    p: float
    heterogeneity_p: float


class PooledWay(NamedTuple):
    """The ratios of a way of sharding in several studies, and their common one.

    Attributes:
        name: of the way of sharding.
        vary: what seeds change in these studies.
        studies: one per study and setting.
        pooled: their common ratio. Without interval and p-value if the studies differ significantly.
        largest: the study with the most pairs, and its side of the comparison.
    """

    name: str
    vary: tuple[str, ...]
    studies: list[StudyRatio]
    pooled: PooledRatio
    largest: tuple[str, ComparisonSide]


def pool_studies(studies: Mapping[str, Analysis]) -> list[PooledWay]:
    """Pool the ratios of standard deviations of each way of sharding over several studies.

    Only studies whose seeds change the same things are pooled, since the others measure another standard deviation.
    Studies with another baseline than random, or of another axis, are left out. A study with several settings counts
    once per setting. If the ratios of the studies differ significantly, they have no common interval and p-value."""
    ratios: dict[tuple[str, tuple[str, ...]], list[tuple[StudyRatio, ComparisonSide]]] = {}
    for study, analysis in studies.items():
        if (analysis.compared, analysis.baseline) == ("sharding", BASELINE):
            for member in (member for setting in analysis.settings for member in setting.members.values()):
                comparison = member.comparisons[PRIMARY]
                if comparison and 0 < comparison.sd_ratio < math.inf:
                    ratio = StudyRatio(study, comparison.sd_ratio, comparison.n)
                    ratios.setdefault((member.name, analysis.vary), []).append((ratio, member))
    # Studies count as independent. They have seeds in common, and some also data and models, but differ in epochs, norm
    # or images, so that the correlation of their ratios is not known.
    ways = []
    for (name, vary), some in ratios.items():
        of_studies = [ratio for ratio, _ in some]
        if len({each.study for each in of_studies}) < FEWEST_STUDIES:
            continue
        pooled = pool(of_studies)
        if pooled.heterogeneity_p < LEVEL:
            pooled = pooled._replace(interval=NO_INTERVAL, p=math.nan)
        ratio, member = max(some, key=lambda pair: pair[0].n)
        ways.append(PooledWay(name, vary, of_studies, pooled, (ratio.study, member)))
    return ways


def compare_ratios(first: float, n: int, second: float, m: int) -> RatioOfRatios:
    """Compare a ratio of the sds of n values each with another one of m values each, by exact F distributions.

    Whether two intervals overlap is no test: with overlapping ones, the ratios can differ significantly."""
    difference = 2 * math.log(first / second)
    # The difference of two logarithms of F variables: the mean over quantiles of one of the distribution of the other.
    quantiles = np.log(stats.f.ppf((np.arange(POINTS) + 0.5) / POINTS, m - 1, m - 1))

    def share_below(value: float) -> float:
        return float(stats.f.cdf(np.exp(value + quantiles), n - 1, n - 1).mean())

    tail = share_below(-abs(difference))
    half = optimize.brentq(lambda value: share_below(value) - (1 - LEVEL / 2), 0, 200) / 2
    value = first / second
    return RatioOfRatios(value, Interval(value * math.exp(-half), value * math.exp(half)), min(1.0, 2 * tail))


def pool(ratios: Sequence[StudyRatio]) -> PooledRatio:
    """Return the common ratio of at least one study. Every ratio must be positive and finite."""
    logarithms = np.log([each.ratio for each in ratios])
    weights = np.array([2 / special.polygamma(1, (each.n - 1) / 2) for each in ratios])
    mean = float(logarithms @ weights / weights.sum())
    error = 1 / math.sqrt(weights.sum())
    half = float(stats.norm.ppf(1 - LEVEL / 2)) * error
    q = float(weights @ (logarithms - mean) ** 2)
    heterogeneity_p = float(stats.chi2.sf(q, len(ratios) - 1)) if len(ratios) > 1 else math.nan
    interval = Interval(math.exp(mean - half), math.exp(mean + half))
    return PooledRatio(math.exp(mean), interval, float(2 * stats.norm.sf(abs(mean) / error)), heterogeneity_p)
