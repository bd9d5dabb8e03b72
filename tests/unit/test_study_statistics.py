"""The statistics of a study: against scipy's own tests, against brute force, and against studies whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.support.tiers import only
from trainer.study.analysis.statistics import (
    LEVEL,
    PERMUTATIONS,
    adjust,
    compare,
    correlation_interval,
    curve_spread,
    equivalence_p,
    f_interval,
    paired_t_test,
    power,
    rank_correlation,
    rank_correlation_within,
    sd_ratio,
    skewness,
    skewness_p,
    smallest_ratio,
    spread_p,
    summarise,
)

STUDIES = 1000
ERROR = 3 * math.sqrt(LEVEL * (1 - LEVEL) / STUDIES)  # three standard errors of a rate of false alarms


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def monte_carlo_p(a: np.ndarray, b: np.ndarray) -> float:
    """scipy's own test by drawn null studies, with the Brown-Forsythe statistic."""
    rng = np.random.default_rng(0)
    found = stats.monte_carlo_test(
        (a, b),
        (rng.standard_normal, rng.standard_normal),
        lambda x, y, axis: stats.levene(x, y, center="median", axis=axis).statistic,
        vectorized=True,
        alternative="greater",
    )
    return float(found.pvalue)


def test_a_summary_is_that_of_numpy_and_scipy() -> None:
    values = 0.6 + 0.01 * draws(1, 19)
    found = summarise(values.tolist())
    assert (found.n, found.mean, found.sd) == (19, pytest.approx(values.mean()), pytest.approx(np.std(values, ddof=1)))
    assert found.variance == pytest.approx(found.sd**2)
    t = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.mean_interval == pytest.approx((t.low, t.high))
    assert (found.least, found.most) == (values.min(), values.max())


def test_the_interval_of_a_standard_deviation_has_its_coverage() -> None:
    """The interval of a standard deviation covers it as often as it says."""
    covered = [low <= 1 <= high for low, high in (summarise(row).sd_interval for row in draws(2, STUDIES, 8).tolist())]
    assert np.mean(covered) == pytest.approx(0.95, abs=ERROR)


def test_one_value_has_no_spread() -> None:
    found = summarise([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.sd)


def test_a_comparison_is_made_of_scipys_own_tests() -> None:
    a, b = draws(3, 12), 0.4 * draws(4, 12) + 0.1
    found = compare(a.tolist(), b.tolist(), margin=0.5)
    assert found is not None
    assert found.brown_forsythe_p == stats.levene(a, b, center="median").pvalue
    assert found.spread_p == pytest.approx(monte_carlo_p(a, b), abs=0.02)
    assert found.difference_p == stats.ttest_rel(b, a).pvalue
    assert found.difference == pytest.approx((b - a).mean())
    assert found.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert found.sd_ratio == pytest.approx(a.std(ddof=1) / b.std(ddof=1))
    # the F test of equal variances rejects where the interval of the ratio leaves 1 out
    upper = 2 * min(stats.f.sf(found.sd_ratio**2, 11, 11), stats.f.cdf(found.sd_ratio**2, 11, 11))
    assert (upper < LEVEL) == (not found.sd_ratio_f.low <= 1 <= found.sd_ratio_f.high)


@pytest.mark.parametrize("difference", [-0.4, -0.1, 0.0, 0.2, 0.6])
def test_equivalence_is_the_worse_of_two_one_sided_tests(difference: float) -> None:
    a = draws(5, 15)
    b = a + 0.3 * draws(6, 15) + difference
    above = stats.ttest_1samp(b - a, -0.3, alternative="greater").pvalue
    below = stats.ttest_1samp(b - a, 0.3, alternative="less").pvalue
    assert equivalence_p(b, a, 0.3) == pytest.approx(max(above, below))
    found = compare(a.tolist(), b.tolist(), margin=0.3)
    assert found is not None
    low, high = found.equivalence_interval
    assert (low, high) == pytest.approx(tuple(stats.ttest_rel(b, a).confidence_interval(0.9)))
    assert (found.equivalence_p < LEVEL) == (low > -0.3 and high < 0.3)


def test_the_interval_of_a_correlation_is_that_of_scipy() -> None:
    a, b = draws(8, 19), draws(9, 19)
    theirs = stats.pearsonr(a, b)
    assert correlation_interval(theirs.statistic, 19) == pytest.approx(tuple(theirs.confidence_interval()))
    assert math.isnan(correlation_interval(0.3, 3).low)
    assert math.isnan(correlation_interval(math.nan, 19).low)


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_adjusted_p_values_are_holms(p_values: list[float]) -> None:
    """The k-th smallest of m times m - k + 1, never less than one before it, never more than 1."""
    order = np.argsort(p_values, kind="stable")
    expected, least = [0.0] * len(p_values), 0.0
    for place, at in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[at]))
        expected[at] = least
    assert adjust(p_values) == pytest.approx(expected)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_few_equal_values_prove_no_difference_of_spread(n: int) -> None:
    """Draw accuracies of a few evaluation rows, whose statistics can be beyond those of any normal values."""
    assert spread_p(np.full(3, 0.5), np.array([0.45, 0.5, 0.55])) == 0.5, "2 of the 4 changes of sign of two distances"
    accuracies = np.round(np.random.default_rng(n).standard_normal((400, 2, n)) / 2) * 2
    p = np.array([spread_p(a, b) for a, b in accuracies])
    assert (p < 0.01).mean() <= 0.01
    assert (p < LEVEL).mean() <= LEVEL


