"""The statistics of runs with many seeds: spread, differences of means, equivalence, and power. Pure.

All tests are from scipy and statsmodels. Spread is compared by the Brown-Forsythe statistic (Levene's about the
median), means by paired t-tests on equal seeds, equivalence by two one-sided paired t-tests. The p-values of a family
are adjusted by Holm's method.

With the F distribution, the usual reference, the Brown-Forsythe test is too conservative for few values: without any
difference p < 0.05 occurs in 0.6 % of studies of 5 seeds, 3.8 % of 19, 4.4 % of 50. Its p-value here is therefore the
share of simulated studies of normal values without a difference that reach the statistic. For values that are not
normal this is as good as the F distribution.

"sd" is the standard deviation with n - 1, "variance" its square. The columns that Provatas et al. (2021) call variance
are standard deviations."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import stats

from pipeline.core.arrays import Floats

LEVEL = 0.05  # significance level of every family of tests; confidence intervals have the level 1 - LEVEL
POWER = 0.8  # a study can detect a difference if it finds it with at least this probability
RESAMPLES = 4000
STUDIES = 2000  # simulated per power
NULL_STUDIES = 50_000  # simulated without a difference, for p-values
PERMUTATIONS = 4000  # of runs within their groups
LARGEST_RATIO = 64.0
NOTHING = 1e-12  # accuracies and losses that differ by less are equal
FEWEST_RESAMPLED = 8  # pairs of seeds; with fewer, bootstrap intervals are much too short
FEWEST_DISTINCT = 3  # values; with so few, or half of all, simulated p-values of spread are much too low
FEWEST_SEEDS = 3  # of a comparison: the distances of two values from their median are always equal
FEWEST_SKEWED = 8  # values of scipy's test of skewness
FLIPS = 9999  # random changes of signs; fewer than 14 values have fewer than that, which are all tried
BATCH = 500  # changes of signs that are held in memory at once
MANY = 200  # values from which the F distribution is as good as simulation, which would need much memory


class Interval(NamedTuple):
    """The ends of a confidence interval, of 95 % unless stated otherwise."""

    low: float
    high: float


NO_INTERVAL = Interval(math.nan, math.nan)


@dataclass(frozen=True)
class MeasureSummary:
    """The summary of a measure over seeds.

    Attributes:
        n: number of seeds.
        mean: over seeds.
        mean_interval: by the t distribution.
        sd: with n - 1.
        sd_interval: by the chi-square distribution, for normal values.
        variance: square of sd.
        least: smallest value.
        most: largest value.
    """

    n: int
    mean: float
    mean_interval: Interval
    sd: float
    sd_interval: Interval
    variance: float
    least: float
    most: float


@dataclass(frozen=True)
class Comparison:
    """A comparison of a member with the baseline over their common seeds.

    Attributes:
        n: pairs of equal seeds.
        sd_ratio: sd of the baseline / sd of the member; 1.5 means that the baseline's sd is 1.5 times the member's.
        sd_ratio_f: interval of sd_ratio by the F distribution.
        sd_ratio_bootstrap: interval of sd_ratio by the bootstrap over seeds.
        distance_ratio: the same ratio for mean distances from the median, which spread_p tests. If a few runs are far
            off, one of the two ratios can be above 1 and the other below.
        spread_p: p-value of equal spread, see the module.
        brown_forsythe_p: the same by the F distribution.
        difference: mean of the member minus mean of the baseline.
        difference_interval: 95 % interval of the difference, by a paired t-test.
        difference_p: p-value of equal means, by the same test.
        equivalence_p: p-value of means that differ by the margin or more (TOST).
        equivalence_interval: 90 % interval of the difference: equivalence_p is below 0.05 where it is within the margin.
        correlation: between the pairs; if it is positive, pairing by seed makes the tests more powerful.
        skewness: of the side whose values are more skewed.
        skewness_p: p-value of two sides of normal values, by the skewness of that side; NaN for fewer than 8 pairs.
        flipped_spread_p: p-value of equal distances from the medians, by exchanges of the two distances of a seed.
        flipped_difference_p: p-value of equal means, by exchanges of the two values of a seed.
        adjusted_spread_p: spread_p after Holm's adjustment over its family; NaN before.
        adjusted_difference_p: difference_p, likewise.
        adjusted_equivalence_p: equivalence_p, likewise.
    """

    n: int
    sd_ratio: float
    sd_ratio_f: Interval
    sd_ratio_bootstrap: Interval
    distance_ratio: float
    spread_p: float
    brown_forsythe_p: float
    difference: float
    difference_interval: Interval
    difference_p: float
    equivalence_p: float
    equivalence_interval: Interval
    correlation: float
    skewness: float
    skewness_p: float
    flipped_spread_p: float
    flipped_difference_p: float
    adjusted_spread_p: float = math.nan
    adjusted_difference_p: float = math.nan
    adjusted_equivalence_p: float = math.nan

    @property
    def steadier(self) -> bool | None:
        """True if the member varies less, False if it varies more, None if the two ratios disagree.

        Meaningful only if the spreads differ significantly."""
        less = self.distance_ratio > 1
        return less if less == (self.sd_ratio > 1) else None


def summarise(values: Sequence[float], *, independent: bool = True) -> MeasureSummary:
    """Return the summary of at least one value. Fields that need two values are NaN for one.

    independent: whether the values are; if not, both intervals are NaN."""
    x = np.asarray(values, float)
    n = len(x)
    mean = float(x.mean())
    if n < 2:
        return MeasureSummary(n, mean, NO_INTERVAL, math.nan, NO_INTERVAL, math.nan, mean, mean)
    sd = _sd(x)
    least = float(x.min())
    most = float(x.max())
    # The distributions of both intervals are of independent values.
    if not independent:
        return MeasureSummary(n, mean, NO_INTERVAL, sd, NO_INTERVAL, sd**2, least, most)
    low, high = stats.chi2.ppf([1 - LEVEL / 2, LEVEL / 2], n - 1)
    sd_interval = Interval(sd * math.sqrt((n - 1) / low), sd * math.sqrt((n - 1) / high))
    return MeasureSummary(n, mean, mean_interval(x), sd, sd_interval, sd**2, least, most)


def mean_interval(x: Floats) -> Interval:
    """Return the 95 % interval of the mean of two or more values by the t distribution."""
    mean = float(x.mean())
    half = float(stats.t.ppf(1 - LEVEL / 2, len(x) - 1)) * _sd(x) / math.sqrt(len(x))
    return Interval(mean - half, mean + half)


def sign_flip_p(x: Floats) -> float:
    """Return the p-value of values that are symmetric about 0: the share of changes of their signs with as large a sum.

    Valid for any distribution, skewed ones included. 1 if all values are 0."""
    if not np.abs(x).max(initial=0) > NOTHING:
        return 1.0
    rng = np.random.default_rng(len(x))
    # In batches, because scipy otherwise holds the values of all changes at once.
    result = stats.permutation_test(
        (x,), _mean, permutation_type="samples", vectorized=True, n_resamples=FLIPS, batch=BATCH, rng=rng
    )
    return float(result.pvalue)


def _mean(x: Floats, axis: int) -> Floats:
    return np.asarray(x.mean(axis=axis))


def skewness(x: Floats) -> float:
    """Return the sample skewness, 0 for equal values and for fewer than three."""
    return float(stats.skew(x, bias=False)) if len(x) > 2 and _sd(x) else 0.0


def skewness_p(a: Floats, b: Floats) -> float:
    """Return the p-value of two sides of normal values, by the side that is more skewed.

    NaN for fewer than 8 pairs, in which the skewness of normal values is often beyond 1."""
    if len(a) < FEWEST_SKEWED:
        return math.nan
    ps = [float(stats.skewtest(x).pvalue) if _sd(x) else 1.0 for x in (a, b)]
    return min(1.0, len(ps) * min(ps))


def compare(baseline: Sequence[float], member: Sequence[float], margin: float) -> Comparison | None:
    """Compare values on equal seeds. Returns None for fewer than three pairs.

    Args:
        baseline: values of the baseline.
        member: values of the member, in the same order of seeds.
        margin: of equivalence.
    """
    a = np.asarray(baseline, float)
    b = np.asarray(member, float)
    n = len(a)
    # Two values have equal distances from their median, so that the Brown-Forsythe statistic is undefined.
    if n < FEWEST_SEEDS:
        return None
    distances = [np.abs(x - np.median(x)) for x in (a, b)]
    ratio = sd_ratio(a, b)
    interval, difference_p = paired_t_test(b, a)
    return Comparison(
        n=n,
        sd_ratio=ratio,
        sd_ratio_f=f_interval(ratio, n),
        sd_ratio_bootstrap=_bootstrap(a, b),
        distance_ratio=_distance_ratio(a, b),
        spread_p=spread_p(a, b),
        brown_forsythe_p=brown_forsythe(a, b)[1],
        difference=float((b - a).mean()),
        difference_interval=interval,
        difference_p=difference_p,
        equivalence_p=equivalence_p(b, a, margin),
        equivalence_interval=paired_t_test(b, a, 2 * LEVEL)[0],
        # Undefined if either side has equal values for all seeds.
        correlation=float(np.corrcoef(a, b)[0, 1]) if _sd(a) and _sd(b) else math.nan,
        skewness=max(map(skewness, (a, b)), key=abs),
        skewness_p=skewness_p(a, b),
        flipped_spread_p=sign_flip_p(distances[0] - distances[1]),
        flipped_difference_p=sign_flip_p(b - a),
    )


def correlation_interval(correlation: float, n: int) -> Interval:
    """Return the 95 % interval of the correlation of n normal pairs by Fisher's transformation; NaN for fewer than four."""
    if n < 4 or not abs(correlation) < 1:
        return NO_INTERVAL
    half = float(stats.norm.ppf(1 - LEVEL / 2)) / math.sqrt(n - 3)
    return Interval(math.tanh(math.atanh(correlation) - half), math.tanh(math.atanh(correlation) + half))


