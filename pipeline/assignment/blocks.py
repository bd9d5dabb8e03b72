"""Submodular partition of a class: blocks of given sizes, each as representative of the class as possible.

Algorithm 1 of RCD-SGD (He and Dube 2023): the block with the lowest value takes the point with the largest gain, until
all points are placed. Pure numpy on integer similarities, so that no sum is rounded: values, gains and ties are exact,
and the result is the same on every machine. Ties go to the lowest point."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.shardset.ratios import Ratios, largest_remainder

FunctionName = Literal["graph-cut", "facility-location"]
BlockRule = Literal["micro", "paper", "size"]
Similarities = npt.NDArray[np.int32]
PART_ROWS = 10_000  # rows of a class that are placed together
MOST_BLOCKS = 64  # blocks of a class under the rule "micro"; with more than 32 workers, two per worker
TAKEN = -(1 << 62)  # a gain below all others, from which more can be subtracted without overflow


class Blocks(ABC):
    """Blocks that grow from the points of a class, and the value of a set function for each.

    values: f of every block, computed from the integer similarities."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        """Start with empty blocks. similarities: int32 [n, n], symmetric, not negative."""
        self.similarities = similarities
        self.values = [0] * blocks

    @abstractmethod
    def add_best_point(self, block: int) -> int:
        """Add the free point with the largest gain to a block and return its number.

        Ties go to the lowest point. At least one point is free."""


class GraphCutBlocks(Blocks):
    """f(A) = sum of the similarities between the points in A and all points outside A.

    A point i adds R_i - S_ii - 2 sum_A S_ai, where R_i is the sum of its row; this is negative once A is more than
    about half of the class. Costs 8 n bytes per block and O(n) per point taken."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        super().__init__(similarities, blocks)
        alone = similarities.sum(axis=1, dtype=np.int64) - similarities.diagonal()
        self._gains = np.tile(alone, (blocks, 1))

    def add_best_point(self, block: int) -> int:
        gains = self._gains[block]
        point = int(gains.argmax())
        self.values[block] += int(gains[point])
        self._gains[:, point] = TAKEN
        gains -= self.similarities[point]  # subtracted twice, because 2 S_ai may exceed int32
        gains -= self.similarities[point]
        return point