def test_ratios_of_what_does_not_spread_are_said_and_not_divided() -> None:
    still, spread = np.full(5, 0.5), draws(7, 5)
    assert sd_ratio(spread, still) == math.inf
    assert sd_ratio(still, spread) == 0
    assert math.isnan(sd_ratio(still, still))
    assert spread_p(still, still) == 1.0
    assert all(math.isnan(end) for ratio in (0.0, math.inf) for end in f_interval(ratio, 5))
    found = compare(still.tolist(), still.tolist(), margin=0.1)
    assert found is not None
    assert (found.difference, found.difference_p, found.equivalence_p) == (0.0, 1.0, 0.0)
    apart = compare(still.tolist(), (still + 0.2).tolist(), margin=0.1)
    assert apart is not None
    assert (apart.difference_p, apart.equivalence_p) == (1.0, 1.0)  # nothing else can be tested
    assert compare([0.1, 0.2], [0.1, 0.2], margin=0.1) is None


def test_the_f_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    a, b = 2 * draws(8, STUDIES, 10), draws(9, STUDIES, 10)
    ends = [f_interval(sd_ratio(x, y), 10) for x, y in zip(a, b, strict=True)]
    assert np.mean([low <= 2 <= high for low, high in ends]) == pytest.approx(0.95, abs=ERROR)


@pytest.mark.full
def test_the_bootstrap_interval_covers_the_true_ratio_about_as_often() -> None:
    """Percentiles of few seeds are known to be short: nine tenths, where 95 % is said of many."""
    a, b = 2 * draws(10, 150, 19), draws(11, 150, 19)
    found = [compare(x.tolist(), y.tolist(), 0.1) for x, y in zip(a, b, strict=True)]
    covered = np.mean([c.sd_ratio_bootstrap.low <= 2 <= c.sd_ratio_bootstrap.high for c in found if c])
    assert 0.86 <= covered <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seeds", only([19], [5, 19, 50]))
def test_one_in_twenty_studies_sees_a_difference_by_chance(seeds: int) -> None:
    a, b = draws(12, STUDIES, seeds), draws(13, STUDIES, seeds)
    spreads = [spread_p(x, y) < LEVEL for x, y in zip(a, b, strict=True)]
    means = [paired_t_test(x, y)[1] < LEVEL for x, y in zip(a, b, strict=True)]
    assert np.mean(spreads) == pytest.approx(LEVEL, abs=ERROR)
    assert np.mean(means) == pytest.approx(LEVEL, abs=ERROR)


