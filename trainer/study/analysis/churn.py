"""Churn: the share of evaluation images on which the models of two seeds disagree. Pure.

Two members can have the same accuracy and spread although the models of one of them change far more from seed to seed.
Shapes: S seeds, N evaluation images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Floats, Ints
from trainer.study.analysis.statistics import FEWEST_SEEDS, NO_INTERVAL, Interval, mean_interval, sign_flip_p


@dataclass(frozen=True)
class Churn:
    """The churn of a member, and its difference from the baseline's over their common seeds.

    Attributes:
        runs: S.
        share: mean over all pairs of seeds.
        interval: 95 %, by the jackknife over seeds, because each seed is in S - 1 pairs.
        difference: this member's share minus the baseline's; NaN for the baseline, and for fewer than three seeds.
        p: p-value of an equal share, by permutations that exchange the two models of a seed; NaN likewise.
        adjusted_p: p after Holm's adjustment over the study.
    """

    runs: int
    share: float
    interval: Interval
    difference: float = math.nan
    p: float = math.nan
    adjusted_p: float = math.nan


def churn_of(predictions: Mapping[int, Ints], baseline: Mapping[int, Ints] | None) -> Churn | None:
    """Return the churn of a member; None for fewer than two runs.

    Args:
        predictions: by seed, each [N].
        baseline: the baseline's predictions; None for the baseline itself.
    """
    if len(predictions) < 2:
        return None
    shares = disagreement(list(predictions.values()))
    result = Churn(len(shares), mean_of_pairs(shares), jackknife_interval(shares))
    common = [seed for seed in predictions if seed in (baseline or {})]
    if baseline is None or len(common) < FEWEST_SEEDS:
        return result
    both = disagreement([baseline[seed] for seed in common] + [predictions[seed] for seed in common])
    difference, p = compare_churn(both)
    return Churn(result.runs, result.share, result.interval, difference, p)


def disagreement(predictions: Sequence[Ints]) -> Floats:
    """Return the share of images on which two models disagree, for all pairs of models: [models, models]."""
    table = np.stack(predictions)
    # The comparison of all pairs is bound by memory: one or two bytes per class instead of eight.
    table = table.astype(np.min_scalar_type(table.max(initial=0)))
    return np.array([(table != row).mean(axis=1) for row in table])


def mean_of_pairs(shares: Floats) -> float:
    """Return the mean of a symmetric matrix with a diagonal of zeros over all pairs of different models."""
    count = len(shares)
    return float(shares.sum() / (count * (count - 1)))


def jackknife_interval(shares: Floats) -> Interval:
    """Return the 95 % interval of the mean over pairs of seeds, from its values without one seed."""
    count = len(shares)
    if count < FEWEST_SEEDS:
        return NO_INTERVAL
    without = (shares.sum() - 2 * shares.sum(axis=1)) / ((count - 1) * (count - 2))
    # Pseudo-values, whose mean is the share and whose spread is its standard error.
    return mean_interval(count * mean_of_pairs(shares) - (count - 1) * without)


def compare_churn(shares: Floats) -> tuple[float, float]:
    """Return the difference of churn of the second half of the models from the first, and its p-value.

    If both members had the same models, the two models of a seed could be exchanged. The difference changes with these
    exchanges as a sum of one term per seed changes with the signs of its terms, so that this is a test by sign flips.

    shares: [2 S, 2 S], of the baseline's models and then the member's, in the same order of seeds."""
    half = len(shares) // 2
    within = shares[half:, half:] - shares[:half, :half]
    across = shares[:half, half:] - shares[half:, :half]
    terms = within.sum(axis=1) - across.sum(axis=1)
    return float(within.sum() / (half * (half - 1))), sign_flip_p(terms)