def sd_ratio(a: Floats, b: Floats) -> float:
    """Return sd(a) / sd(b): NaN if both are 0, infinite if only sd(b) is."""
    above = _sd(a)
    below = _sd(b)
    return above / below if below else (math.inf if above else math.nan)


def _distance_ratio(a: Floats, b: Floats) -> float:
    """Return the ratio of mean distances from the medians, with the special values of ``sd_ratio``."""
    above, below = (float(np.abs(x - np.median(x)).mean()) if _sd(x) else 0.0 for x in (a, b))
    return above / below if below else (math.inf if above else math.nan)


def _sd(x: Floats) -> float:
    """Return the sd with n - 1, exactly 0 for equal values, whose computed mean can differ from them by rounding."""
    return float(x.std(ddof=1)) if float(np.ptp(x)) > NOTHING else 0.0


def f_interval(ratio: float, n: int) -> Interval:
    """Return the interval of a ratio of two sds of n normal values each.

    (ratio / true ratio)^2 has the F distribution. NaN if a side does not vary, as normal values do."""
    if not 0 < ratio < math.inf:
        return NO_INTERVAL
    low, high = stats.f.ppf([1 - LEVEL / 2, LEVEL / 2], n - 1, n - 1)
    return Interval(ratio / math.sqrt(low), ratio / math.sqrt(high))


