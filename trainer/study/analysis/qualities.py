"""Correlations over the runs of a setting: do runs on less even shards end further from the others? Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Floats
from trainer.study.analysis import statistics
from trainer.study.analysis.sides import PRIMARY, ComparisonSide

QUALITIES = ("mmd_ratio", "chi_square")
FEWEST = 3  # runs of a member from which deviations from its mean are meaningful


class Correlation(NamedTuple):
    """Spearman's rank correlation.

    Attributes:
        runs: number of values.
        rho: the correlation, from -1 to 1.
        p: p-value of a tested correlation, NaN otherwise.
        adjusted_p: p after Holm's adjustment over all tested correlations.
    """

    runs: int
    rho: float
    p: float = math.nan
    adjusted_p: float = math.nan


@dataclass(frozen=True)
class QualityTest:
    """The correlation between a measure of shards and the distance of runs from their member's median final accuracy.

    ``over_all`` and ``without`` are only shown and not tested, because members differ in more than in evenness.

    Attributes:
        setting: its name.
        quality: the measure of shards.
        least_even: the member with the least even shards by this measure.
        over_all: over all runs of the setting; a single member with very uneven shards can dominate it.
        without: over the runs of all members except ``least_even``.
        within: of deviations from each member's means, so that differences between members do not count; over members
            with at least FEWEST runs whose shards differ in the measure.
    """

    setting: str
    quality: str
    least_even: str
    over_all: Correlation
    without: Correlation
    within: Correlation


def quality_tests(setting: str, members: Mapping[str, ComparisonSide]) -> list[QualityTest]:
    """Return a test per measure of shards: do runs with less even shards end further from their member's median?

    Members with fewer than FEWEST runs for which the measure is known are left out. Without any other member there is
    no test of the measure.

    setting: name of the setting; members: its members by name."""
    tests = []
    for quality in QUALITIES:
        pairs = {
            name: distances
            for name, m in members.items()
            if len((distances := _evenness_and_distance(m, quality))[0]) >= FEWEST
        }
        if pairs:
            least_even = max(pairs, key=lambda name: float(pairs[name][0].mean()))
            others = [pair for name, pair in pairs.items() if name != least_even]
            over_all = _pooled_correlation(list(pairs.values()))
            without = _pooled_correlation(others)
            # Members whose shards are equally even in every run do not contribute to the correlation.
            varying = [pair for pair in pairs.values() if np.ptp(pair[0])]
            runs = sum(len(x) for x, _ in varying)
            within = Correlation(runs, *statistics.rank_correlation_within(varying))
            tests.append(QualityTest(setting, quality, least_even, over_all, without, within))
    return tests


def _evenness_and_distance(member: ComparisonSide, quality: str) -> tuple[Floats, Floats]:
    """Return the points of a correlation between shards and accuracy, as two arrays [runs].

    The first is a measure of each run's shards, the second the absolute difference between the run's final accuracy and
    the median over all runs of the member. Runs without a final accuracy or without the measure are left out.

    member: one row of a comparison, such as a strategy, with its runs; quality: the measure, one of QUALITIES."""
    pairs = [
        (record["sharding"][quality], record[PRIMARY])
        for record in member.records
        if record[PRIMARY] is not None and record["sharding"].get(quality) is not None
    ]
    if not pairs:
        return np.zeros(0), np.zeros(0)
    measures, accuracy = np.array(pairs).T
    return measures, np.abs(accuracy - np.median(accuracy))


def _pooled_correlation(pairs: Sequence[tuple[Floats, Floats]]) -> Correlation:
    """Return the correlation over all runs of several members together, without a test."""
    if not pairs:
        return Correlation(0, math.nan)
    x = np.concatenate([measures for measures, _ in pairs])
    y = np.concatenate([distances for _, distances in pairs])
    return Correlation(len(x), statistics.rank_correlation(x, y))


def adjust_quality_p_values(tests: list[QualityTest]) -> list[QualityTest]:
    """Adjust the p-values over all settings and measures, in place."""
    testable = [at for at, test in enumerate(tests) if not math.isnan(test.within.p)]
    for at, p in zip(testable, statistics.adjust([tests[at].within.p for at in testable]), strict=True):
        tests[at] = replace(tests[at], within=tests[at].within._replace(adjusted_p=p))
    return tests
