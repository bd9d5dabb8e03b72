"""Merging of the results of partitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark import RDD

T = TypeVar("T")
FEW = 4  # up to this many partitions, the driver merges the results, because a shuffle costs more


def tree_reduce(parts: RDD[T], merge: Callable[[T, T], T]) -> T:
    """Merge the results of all partitions. Executors merge first, until about a dozen parts are left for the driver."""
    partitions = parts.getNumPartitions()
    return parts.treeReduce(merge, depth(partitions)) if partitions > FEW else parts.reduce(merge)


def depth(partitions: int) -> int:
    """Return the depth of the reduction tree, in which about eight parts become one per round."""
    return max(2, math.ceil(math.log(partitions, 8)))


def arrivals(partitions: int) -> int:
    """Return the number of parts that reach the driver, computed like in Spark's treeReduce."""
    if partitions <= FEW:
        return partitions
    scale = max(math.ceil(partitions ** (1 / depth(partitions))), 2)
    while partitions > scale + partitions / scale:
        partitions //= scale
    return partitions
