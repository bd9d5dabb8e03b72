"""Unequal shares of workers, in ratios such as 4:2:1:1. No Spark."""

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
MOST_PARTS = 1 << 14  # sum of the ratios in lowest terms: the length of the table that deals the end of a group


def parse_ratios(text: str) -> Ratios:
    """Parse a text such as ``4:2:1:1``. Raises UsageError."""
    parts = text.split(":")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        excerpt = text if len(text) < 80 else f"{text[:80]}..."
        raise UsageError(f"--ratios must be whole numbers with colons between them, such as 4:2:1:1, got {excerpt!r}")
    return tuple(map(int, parts))


def lowest_terms(ratios: Sequence[int], num_workers: int) -> Ratios | None:
    """Return the ratios in lowest terms, or None if all are equal. Raises UsageError for invalid ratios."""
    if len(ratios) != num_workers:
        raise UsageError(f"--ratios must name {num_workers} numbers, one per worker, got {len(ratios)}")
    excerpt = ratios_text(ratios)
    if any(isinstance(ratio, bool) or not isinstance(ratio, Integral) or ratio < 1 for ratio in ratios):
        raise UsageError(f"--ratios must be whole numbers of at least 1, got {excerpt}")
    whole = [int(ratio) for ratio in ratios]
    # Ratios are part of a run's identity: 4:2 and 2:1 deal the same rows, and must count as the same configuration.
    common = reduce(gcd, whole)
    lowest = tuple(ratio // common for ratio in whole)
    if len(set(lowest)) == 1:
        return None
    if sum(lowest) > MOST_PARTS:
        mend = "round them" if num_workers < MOST_PARTS else "so many workers can only have equal shares"
        raise UsageError(
            f"--ratios must add up to at most {MOST_PARTS:,} in lowest terms, got {excerpt} with {sum(lowest):,}; {mend}"
        )
    return lowest


def ratios_text(ratios: Sequence[int]) -> str:
    """Return the ratios as text, at most the first 16."""
    return ":".join(map(str, ratios[:16])) + (":..." if len(ratios) > 16 else "")


def rounded_down(size: int, ratios: Ratios) -> tuple[Ints, Ints]:
    """Return the shares of ``size`` rows, rounded down, and their remainders in units of 1/sum(ratios): int64 [workers]."""
    total = sum(ratios)
    parts = np.array(ratios, np.int64)
    rounds, rest = divmod(int(size), total)
    shares, left = np.divmod(rest * parts, total)
    return shares + rounds * parts, left


def rounded_up(sizes: Ints, ratios: Ratios, carry: bool = False) -> npt.NDArray[np.bool_]:
    """Return the workers whose share of each group is rounded up: bool [groups, workers].

    The rows that are left after rounding down go to the largest remainders, ties to the lowest worker. Exact shares are
    not rounded. O(groups x workers log workers).

    Args:
        sizes: rows of each group, int64 [groups].
        ratios: in lowest terms.
        carry: add to each remainder what rounding has cost the worker in earlier groups, so that its total over all
            groups is close to its share too.
    """
    up = np.zeros((len(sizes), len(ratios)), np.bool_)
    owed = np.zeros(len(ratios), np.int64)  # in units of 1/sum(ratios)
    for group, size in enumerate(np.asarray(sizes).tolist()):
        down, remainders = rounded_down(size, ratios)
        may = np.flatnonzero(remainders)
        rest = remainders + owed
        up[group, may[np.argsort(-rest[may], kind="stable")[: size - int(down.sum())]]] = True
        if carry:
            owed = rest - up[group] * sum(ratios)
    return up


def largest_remainder(sizes: Ints, ratios: Ratios, carry: bool = False) -> Ints:
    """Divide every group in these ratios by the largest-remainder method: int64 [groups, workers].

    Each part is the exact share rounded up or down; see ``rounded_up``. Integer arithmetic, so exact."""
    down = [rounded_down(size, ratios)[0] for size in np.asarray(sizes).tolist()]
    return np.array(down, np.int64).reshape(len(sizes), len(ratios)) + rounded_up(sizes, ratios, carry)
