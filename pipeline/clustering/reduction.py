"""Merging what partitions have found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from pyspark import RDD

T = TypeVar("T")
FEW = 4  # partitions, whose results the driver merges itself: less than a shuffle costs


def reduced(parts: RDD[T], merge: Callable[[T, T], T]) -> T:
    """All parts in one. Executors merge first, in as many rounds as leave about a dozen parts for the driver."""
    partitions = parts.getNumPartitions()
    return parts.treeReduce(merge, depth(partitions)) if partitions > FEW else parts.reduce(merge)


def depth(partitions: int) -> int:
    """Of the tree: in each round about eight parts become one."""
    return max(2, math.ceil(math.log(partitions, 8)))


def arrivals(partitions: int) -> int:
    """How many parts reach the driver, as Spark's treeReduce has it."""
    if partitions <= FEW:
        return partitions
    scale = max(math.ceil(partitions ** (1 / depth(partitions))), 2)
    while partitions > scale + partitions / scale:
        partitions //= scale
    return partitions
