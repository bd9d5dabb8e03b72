"""Rows dealt in ratios, for workers of uneven speed.

Every group is cut by largest remainder (Hamilton's method), so that its rows by worker are the exact shares rounded up or
down. Inside a group the rows of a worker are spread evenly: any stretch of it holds about the ratios too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from pipeline.arrays import Ints
from pipeline.shardset.ratios import Ratios


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