@pytest.mark.parametrize("seeds", [5, 19])
def test_means_a_margin_apart_are_equal_once_in_twenty(seeds: int) -> None:
    """Means that differ by the margin are called equal once in twenty."""
    a, b = draws(18, STUDIES, seeds), draws(19, STUDIES, seeds) + 3
    alarms = [equivalence_p(x, y, 3) < LEVEL for x, y in zip(a, b, strict=True)]
    assert np.mean(alarms) == pytest.approx(LEVEL, abs=ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("law", [stats.t(5), stats.skewnorm(4)])
def test_values_that_are_not_normal_give_about_as_many_false_alarms(law: stats.rv_continuous) -> None:
    a, b = law.rvs((2, STUDIES, 19), random_state=22)
    assert 0.02 < np.mean([spread_p(x, y) < LEVEL for x, y in zip(a, b, strict=True)]) < 0.09


@pytest.mark.full
def test_four_comparisons_have_no_more_false_alarms_than_one() -> None:
    """A family of four comparisons has no more false alarms than one."""
    baseline, members = draws(14, STUDIES, 19), draws(15, STUDIES, 4, 19)
    families = [[spread_p(a, b) for b in four] for a, four in zip(baseline, members, strict=True)]
    alarms = [min(family) < LEVEL and min(adjust(family)) < LEVEL for family in families]  # adjusting only raises them
    assert np.mean(alarms) <= LEVEL + ERROR


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "ratio"), only([(9, 3.0)], [(9, 3.0), (50, 1.5)]))
def test_a_planted_ratio_is_found_with_the_power_that_is_stated(seeds: int, ratio: float) -> None:
    a, b = ratio * draws(16, STUDIES, seeds), draws(17, STUDIES, seeds)
    found = np.mean([spread_p(x, y) < LEVEL for x, y in zip(a, b, strict=True)])
    assert found == pytest.approx(power(seeds, ratio), abs=4 * math.sqrt(0.25 / STUDIES))


@pytest.mark.parametrize("seeds", [9, 19, 50])
def test_the_smallest_ratio_is_where_the_power_is_four_fifths(seeds: int) -> None:
    smallest = smallest_ratio(seeds)
    assert smallest is not None
    assert power(seeds, smallest) >= 0.8 > power(seeds, smallest - 0.05)
    stricter = smallest_ratio(seeds, LEVEL / 4)
    assert stricter is not None
    assert stricter > smallest


@pytest.mark.full
def test_of_many_seeds_the_f_distribution_is_as_good_as_drawn_studies() -> None:
    """Beyond 200 values drawn studies would take gigabytes."""
    a, b = draws(30, 199), 1.2 * draws(31, 199)
    assert spread_p(a, b) == pytest.approx(stats.levene(a, b, center="median").pvalue, abs=0.01)
    a, b = draws(32, 1000), 1.2 * draws(33, 1000)
    assert spread_p(a, b) == stats.levene(a, b, center="median").pvalue
    assert power(200, 1.3) == pytest.approx(power(201, 1.3), abs=0.05)


def test_few_pairs_have_no_interval_and_rounding_is_no_spread() -> None:
    """Few pairs have no bootstrap interval and rounding is no spread."""
    found = compare([0.1, 0.2, 0.4], [0.3, 0.1, 0.2], margin=0.1)
    assert found is not None
    assert math.isnan(found.sd_ratio_bootstrap.low)
    rounded = np.full(3, 0.4)
    assert rounded.std() > 0  # its mean is not 0.4
    assert sd_ratio(rounded, draws(34, 3)) == 0


def test_with_three_seeds_nothing_could_be_seen() -> None:
    assert smallest_ratio(3) is None
    assert smallest_ratio(2) is None


