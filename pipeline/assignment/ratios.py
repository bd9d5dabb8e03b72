"""Rows dealt in ratios such as 4:2:1:1, for workers of uneven speed.

Every group is cut by largest remainder (Hamilton's method), so that its rows by worker are the exact shares rounded up or
down. Inside a group the rows of a worker are spread evenly: any stretch of it holds about the ratios too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from heapq import heappop, heappush
from math import gcd

import numpy as np
import numpy.typing as npt

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


def spread(counts: Sequence[int] | Ints) -> Ints:
    """The workers of sum(counts) rows, int64, so many of each, mixed as evenly as can be: in any first part of them a worker
    has its share, rounded up or down.

    The i-th row of a worker has a first and a last place; of those whose first place has come the one with the earliest last
    place is next (Steiner and Yeomans 1993: such a sequence always exists). O(rows log workers), about 1 us a row."""
    amounts = [int(count) for count in counts]
    rows = sum(amounts)
    waiting = [(0, worker, 0) for worker, amount in enumerate(amounts) if amount]  # (first place, worker, number)
    ready: list[tuple[int, int, int]] = []  # (last place, worker, number)
    order = np.empty(rows, np.int64)
    for place in range(rows):
        while waiting and waiting[0][0] <= place:
            _, worker, number = heappop(waiting)
            heappush(ready, (-(-(number + 1) * rows // amounts[worker]), worker, number))
        _, worker, number = heappop(ready)
        order[place] = worker
        if number + 1 < amounts[worker]:
            heappush(waiting, ((number + 1) * rows // amounts[worker], worker, number + 1))
    return order


@dataclass(frozen=True)
class RatioDeal:
    """Which worker has the row of a rank in a group. sizes: int64 [groups]; counts: int64 [groups, workers].

    A group is dealt in whole cycles of sum(ratios) rows, all alike; what is left over in an order of its own. Memory: at
    most sum(ratios) small numbers a group, and no more than there are rows."""

    ratios: Ratios
    sizes: Ints
    counts: Ints

    def owners(self, groups: Ints, ranks: Ints) -> Ints:
        """int64 [rows]. O(rows)."""
        cycle, ends, begins = self._tables
        owners = cycle[ranks % len(cycle)]
        whole = self.sizes[groups] // len(cycle) * len(cycle)
        late = ranks >= whole
        owners[late] = ends[begins[groups[late]] + (ranks - whole)[late]]
        return owners

    @cached_property
    def _tables(self) -> tuple[Ints, npt.NDArray[np.uint16], Ints]:
        """The cycle, the ends of all groups, and where each begins among them."""
        cycle = spread(self.ratios)
        ends = [
            spread(counts - size // len(cycle) * np.array(self.ratios)).astype(np.uint16)
            for size, counts in zip(self.sizes.tolist(), self.counts, strict=True)
        ]
        lengths = self.sizes % len(cycle)
        return cycle, np.concatenate([*ends, np.empty(0, np.uint16)]), np.cumsum(lengths) - lengths
