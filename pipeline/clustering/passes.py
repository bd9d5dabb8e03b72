"""Repeated passes of k-means over points that stay in the memory of a task. Pure numpy.

A pass examines only the rows that may have changed cluster (Hamerly, "Making k-means even faster", 2010). Each row has
an upper bound of the distance to its own centre and a lower bound of the distance to any other. Both are relaxed by the
movement of the centres, and while the upper stays below the lower bound, the row keeps its cluster. Bounds are floating
point numbers with a safety margin, and a row whose bounds come close to each other is measured in exact integers. The
result equals a pass over all rows, ties included."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.clustering.lloyd import Sums, add_rows, block_rows, exact_sum, whole_sum
from pipeline.core.arrays import Ints

ROOM = 2.0**-8  # the safety margin in units of the grid; a pass adds an error below 2^-26 to the bounds


class Pass:
    """Repeated passes of one fit: ``Pass(points, k)(centres)`` returns the sums by cluster like ``lloyd.one_pass``.

    State: 32 bytes per row. Costs at most 2 * rows * k * p flop per pass; on CIFAR-10 with 20 clusters and 150
    iterations a quarter of that.

    points: int32 [rows, p]. k: the number of clusters."""

    def __init__(self, points: npt.NDArray[np.int32], k: int) -> None:
        self.points = points
        self.squares = _squares(points)
        self.summed_squares = exact_sum(self.squares)
        self.index = np.full(len(points), -1, np.int64)
        self.upper = np.zeros(len(points))
        self.lower = np.zeros(len(points))
        self.sums = np.zeros((k, points.shape[1]), np.int64)
        self.centres: Ints | None = None

    def __call__(self, centres: Ints) -> Sums:
        """Return the sums of a pass with these centres, int64 [k, p], and keep them as the state of the next pass."""
        rows = self._relax_bounds(centres)
        self.centres = centres
        index = self._measure(rows, centres)
        before = self.index[rows]
        # Update the sums only by the rows that changed cluster; integers, so no error accumulates.
        changed = index != before
        add_rows(self.sums, self.points, rows[changed], index[changed], 1)
        has_left = changed & (before >= 0)
        add_rows(self.sums, self.points, rows[has_left], before[has_left], -1)
        self.index[rows] = index
        counts = np.bincount(self.index, minlength=len(centres)).astype(np.int64)
        return Sums(self.sums.copy(), counts, self._inertia(centres, counts))

    def _relax_bounds(self, centres: Ints) -> Ints:
        """Relax the bounds by the movement of the centres, and return the rows that must be measured, int64 [rows].

        centres: int64 [k, p], the new ones. In the first pass all rows are returned."""
        if self.centres is None:
            return np.arange(len(self.points))
        shifts = np.sqrt(((centres - self.centres) ** 2).sum(axis=1).astype(np.float64))
        farthest = int(shifts.argmax())
        # The lower bound is to other centres: for rows of the centre that moved farthest, the second movement counts.
        others = np.full(len(shifts), shifts[farthest])
        others[farthest] = np.delete(shifts, farthest).max(initial=0)
        self.upper += shifts[self.index]
        self.lower -= others[self.index]
        return np.flatnonzero(self.upper + ROOM >= self.lower)

    def _measure(self, rows: Ints, centres: Ints) -> Ints:
        """Return the nearest centre of each given row, ties to the lower index, and make the bounds exact."""
        index = np.empty(len(rows), np.int64)
        c = centres.astype(np.float64)
        minus_2c = -2 * c.T
        c_squared = np.einsum("kp,kp->k", c, c)
        step = block_rows(len(centres))
        for low in range(0, len(rows), step):
            block = rows[low : low + step]
            distances = self.points[block].astype(np.float64) @ minus_2c
            distances += c_squared
            # The upper bound is the distance to the nearest centre, the lower one to the second nearest. The squared
            # norm of a row, which does not change the order of its distances, is only added to these two.
            best = distances.argmin(axis=1)
            positions = np.arange(len(block))
            self.upper[block] = np.sqrt(distances[positions, best] + self.squares[block])
            distances[positions, best] = np.inf
            self.lower[block] = np.sqrt(distances.min(axis=1) + self.squares[block])
            index[low : low + len(block)] = best
        return index

    def _inertia(self, centres: Ints, counts: Ints) -> int:
        """Return the sum of |x - c|^2 from the sums by cluster, as |x|^2 - 2 x c + |c|^2, exact.

        A sum is split in two, because a coordinate times a sum of many coordinates can exceed 63 bits."""
        high = self.sums >> 24
        low = self.sums & ((1 << 24) - 1)
        products = (whole_sum(centres * high) << 24) + whole_sum(centres * low)
        squares = sum(int(n) * int(q) for n, q in zip(counts, (centres**2).sum(axis=1), strict=True))
        return self.summed_squares - 2 * products + squares


def _squares(points: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return |x|^2 of each row: integers below 2^53."""
    squares = np.empty(len(points))
    step = block_rows(1)
    for low in range(0, len(points), step):
        block = points[low : low + step].astype(np.float64)
        squares[low : low + step] = np.einsum("np,np->n", block, block)
    return squares