def test_the_spread_of_one_point_is_the_brown_forsythe_test() -> None:
    """Spread over a curve is the brown forsythe test where the curve has one point."""
    a, b = draws(18, 11, 1), 3 * draws(19, 11, 1)
    ratio, p = curve_spread(a, b)
    assert p == pytest.approx(stats.levene(a[:, 0], b[:, 0], center="median").pvalue)
    distances = [np.abs(x - np.median(x)).mean() for x in (a, b)]
    assert ratio == pytest.approx(distances[0] / distances[1])


def test_curves_of_one_side_that_does_not_vary_are_tested_alike() -> None:
    a, b = np.array([[0.5], [0.51], [0.52]]), np.full((3, 1), 0.51)
    assert curve_spread(a, b) == (math.inf, pytest.approx(stats.levene(a[:, 0], b[:, 0], center="median").pvalue))
    assert curve_spread(b, a)[0] == 0
    assert curve_spread(b, b)[1] == 1


def test_more_epochs_of_one_difference_show_it_sooner() -> None:
    """Each epoch's noise is its own, so the mean over epochs tells more than the last of them."""
    a, b = draws(20, 9, 12), 2 * draws(21, 9, 12)
    assert curve_spread(a, b)[1] < curve_spread(a[:, -1:], b[:, -1:])[1]


def test_normal_values_are_rarely_called_skewed() -> None:
    """In at most 5 % of studies. A skewness beyond 1 of either side is no sign of it: 8 values often have it."""
    pairs = np.random.default_rng(8).standard_normal((500, 2, 8))
    assert np.mean([skewness_p(a, b) < LEVEL for a, b in pairs]) == pytest.approx(LEVEL, abs=0.03)
    assert np.mean([max(abs(skewness(a)), abs(skewness(b))) > 1 for a, b in pairs]) > 0.2
    skewed = np.array([0.0] * 15 + [5.0, 9.0])
    assert skewness_p(skewed, np.zeros(17)) == pytest.approx(2 * stats.skewtest(skewed).pvalue)
    assert skewness_p(np.zeros(9), np.zeros(9)) == 1.0
    assert np.isnan(skewness_p(skewed[-7:], skewed[-7:]))


def test_a_correlation_of_what_does_not_vary_is_none() -> None:
    x = np.arange(6, dtype=np.float64)
    assert rank_correlation(x, x**3) == pytest.approx(1)
    assert math.isnan(rank_correlation(np.zeros(6), x))
    assert math.isnan(rank_correlation(x[:3], x[:3]))
    assert math.isnan(rank_correlation_within([])[0])
    third = np.array([0.1, 0.1, 0.1])  # whose mean is another number
    assert math.isnan(rank_correlation_within([(third, x[:3]), (third, x[:3])])[0])


def test_a_correlation_within_one_group_is_that_of_scipy() -> None:
    x, y = draws(5, 2, 40)
    y = y + 0.4 * x
    rho, p = rank_correlation_within([(x, y)])
    theirs = stats.spearmanr(x, y)
    assert rho == pytest.approx(theirs.statistic)
    assert abs(p - theirs.pvalue) < 4 * math.sqrt(theirs.pvalue / PERMUTATIONS)
    # and what groups differ by on the whole is no part of it
    shifted = rank_correlation_within([(x[:20] + 90, y[:20] - 7), (x[20:], y[20:])])
    assert shifted == rank_correlation_within([(x[:20], y[:20]), (x[20:], y[20:])])


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "runs"), only([(3, 5)], [(6, 3), (3, 5), (2, 19)]))
def test_one_in_twenty_studies_correlates_evenness_by_chance(groups: int, runs: int) -> None:
    drawn = draws(groups, STUDIES, groups, 2, runs)
    drawn[:, :, 1] = np.abs(drawn[:, :, 1])
    alarms = np.mean([rank_correlation_within([(x, y) for x, y in study])[1] < LEVEL for study in drawn])
    assert abs(alarms - LEVEL) < ERROR
