"""Unequal shares of workers by name, as studies of skewed sizes use them, in whole numbers."""

from __future__ import annotations

import math

import numpy as np

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.ratios import MOST_PARTS, Ratios, parse_ratios

NAMES = "linear, square, exponential or lognormal:S"
POWERS = {"linear": 1, "square": 2}  # of a worker's number, counted from 1


def named_ratios(text: str, num_workers: int, seed: int = 0) -> Ratios:
    """Return the shares of a name, or of numbers such as ``4:2:1:1``.

    Worker i of n, counted from 1, has a share of i for ``linear``, i^2 for ``square`` and e^i for ``exponential``.
    ``lognormal:S`` draws the shares as e^(S z) with z from the standard normal distribution. Shares whose sum is more
    than 16,384, and those that are not whole numbers, are rounded to whole numbers of at least 1 with about this sum.

    Args:
        text: the name, or the numbers.
        num_workers: n.
        seed: of the draws.

    Raises:
        UsageError: no such name, S is not above 0, or there are no workers, or more than 16,384.
    """
    if num_workers < 1:
        raise UsageError(f"--workers must be at least 1, got {num_workers}")
    if num_workers > MOST_PARTS and text[:1].isalpha():
        raise UsageError(
            f"--ratios {text[:80]} is for at most {MOST_PARTS:,} workers, got {num_workers:,}; leave it out"
        )
    name, colon, parameter = text.partition(":")
    places = np.arange(1, num_workers + 1, dtype=np.float64)
    if name == "lognormal" and colon:
        spread = _spread(parameter)
        logs = spread * generator(seed, Purpose.SIZES).standard_normal(num_workers)
    elif text in POWERS:
        exact = places ** POWERS[text]
        if exact.sum() <= MOST_PARTS:
            return tuple(exact.astype(int).tolist())
        logs = np.log(places) * POWERS[text]
    elif text == "exponential":
        logs = places
    elif text[:1].isalpha():
        raise UsageError(f"--ratios must be numbers such as 4:2:1:1, or {NAMES}, got {text[:80]!r}")
    else:
        return parse_ratios(text)
    shares = np.exp(logs - logs.max())
    # Every worker has at least one part, so the others share what is left.
    parts = np.maximum(1, np.floor(shares / shares.sum() * (MOST_PARTS - num_workers)))
    return tuple(parts.astype(int).tolist())


def _spread(text: str) -> float:
    """Return the S of lognormal:S. Raises UsageError."""
    try:
        spread = float(text)
    except ValueError:
        spread = math.nan
    if not 0 < spread <= 10:
        raise UsageError(
            f"--ratios lognormal:S needs a number S above 0 and at most 10, such as 0.5, got {text[:80]!r}"
        )
    return spread