def spread_p(a: Floats, b: Floats) -> float:
    """Return the p-value of equal spread of two samples of equal size; 1 if neither varies.

    It is simulated with normal values, among which none are equal. Few distinct values, as of few evaluation rows, can
    reach statistics that the simulation never does, so that flipped signs give the least p-value then."""
    statistic, p = brown_forsythe(a, b)
    if len(a) >= MANY:
        return p
    simulated = float(_p_values(np.array([statistic]), len(a))[0])
    distinct = min(len(np.unique(x)) for x in (a, b))
    if distinct == len(a) or distinct > max(FEWEST_DISTINCT, len(a) / 2):
        return simulated
    distances = [np.abs(x - np.median(x)) for x in (a, b)]
    return max(simulated, sign_flip_p(distances[0] - distances[1]))


def brown_forsythe(a: Floats, b: Floats) -> tuple[float, float]:
    """Return the Brown-Forsythe statistic, and its p-value by the F distribution.

    They are (0, 1) if the distances from the medians do not vary and are equal on both sides."""
    if not _sd(a) and not _sd(b):
        return 0.0, 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        result = stats.levene(a, b, center="median")
    return (0.0, 1.0) if math.isnan(result.statistic) else (float(result.statistic), float(result.pvalue))


@lru_cache(maxsize=64)
def _null_statistics(n: int) -> Floats:
    """Return the statistics of NULL_STUDIES simulated pairs of n normal values with equal spread, ascending."""
    draw = np.random.default_rng([n, NULL_STUDIES]).standard_normal((2, n, NULL_STUDIES))
    return np.sort(stats.levene(draw[0], draw[1], center="median", axis=0).statistic)


