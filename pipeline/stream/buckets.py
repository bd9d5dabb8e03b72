"""The buckets of a stream and their exact counters: what one generation hands on to the next. Pure.

The counters are committed with the rows that they count, as a file of the same generation. So there is one commit, and no
moment at which a kill could leave the one without the other."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.clustering.npz import expect, from_bytes
from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash
from pipeline.core.seeds import Purpose, word

BYTES = 32  # of a bucket: four numbers
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Buckets:
    """By key, ascending. keys int64 [K]; numbers int64 [K], 0 to K-1 in the order in which buckets came up, those of one
    generation by key; counts int64 [K], rows so far; copied int64 [K], of how many, the first ones, all workers have one."""

    keys: Ints
    numbers: Ints
    counts: Ints
    copied: Ints

    @classmethod
    def none(cls) -> Buckets:
        return cls(*(np.empty(0, np.int64) for _ in range(4)))

    def __len__(self) -> int:
        return len(self.keys)

    def with_keys(self, keys: Ints) -> Buckets:
        """With those that are new, of no rows yet. keys: ascending, each once."""
        fresh = np.setdiff1d(keys, self.keys, assume_unique=True)
        zeros = np.zeros(len(fresh), np.int64)
        merged = np.concatenate([self.keys, fresh])
        order = np.argsort(merged)
        columns = (
            np.concatenate([self.numbers, np.arange(len(self), len(merged))]),
            np.concatenate([self.counts, zeros]),
            np.concatenate([self.copied, zeros]),
        )
        return Buckets(merged[order], *(column[order] for column in columns))

    def places(self, keys: Ints) -> Ints:
        """Where keys that are all there stand, int64 [keys]."""
        return np.searchsorted(self.keys, keys)

    def by_number(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values [K] in the order of numbers."""
        ordered = np.empty_like(values)
        ordered[self.numbers] = values
        return ordered

    def sparse(self, num_workers: int) -> Flags:
        """Those of at most as many rows as workers, bool [K]: when a window closes they go to all of them. None for one
        worker."""
        return (self.counts <= num_workers) & (self.counts > 0) & (num_workers > 1)

    def arrays(self) -> dict[str, Any]:
        return {"keys": self.keys, "numbers": self.numbers, "counts": self.counts, "copied": self.copied}


def starts(keys: Ints, seed: int, num_workers: int) -> Ints:
    """The worker of each bucket's first row, int64 [keys]: the k-th row after it goes to the k-th worker after that one."""
    hashed = keyed_hash(keys, word(seed, Purpose.BUCKET_STARTS)) % np.uint64(num_workers)
    return hashed.astype(np.int64)


@dataclass(frozen=True, eq=False)
class ChunkBuckets:
    """The buckets of the rows of a chunk, by key: keys int64 [k]; numbers int64 [k]; first int64 [k], the worker of a
    bucket's first row of all; before int64 [k], its rows before this chunk; everywhere bool [k], those whose rows go to all
    workers."""

    keys: Ints
    numbers: Ints
    first: Ints
    before: Ints
    everywhere: Flags


@dataclass(frozen=True)
class Counted:
    """What a generation makes of the counters. after: those that it commits; chunks: of its rows; pending: bool [K by
    number], buckets of which rows of earlier generations of the window are to be copied; new_copies, old_copies: of rows of
    this generation, and of earlier ones."""

    after: Buckets
    chunks: list[ChunkBuckets]
    pending: Flags
    new_copies: int
    old_copies: int


def count(before: Buckets, found: Sequence[tuple[Ints, Ints]], *, seed: int, num_workers: int, closes: bool) -> Counted:
    """found: of every chunk, in order, the keys of its buckets, ascending, and their rows. closes: whether the window ends
    with these rows. O(all that is found + K log K)."""
    keys = np.unique(np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in found)]))
    known = before.with_keys(keys)
    running = known.counts.copy()
    offsets = []
    for chunk_keys, rows in found:
        places = known.places(chunk_keys)
        offsets.append((places, running[places]))
        running[places] += rows
    after = Buckets(known.keys, known.numbers, running, known.copied)
    everywhere = after.sparse(num_workers) if closes else np.zeros(len(after), np.bool_)
    first = starts(known.keys, seed, num_workers)
    chunks = [
        ChunkBuckets(known.keys[at], known.numbers[at], first[at], counts, everywhere[at]) for at, counts in offsets
    ]
    old = np.where(everywhere, known.counts - known.copied, 0)
    new = np.where(everywhere, running - known.counts, 0)
    done = Buckets(known.keys, known.numbers, running, np.where(everywhere, running, known.copied))
    beside = num_workers - 1
    return Counted(done, chunks, known.by_number(old > 0), int(new.sum()) * beside, int(old.sum()) * beside)


@dataclass(frozen=True, eq=False)
class State:
    """What a generation hands on to the next. sums: of each channel over all rows, int64 [C]."""

    buckets: Buckets
    sums: Ints

    def to_bytes(self) -> bytes:
        target = io.BytesIO()
        np.savez(target, sums=self.sums, **self.buckets.arrays())
        return target.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        """Raises ValueError for what ``to_bytes`` did not write."""
        arrays = from_bytes(data)
        expect(arrays, sums="i8 c", **dict.fromkeys(("keys", "numbers", "counts", "copied"), "i8 k"))
        sums = arrays.pop("sums")
        buckets = Buckets(**arrays)
        in_order = (buckets.keys[1:] > buckets.keys[:-1]).all() and np.array_equal(
            np.sort(buckets.numbers), np.arange(len(buckets))
        )
        if not in_order or ((buckets.copied < 0) | (buckets.copied > buckets.counts)).any():
            raise ValueError("its buckets are not in order, or have more copies than rows")
        return cls(buckets, sums)
