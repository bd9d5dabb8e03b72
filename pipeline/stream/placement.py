"""The workers of a generation's rows: its own rows by bucket, and the copies made when a window closes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from pipeline.assignment.ranks import ranks
from pipeline.clustering.hashes import Hashes
from pipeline.core.arrays import Ints
from pipeline.input.arrivals import some_rows
from pipeline.input.committed import CommittedDataset
from pipeline.input.dataset import Block
from pipeline.output.placement import BlockDeliveries, deliver_rows
from pipeline.stream.buckets import ChunkBuckets, Flags


@dataclass(frozen=True)
class ByBucket:
    """A Placement by bucket. chunks: the buckets of each chunk.

    Row k of a bucket goes to the k-th worker after the worker of its first row, so a bucket's rows per worker differ
    by at most one."""

    hashes: Hashes
    num_workers: int
    chunks: tuple[ChunkBuckets, ...]
    neighbourhoods: bool = True
    reads_images: bool = True

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield each block of a chunk with the workers of its rows; rows of sparse buckets of a closed window get
        all."""
        buckets = self.chunks[chunk]
        before = buckets.before.copy()
        for block in blocks:
            at = np.searchsorted(buckets.keys, self.hashes.buckets(block.images))
            owners = (buckets.first[at] + ranks(at, before)) % self.num_workers
            yield BlockDeliveries(
                block, buckets.numbers[at], *deliver_rows(owners, buckets.everywhere[at], self.num_workers)
            )


@dataclass(frozen=True)
class Copies:
    """A Placement of rows already in the set: copies for the workers that do not have them.

    Attributes:
        num_workers: n.
        first: int64 [K], worker of each bucket's first row.
        before: int64 [chunks, K], rows of each bucket before each chunk.
        neighbourhoods: buckets are written beside the rows.
        reads_images: blocks contain images.
    """

    num_workers: int
    first: Ints
    before: Ints
    neighbourhoods: bool = True
    reads_images: bool = True

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[BlockDeliveries]:
        """Yield each block of a chunk with the workers that do not have its rows yet: all but the owners."""
        before = self.before[chunk].copy()
        for block in blocks:
            groups = block.neighbourhoods
            owners = (self.first[groups] + ranks(groups, before)) % self.num_workers
            rows, workers, copies = deliver_rows(owners, np.ones(len(owners), np.bool_), self.num_workers)
            beside = copies > 0
            yield BlockDeliveries(block, groups, rows[beside], workers[beside], copies[beside])


@dataclass(frozen=True)
class SomeBuckets(CommittedDataset):
    """The rows of some buckets of a committed set. is_selected: bool [K] by bucket number."""

    is_selected: Flags

    @classmethod
    def from_dataset(cls, dataset: CommittedDataset, is_selected: Flags) -> SomeBuckets:
        return cls(**{item.name: getattr(dataset, item.name) for item in fields(dataset)}, is_selected=is_selected)

    def read(self, start: int, stop: int, *, images: bool = True) -> Iterator[Block]:
        """Yield the rows of the selected buckets whose ids are in [start, stop).

        Rows are first read without images; then images, only from the first to the last selected row of each block.

        images: whether the blocks contain images."""
        for narrow in super().read(start, stop, images=False):
            matching = np.flatnonzero(self.is_selected[narrow.neighbourhoods])
            if not len(matching):
                continue
            if not images:
                yield some_rows(narrow, matching)
                continue
            for block in super().read(int(narrow.ids[matching[0]]), int(narrow.ids[matching[-1]]) + 1):
                rows = np.flatnonzero(self.is_selected[block.neighbourhoods])
                if len(rows):
                    yield some_rows(block, rows)