class FacilityLocationBlocks(Blocks):
    """f(A) = sum over all points of the class of the similarity to the nearest point in A.

    Lazy greedy (Minoux 1978): the gain of a point can only shrink as its block grows, so a gain computed earlier is an
    upper bound, and the gains of most points are never recomputed. Costs 4 n bytes and n heap entries per block, and
    O(n) per gain."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        super().__init__(similarities, blocks)
        rows = len(similarities)
        alone = similarities.sum(axis=1, dtype=np.int64)
        bounds = sorted((-gain, point) for point, gain in enumerate(alone.tolist()))
        self._bounds = [bounds.copy() for _ in range(blocks)]  # a sorted list is a heap
        self._nearest = np.zeros((blocks, rows), np.int32)
        self._free = [True] * rows
        self._scratch = np.empty(rows, np.int32)

    def add_best_point(self, block: int) -> int:
        bounds = self._bounds[block]  # a heap of (negative upper bound of the gain, point)
        nearest = self._nearest[block]
        value = self.values[block]
        fresh = set()
        while True:
            bound, point = bounds[0]
            # The top of the heap is a bound; once it is fresh, no other point can have a larger gain.
            if not self._free[point]:
                heapq.heappop(bounds)
            elif point in fresh:
                break
            else:
                np.maximum(self.similarities[point], nearest, out=self._scratch)
                heapq.heapreplace(bounds, (value - int(self._scratch.sum(dtype=np.int64)), point))
                fresh.add(point)
        self.values[block] -= bound
        self._free[point] = False
        np.maximum(self.similarities[point], nearest, out=nearest)
        return point


FUNCTIONS: dict[FunctionName, type[Blocks]] = {
    "graph-cut": GraphCutBlocks,
    "facility-location": FacilityLocationBlocks,
}


def block_bytes(rows: int, blocks: int, function: FunctionName) -> int:
    """Return the memory of a class's blocks besides its similarities: gains, or nearest similarities and heaps of
    bounds."""
    return rows * blocks * (8 if function == "graph-cut" else 120) + 250 * rows


def fill_blocks(blocks: Blocks, capacities: Sequence[int], *, by_size: bool = False) -> Ints:
    """Return the block of every point, int64 [sum(capacities)]: Algorithm 1 for integer capacities.

    The next block is the one with the lowest value among those that are not full, ties to the lowest number. With
    by_size it is the block with the smallest filled fraction."""
    block_by_rank = np.empty(sum(capacities), np.int64)
    sizes = [0] * len(capacities)
    heap: list[tuple[float, int]] = [(0, block) for block, capacity in enumerate(capacities) if capacity]
    while heap:
        block = heap[0][1]
        block_by_rank[blocks.add_best_point(block)] = block
        sizes[block] += 1
        if sizes[block] == capacities[block]:
            heapq.heappop(heap)
        else:  # equal fractions are equal floats, because division is correctly rounded
            key = sizes[block] / capacities[block] if by_size else blocks.values[block]
            heapq.heapreplace(heap, (key, block))
    return block_by_rank


def owners_of_class(
    similarities: Similarities, capacities: Ints, function: FunctionName, rule: BlockRule, ratios: Ratios | None
) -> Ints:
    """Return the worker of every point of a class, int64 [n].

    With unequal blocks, the paper's rule gives the small blocks the points in the middle of the class and leaves the
    outliers to the large ones.

    Args:
        similarities: int32 [n, n].
        capacities: int64 [workers], with the sum n.
        function: the set function.
        rule: "paper": one block per worker, the one with the lowest value next (RCD-SGD, Algorithm 1). "size": one
            block per worker, the one with the smallest filled fraction next. "micro": as many blocks per worker as its
            part of the ratios, all of nearly equal size, filled by the paper's rule; the same as "paper" without
            ratios.
        ratios: shares of the workers; None: equal.
    """
    parts = block_counts(ratios) if ratios and rule == "micro" else (1,) * len(capacities)
    sizes = [
        int(capacity) // part + (place < int(capacity) % part)
        for capacity, part in zip(capacities, parts, strict=True)
        for place in range(part)
    ]
    blocks = fill_blocks(FUNCTIONS[function](similarities, len(sizes)), sizes, by_size=rule == "size")
    owners: Ints = np.repeat(np.arange(len(parts)), parts)[blocks]
    return owners


def block_counts(ratios: Ratios) -> Ratios:
    """Return the number of blocks of each worker for the rule "micro" of ``owners_of_class``, at least 1.

    A worker with a larger share gets several blocks of nearly equal size, as one large block would receive the outliers
    of the class. The numbers are the ratios, if their sum is at most MOST_BLOCKS or twice the workers, whichever is more;
    this limit bounds memory and time. Otherwise, of all totals within the limit, divided by largest remainder, the
    division is taken whose largest relative error of a share is smallest.

    ratios: the workers' shares, whole numbers. O(blocks x workers log workers)."""
    most = max(MOST_BLOCKS, 2 * len(ratios))
    if sum(ratios) <= most:
        return ratios
    shares = np.array(ratios) / sum(ratios)
    cut = largest_remainder(np.arange(len(ratios), most + 1), ratios)
    cut = cut[(cut > 0).all(axis=1)]
    if not len(cut):  # no total gives every worker a block, so those without one get one
        cut = np.maximum(1, largest_remainder(np.array([most - len(ratios)]), ratios))
    errors = np.abs(cut / cut.sum(axis=1, keepdims=True) / shares - 1).max(axis=1)
    return tuple(cut[errors.argmin()].tolist())
