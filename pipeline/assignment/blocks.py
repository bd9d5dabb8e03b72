"""The points of a class in blocks of given sizes, each block as like the class as can be: a submodular partition.

Algorithm 1 of RCD-SGD (He and Dube 2023): the block of the lowest value takes the point that adds most to it, until all
points are placed. Pure numpy, on integer similarities. So no sum is ever rounded: values, gains and ties are exact, and the
result is the same on every machine. A tie goes to the lowest point."""

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
PART_ROWS = 10_000  # of a class that are placed together
MOST_BLOCKS = 64  # of a class, unless there are more workers than half of it
TAKEN = -(1 << 62)  # a gain below all others, with room for what is still taken off it


class Blocks(ABC):
    """Blocks that grow out of the points of a class, and what a set function says of each.

    values: f of every block, of the integer similarities."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        """similarities: int32 [n, n], symmetric, none negative."""
        self.similarities = similarities
        self.values = [0] * blocks

    @abstractmethod
    def take(self, block: int) -> int:
        """Add the free point that adds most to a block, the lowest of several. At least one point is free."""


class GraphCutBlocks(Blocks):
    """f(A): the similarities of the points of A to all points outside of it. A point i adds R_i - S_ii - 2 sum_A S_ai, where
    R_i is the sum of its row: less than nothing once A is more than about half of the class.

    8 n bytes a block; a point taken costs O(n)."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        super().__init__(similarities, blocks)
        alone = similarities.sum(axis=1, dtype=np.int64) - similarities.diagonal()
        self._gains = np.tile(alone, (blocks, 1))

    def take(self, block: int) -> int:
        gains = self._gains[block]
        point = int(gains.argmax())
        self.values[block] += int(gains[point])
        self._gains[:, point] = TAKEN
        gains -= self.similarities[point]
        gains -= self.similarities[point]
        return point


class FacilityLocationBlocks(Blocks):
    """f(A): over all points of the class, the similarity to the nearest point in A.

    Lazy greedy (Minoux 1978): what a point adds to a block can only become less, so what it added to a smaller one bounds it
    from above, and of most points it is never computed again. 4 n bytes and n heap entries a block; a gain costs O(n)."""

    def __init__(self, similarities: Similarities, blocks: int) -> None:
        super().__init__(similarities, blocks)
        rows = len(similarities)
        alone = similarities.sum(axis=1, dtype=np.int64)
        bounds = sorted((-gain, point) for point, gain in enumerate(alone.tolist()))
        self._bounds = [bounds.copy() for _ in range(blocks)]  # a sorted list is a heap
        self._nearest = np.zeros((blocks, rows), np.int32)
        self._free = [True] * rows
        self._scratch = np.empty(rows, np.int32)

    def take(self, block: int) -> int:
        bounds, nearest, value = self._bounds[block], self._nearest[block], self.values[block]
        fresh = set()
        while True:
            bound, point = bounds[0]
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
    """Memory of the blocks of a class beside its similarities: gains, or nearest similarities and heaps of bounds."""
    return rows * blocks * (8 if function == "graph-cut" else 120) + 250 * rows


def fill(blocks: Blocks, capacities: Sequence[int], *, by_size: bool = False) -> Ints:
    """The block of every point, int64 [sum(capacities)]: Algorithm 1, for whole capacities.

    Of the blocks that are not full the one of the lowest value is next, of several the lowest. by_size: the one that is
    filled to the smallest part instead."""
    found = np.empty(sum(capacities), np.int64)
    sizes = [0] * len(capacities)
    heap: list[tuple[float, int]] = [(0, block) for block, capacity in enumerate(capacities) if capacity]
    while heap:
        block = heap[0][1]
        found[blocks.take(block)] = block
        sizes[block] += 1
        if sizes[block] == capacities[block]:
            heapq.heappop(heap)
        else:  # equal fractions are equal floats, as a quotient is rounded in one way
            key = sizes[block] / capacities[block] if by_size else blocks.values[block]
            heapq.heapreplace(heap, (key, block))
    return found


def owners_of_class(
    similarities: Similarities, capacities: Ints, function: FunctionName, rule: BlockRule, ratios: Ratios | None
) -> Ints:
    """The worker of every point of a class, int64 [n]. capacities: int64 [workers], with the sum n.

    rule "paper": a block a worker, the one of the lowest value next (RCD-SGD, Algorithm 1). "size": the one that is filled
    to the smallest part next. "micro": as many blocks a worker as its part of the ratios, all of nearly one size, by the
    paper's rule. With unequal blocks the paper's rule gives the small ones the points in the middle of the class, and what
    lies outside is left to the large ones. Without ratios "micro" is "paper"."""
    parts = block_counts(ratios) if ratios and rule == "micro" else (1,) * len(capacities)
    sizes = [
        int(capacity) // part + (place < int(capacity) % part)
        for capacity, part in zip(capacities, parts, strict=True)
        for place in range(part)
    ]
    blocks = fill(FUNCTIONS[function](similarities, len(sizes)), sizes, by_size=rule == "size")
    owners: Ints = np.repeat(np.arange(len(parts)), parts)[blocks]
    return owners


def block_counts(ratios: Ratios) -> Ratios:
    """Micro-blocks of each worker: the ratios themselves, or of larger ones the nearest numbers that add up to at most
    MOST_BLOCKS, or to twice the workers where that is more. Every worker has one at least.

    O(blocks x workers log workers)."""
    most = max(MOST_BLOCKS, 2 * len(ratios))
    if sum(ratios) <= most:
        return ratios
    shares = np.array(ratios) / sum(ratios)
    cut = largest_remainder(np.arange(len(ratios), most + 1), ratios)
    cut = cut[(cut > 0).all(axis=1)]
    if not len(cut):  # one of them is owed less than half a block
        cut = np.maximum(1, largest_remainder(np.array([most - len(ratios)]), ratios))
    errors = np.abs(cut / cut.sum(axis=1, keepdims=True) / shares - 1).max(axis=1)
    return tuple(cut[errors.argmin()].tolist())
