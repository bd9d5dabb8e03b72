"""Shares of workers in ratios such as 4:2:1:1, where they are not equal. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd

import numpy as np

from pipeline.arrays import Ints
from pipeline.errors import UsageError

Ratios = tuple[int, ...]
MOST_PARTS = 1 << 16  # of the ratios together, in lowest terms: a group's uneven end is a table of so many numbers


def parse_ratios(text: str) -> Ratios:
    """Of a text like ``4:2:1:1``. Raises UsageError."""
    parts = text.split(":")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--ratios must be whole numbers with colons between them, such as 4:2:1:1, got {text!r}")
    return tuple(map(int, parts))


def lowest_terms(ratios: Sequence[int], num_workers: int) -> Ratios | None:
    """The same ratios in smaller numbers; None where all are equal. Raises UsageError where they cannot be dealt in."""
    if len(ratios) != num_workers:
        raise UsageError(f"--ratios must name {num_workers} numbers, one a worker, got {len(ratios)}")
    shown = shortened(ratios)
    if any(isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 1 for ratio in ratios):
        raise UsageError(f"--ratios must be whole numbers of at least 1, got {shown}")
    common = reduce(gcd, ratios)
    lowest = tuple(ratio // common for ratio in ratios)
    if sum(lowest) > MOST_PARTS:
        raise UsageError(
            f"--ratios must add up to at most {MOST_PARTS:,} in lowest terms, got {shown} with {sum(lowest):,};"
            " round them"
        )
    return None if len(set(lowest)) == 1 else lowest


def shortened(ratios: Sequence[int]) -> str:
    """As people write them, the first few of many."""
    return ":".join(map(str, ratios[:16])) + (":..." if len(ratios) > 16 else "")


def largest_remainder(sizes: Ints, ratios: Ratios, carry: bool = False) -> Ints:
    """int64 [groups, workers]: every group cut in these ratios, each part its exact share rounded up or down.

    sizes: int64 [groups]. What is left over after rounding down goes to the largest remainders, of equal ones to the lowest
    worker. carry: what rounding has cost a worker in the groups before is added to its remainder, so that its rows over
    all groups come out close to its share too. Exact: in whole numbers."""
    total = sum(ratios)
    floors, remainders = np.divmod(np.asarray(sizes, np.int64)[:, None] * np.array(ratios, np.int64), total)
    left = np.asarray(sizes, np.int64) - floors.sum(axis=1)
    owed = np.zeros(len(ratios), np.int64)  # in parts of ``total``
    for group, wanted in enumerate(left.tolist()):
        rest = remainders[group] + owed
        may = np.flatnonzero(remainders[group])  # an exact share stays; more of the others than there are rows left
        up = may[np.argsort(-rest[may], kind="stable")[:wanted]]
        floors[group, up] += 1
        if carry:
            owed = rest
            owed[up] -= total
    return floors
