"""Which workers get which rows of a generation: its own rows by bucket, and the copies with which a window closes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from pipeline.assignment.ranks import ranks
from pipeline.clustering.hashes import Hashes
from pipeline.core.arrays import Ints
from pipeline.input.committed import CommittedDataset
from pipeline.input.dataset import Block
from pipeline.output.placement import Delivered, delivered
from pipeline.stream.arrivals import some_rows
from pipeline.stream.buckets import ChunkBuckets, Flags


@dataclass(frozen=True)
class ByBucket:
    """A Placement. chunks: the buckets of each. Row k of a bucket goes to the k-th worker after that of its first row, so
    the counts of workers differ by at most one."""

    hashes: Hashes
    num_workers: int
    chunks: tuple[ChunkBuckets, ...]
    neighbourhoods: bool = True
    reads_images: bool = True

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[Delivered]:
        buckets = self.chunks[chunk]
        before = buckets.before.copy()
        for block in blocks:
            at = np.searchsorted(buckets.keys, self.hashes.buckets(block.images))
            owners = (buckets.first[at] + ranks(at, before)) % self.num_workers
            yield Delivered(block, buckets.numbers[at], *delivered(owners, buckets.everywhere[at], self.num_workers))


@dataclass(frozen=True)
class Copies:
    """A Placement of rows that are in the set: the copies for those who have not got them. first: int64 [K], of each bucket;
    before: int64 [chunks, K], its rows before each chunk."""

    num_workers: int
    first: Ints
    before: Ints
    neighbourhoods: bool = True
    reads_images: bool = True

    def deliveries(self, chunk: int, blocks: Iterator[Block]) -> Iterator[Delivered]:
        before = self.before[chunk].copy()
        for block in blocks:
            groups = groups_of(block)
            owners = (self.first[groups] + ranks(groups, before)) % self.num_workers
            rows, workers, copies = delivered(owners, np.ones(len(owners), np.bool_), self.num_workers)
            beside = copies > 0
            yield Delivered(block, groups, rows[beside], workers[beside], copies[beside])


@dataclass(frozen=True)
class SomeBuckets(CommittedDataset):
    """The rows of some buckets: ``wanted``, bool [K] by number."""

    wanted: Flags

    @classmethod
    def of(cls, dataset: CommittedDataset, wanted: Flags) -> SomeBuckets:
        return cls(**{item.name: getattr(dataset, item.name) for item in fields(dataset)}, wanted=wanted)

    def read(self, start: int, stop: int, *, images: bool = True) -> Iterator[Block]:
        """Images are read where a block has such rows, from the first of them to the last."""
        for narrow in super().read(start, stop, images=False):
            found = np.flatnonzero(self.wanted[groups_of(narrow)])
            if not len(found):
                continue
            if not images:
                yield some_rows(narrow, found)
                continue
            for block in super().read(int(narrow.ids[found[0]]), int(narrow.ids[found[-1]]) + 1):
                rows = np.flatnonzero(self.wanted[groups_of(block)])
                if len(rows):
                    yield some_rows(block, rows)


def groups_of(block: Block) -> Ints:
    """The buckets of committed rows, by number."""
    assert block.columns.neighbourhoods is not None, "a stream's rows have their buckets"
    return block.columns.neighbourhoods.astype(np.int64)
