"""Merging what partitions have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyspark import RDD

T = TypeVar("T")
FEW = 4  # partitions, whose results the driver merges itself: less than a shuffle costs


def reduced(parts: RDD[T], merge: Callable[[T, T], T]) -> T:
    """All parts in one. Executors merge first, so that the driver receives as many as the square root of the partitions."""
    return parts.treeReduce(merge) if parts.getNumPartitions() > FEW else parts.reduce(merge)
