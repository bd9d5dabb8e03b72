"""Dealing of rows in ratios, for workers of uneven speed.

Every group is divided by largest remainder (Hamilton's method), so that its rows by worker are the exact shares rounded
up or down. The rows of a worker are spread evenly over the group, so that any stretch of it has about the ratios
too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from pipeline.assignment.ranks import runs_of_equal_keys
from pipeline.core.arrays import Ints
from pipeline.core.shardset.ratios import Ratios, rounded_down


def spread(counts: Sequence[int] | Ints) -> Ints:
    """Return the workers of sum(counts) rows, int64, with counts[w] rows for worker w, mixed as evenly as possible.

    In every prefix, each worker has its share rounded up or down. The i-th row of a worker has a first and a last
    possible place; among the rows whose first place has come, the one with the earliest last place is next (Steiner and
    Yeomans 1993: such a sequence always exists). O(rows log workers), about 1 us per row."""
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


@lru_cache(maxsize=1 << 13)  # at most 32 KB each; the tasks of a process need the same ones
def _spread(counts: bytes) -> npt.NDArray[np.uint16]:
    return spread(np.frombuffer(counts, np.int64)).astype(np.uint16)


@dataclass(frozen=True)
class RatioDeal:
    """The worker of a row, from its group and its rank in the group.

    A group is dealt in identical cycles of sum(ratios) rows; the remainder is mixed separately, when rows of it are
    requested.

    Attributes:
        ratios: shares of the workers.
        sizes: int64 [groups].
        up: uint8 [groups, workers / 8], one bit per worker: its share of the group is rounded up.
    """

    ratios: Ratios
    sizes: Ints
    up: npt.NDArray[np.uint8]

    def counts(self, group: int) -> Ints:
        """Return the rows of a group by worker, int64 [workers]."""
        down, _ = rounded_down(int(self.sizes[group]), self.ratios)
        return down + np.unpackbits(self.up[group], count=len(self.ratios))

    def owners(self, groups: Ints, ranks: Ints) -> Ints:
        """Return the workers of rows, int64 [rows].

        O(rows), plus about 1 us per row of each remainder that has a row here, because its whole order is computed.

        groups: int64 [rows], the group of each row; ranks: int64 [rows], the position of each row in its group."""
        parts = np.array(self.ratios, np.int64)
        cycle = _spread(parts.tobytes())
        owners = cycle[ranks % len(cycle)].astype(np.int64)
        rounds = self.sizes[groups] // len(cycle)
        # Rows after the last whole cycle need the group's own remainder.
        late = np.flatnonzero(ranks >= rounds * len(cycle))
        late = late[np.argsort(groups[late], kind="stable")]
        for group, first, end in runs_of_equal_keys(groups[late]):
            rows = late[first:end]
            last = _spread((self.counts(group) - rounds[rows[0]] * parts).tobytes())
            owners[rows] = last[(ranks - rounds * len(cycle))[rows]]
        return owners