def _p_values(statistics: Floats, n: int) -> Floats:
    """Return the share of studies without a difference that reach each statistic.

    Never 0, because the sample is finite."""
    null = _null_statistics(n)
    return np.asarray((1 + len(null) - np.searchsorted(null, statistics)) / (1 + len(null)))


def equivalence_p(a: Floats, b: Floats, margin: float) -> float:
    """Return the p-value of means that differ by ``margin`` or more, by two one-sided paired t-tests.

    If all pairs differ by the same amount, such as runs with equal bits, it is 0 within the margin, and else 1."""
    from statsmodels.stats.weightstats import ttost_paired

    if not _sd(a - b):
        return 0.0 if abs(float((a - b).mean())) < margin else 1.0
    return float(ttost_paired(a, b, -margin, margin)[0])


def adjust(p_values: Sequence[float]) -> list[float]:
    """Return a family's p-values, adjusted by Holm's method."""
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    gc.freeze()  # multipletests runs a garbage collection, which took three quarters of an analysis
    try:
        return [float(p) for p in multipletests(p_values, alpha=LEVEL, method="holm")[1]]
    finally:
        gc.unfreeze()


def curve_deviations(curves: Floats) -> Floats:
    """Return the mean distance of each run's curve from the median curve, its spread over the whole run: [seeds].

    The Brown-Forsythe test compares means of such distances at one epoch; over all epochs it is the same test.
    ``curves`` is [seeds, epochs]."""
    return np.asarray(np.abs(curves - np.median(curves, axis=0)).mean(axis=1))


def curve_spread(baseline: Floats, member: Floats) -> tuple[float, float]:
    """Compare the spread of curves [seeds, epochs].

    Returns the ratio of their mean distances from the median curve, the baseline's over the member's, and the
    p-value."""
    a = curve_deviations(baseline)
    b = curve_deviations(member)
    ratio = float(a.mean() / b.mean()) if b.any() else (math.inf if a.any() else math.nan)
    return ratio, float(stats.ttest_ind(a, b).pvalue) if _sd(a) or _sd(b) else 1.0


def rank_correlation(x: Floats, y: Floats) -> float:
    """Return Spearman's rank correlation. NaN with fewer than four values, or if one side does not vary."""
    if len(x) < 4 or not np.ptp(x) or not np.ptp(y):
        return math.nan
    return float(stats.spearmanr(x, y).statistic)


def rank_correlation_within(groups: Sequence[tuple[Floats, Floats]]) -> tuple[float, float]:
    """Return Spearman's rank correlation of x and y within groups, and its p-value.

    x and y are taken relative to the mean of their group, so that differences between groups do not count. The p-value
    is the share of permutations of y within groups with at least the same absolute correlation. The usual p-value would
    give twice the false alarms with a few values per group, because each group has one degree of freedom less than
    values. Both results are NaN with fewer than four values, or if x or y does not vary.

    groups: arrays (x, y) of equal length per group."""
    if not groups:
        return math.nan, math.nan
    x = np.concatenate([_centred(x) for x, _ in groups])
    y = np.concatenate([_centred(y) for _, y in groups])
    if len(x) < 4 or not np.ptp(x) or not np.ptp(y):
        return math.nan, math.nan
    first = stats.rankdata(x) - (len(x) + 1) / 2
    second = stats.rankdata(y) - (len(x) + 1) / 2
    # Permuting ranks within groups keeps the differences between groups out of the test.
    permuted_sums = np.zeros(PERMUTATIONS)
    at = 0
    rng = np.random.default_rng(len(x))
    for group, _ in groups:
        of_group = slice(at, at := at + len(group))
        permuted_sums += rng.permuted(np.tile(second[of_group], (PERMUTATIONS, 1)), axis=1) @ first[of_group]
    observed = float(first @ second)
    # The tolerance counts permutations that equal the result up to rounding.
    as_much = int((np.abs(permuted_sums) >= abs(observed) * (1 - NOTHING)).sum())
    rho = observed / math.sqrt(float(first @ first) * float(second @ second))
    return rho, (1 + as_much) / (1 + PERMUTATIONS)


