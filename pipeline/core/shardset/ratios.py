"""Shares of workers in ratios such as 4:2:1:1, where they are not equal. No Spark."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd
from numbers import Integral

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError

Ratios = tuple[int, ...]
MOST_PARTS = 1 << 14  # of the ratios together, in lowest terms: a group's uneven end is a table of so many numbers


def parse_ratios(text: str) -> Ratios:
    """Of a text like ``4:2:1:1``. Raises UsageError."""
    parts = text.split(":")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        shown = text if len(text) < 80 else f"{text[:80]}..."
        raise UsageError(f"--ratios must be whole numbers with colons between them, such as 4:2:1:1, got {shown!r}")
    return tuple(map(int, parts))


def lowest_terms(ratios: Sequence[int], num_workers: int) -> Ratios | None:
    """The same ratios in smaller numbers; None where all are equal. Raises UsageError where they cannot be dealt in."""
    if len(ratios) != num_workers:
        raise UsageError(f"--ratios must name {num_workers} numbers, one a worker, got {len(ratios)}")
    shown = shortened(ratios)
    if any(isinstance(ratio, bool) or not isinstance(ratio, Integral) or ratio < 1 for ratio in ratios):
        raise UsageError(f"--ratios must be whole numbers of at least 1, got {shown}")
    whole = [int(ratio) for ratio in ratios]
    common = reduce(gcd, whole)
    lowest = tuple(ratio // common for ratio in whole)
    if sum(lowest) > MOST_PARTS:
        raise UsageError(
            f"--ratios must add up to at most {MOST_PARTS:,} in lowest terms, got {shown} with {sum(lowest):,};"
            " round them"
        )
    return None if len(set(lowest)) == 1 else lowest


def shortened(ratios: Sequence[int]) -> str:
    """As people write them, the first few of many."""
    return ":".join(map(str, ratios[:16])) + (":..." if len(ratios) > 16 else "")


def rounded_down(size: int, ratios: Ratios) -> tuple[Ints, Ints]:
    """The shares of so many rows, rounded down, and what is left of each, in parts of sum(ratios): int64 [workers]."""
    total, parts = sum(ratios), np.array(ratios, np.int64)
    rounds, rest = divmod(int(size), total)
    shares, left = np.divmod(rest * parts, total)
    return shares + rounds * parts, left


def rounded_up(sizes: Ints, ratios: Ratios, carry: bool = False) -> npt.NDArray[np.bool_]:
    """Whose share of each group is rounded up, bool [groups, workers]: as many as rows are left over after rounding down,
    those of the largest remainders, of equal ones the lowest worker.

    sizes: int64 [groups]. carry: what rounding has cost a worker in the groups before is added to its remainder, so that its
    rows over all groups come out close to its share too. An exact share stays. O(groups x workers log workers)."""
    up = np.zeros((len(sizes), len(ratios)), np.bool_)
    owed = np.zeros(len(ratios), np.int64)  # in parts of the sum of the ratios
    for group, size in enumerate(np.asarray(sizes).tolist()):
        down, remainders = rounded_down(size, ratios)
        may = np.flatnonzero(remainders)
        rest = remainders + owed
        up[group, may[np.argsort(-rest[may], kind="stable")[: size - int(down.sum())]]] = True
        if carry:
            owed = rest - up[group] * sum(ratios)
    return up


def largest_remainder(sizes: Ints, ratios: Ratios, carry: bool = False) -> Ints:
    """int64 [groups, workers]: every group cut in these ratios, each part its exact share rounded up or down; see
    ``rounded_up``. Exact: in whole numbers."""
    down = [rounded_down(size, ratios)[0] for size in np.asarray(sizes).tolist()]
    return np.array(down, np.int64).reshape(len(sizes), len(ratios)) + rounded_up(sizes, ratios, carry)