def _centred(x: Floats) -> Floats:
    """Return x minus its mean, exactly 0 for equal values, whose computed mean can differ from them by rounding."""
    return x - x.mean() if float(np.ptp(x)) > NOTHING else np.zeros(len(x))


@lru_cache(maxsize=256)
def power(n: int, ratio: float, level: float = LEVEL) -> float:
    """Return the share of studies of n seeds that detect a true sd ratio of normal values at a significance level.

    It is estimated from STUDIES simulated studies or, for more than MANY seeds, computed for the F test."""
    if n > MANY:
        return _power_of_f(n, ratio, level)
    draw = np.random.default_rng([n, STUDIES]).standard_normal((2, n, STUDIES))
    statistics = stats.levene(draw[0] * ratio, draw[1], center="median", axis=0).statistic
    return float((_p_values(statistics, n) < level).mean())


def _power_of_f(n: int, ratio: float, level: float) -> float:
    """Return the power of the two-sided F test for two samples of n normal values.

    It is close to the power of the Brown-Forsythe test for more than MANY values, and slightly higher.

    ratio: true ratio of the standard deviations; level: of significance."""
    law = stats.f(n - 1, n - 1)
    squared = ratio**2
    low, high = law.ppf([level / 2, 1 - level / 2])
    return float(law.cdf(low / squared) + law.sf(high / squared))


@lru_cache(maxsize=256)
def smallest_ratio(n: int, level: float = LEVEL) -> float | None:
    """Return the smallest true sd ratio that n seeds detect with POWER, rounded up to two decimals.

    None if that is more than LARGEST_RATIO, or n is less than 3."""
    low = 1.0
    high = LARGEST_RATIO
    if n < 3 or power(n, high, level) < POWER:
        return None
    while high - low > 0.005:
        # Bisection on a log scale, since power grows with the ratio.
        middle = math.sqrt(low * high)
        low, high = (low, middle) if power(n, middle, level) >= POWER else (middle, high)
    return math.ceil(100 * high) / 100


def paired_t_test(b: Floats, a: Floats, level: float = LEVEL) -> tuple[Interval, float]:
    """Return the interval with the confidence 1 - ``level`` and the p-value of the mean of b - a, by a paired t-test.

    If all pairs differ by the same amount, nothing can be tested: the p-value is 1 and the interval is that amount."""
    if not _sd(b - a):
        mean = float((b - a).mean())
        return Interval(mean, mean), 1.0
    result = stats.ttest_rel(b, a)
    low, high = result.confidence_interval(1 - level)
    return Interval(float(low), float(high)), float(result.pvalue)


def _bootstrap(a: Floats, b: Floats) -> Interval:
    """Return the percentile interval of sd(a) / sd(b) by a bootstrap that resamples pairs of equal seed.

    NaN with fewer than FEWEST_RESAMPLED pairs, or if one side does not vary."""
    if len(a) < FEWEST_RESAMPLED or not _sd(a) or not _sd(b):
        return NO_INTERVAL

    def log_ratio(x: Floats, y: Floats, axis: int) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(x.std(axis=axis, ddof=1)) - np.log(y.std(axis=axis, ddof=1)))

    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a resample of one repeated seed has an sd of 0, and an infinite logarithm
        resampled = stats.bootstrap(
            (a, b), log_ratio, paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile", rng=rng
        ).bootstrap_distribution
    # Resamples without spread are left out; scipy's own interval would be NaN because of them.
    low, high = np.quantile(resampled[np.isfinite(resampled)], [LEVEL / 2, 1 - LEVEL / 2])
    return Interval(float(np.exp(low)), float(np.exp(high)))
