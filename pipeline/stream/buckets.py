"""The buckets of a stream and their exact counters, which one generation passes on to the next. Pure.

A bucket is the rows for which the hash functions give the same key. A generation is the rows of one batch, and a window
is a run of generations. When a window closes, the rows of sparse buckets (at most as many rows as there are workers)
are copied to all workers.

The counters are committed with the rows that they count, as a file of the same generation. There is therefore a single
commit, and a kill cannot leave one without the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash
from pipeline.core.npz import check_arrays, from_bytes, to_bytes
from pipeline.core.seeds import Purpose, word

BYTES = 32  # bytes per bucket: four numbers
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets and their counters, in ascending order of key.

    Attributes:
        keys: int64 [K].
        numbers: int64 [K], 0 to K-1 in order of first appearance; new buckets of one generation are numbered by key.
        counts: int64 [K], rows so far.
        copied: int64 [K], number of first rows that every worker has.
    """

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
        """Return these buckets and an empty bucket for each new key. keys: ascending and unique."""
        fresh = np.setdiff1d(keys, self.keys, assume_unique=True)
        zeros = np.zeros(len(fresh), np.int64)
        all_keys = np.concatenate([self.keys, fresh])
        order = np.argsort(all_keys)
        columns = (
            np.concatenate([self.numbers, np.arange(len(self), len(all_keys))]),
            np.concatenate([self.counts, zeros]),
            np.concatenate([self.copied, zeros]),
        )
        return Buckets(all_keys[order], *(column[order] for column in columns))

    def order_by_number(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values [K] reordered by bucket number."""
        by_number = np.empty_like(values)
        by_number[self.numbers] = values
        return by_number

    def sparse(self, num_workers: int) -> Flags:
        """Return which buckets have at most as many rows as there are workers, bool [K]; all False for one worker.

        These go to all workers when a window closes."""
        return (self.counts <= num_workers) & (self.counts > 0) & (num_workers > 1)

    def arrays(self) -> dict[str, Any]:
        return {"keys": self.keys, "numbers": self.numbers, "counts": self.counts, "copied": self.copied}


def first_workers_of(keys: Ints, seed: int, num_workers: int) -> Ints:
    """Return the worker of each bucket's first row, int64 [keys].

    The k-th row after it goes to the k-th worker after that one."""
    first_workers = keyed_hash(keys, word(seed, Purpose.BUCKET_STARTS)) % np.uint64(num_workers)
    return first_workers.astype(np.int64)


@dataclass(frozen=True, eq=False)
class ChunkBuckets:
    """The buckets of a chunk's rows, in ascending order of key.

    Attributes:
        keys: int64 [k].
        numbers: int64 [k].
        first: int64 [k], worker of the bucket's first row in the stream.
        before: int64 [k], rows of the bucket before this chunk.
        everywhere: bool [k], True if the bucket's rows go to all workers.
    """

    keys: Ints
    numbers: Ints
    first: Ints
    before: Ints
    everywhere: Flags


@dataclass(frozen=True)
class CounterUpdate:
    """The effect of a generation on the counters.

    Attributes:
        after: the counters to commit.
        chunks: the buckets of each of its chunks.
        pending: bool [K by number], buckets whose rows from earlier generations of the window are to be copied.
        new_copies: copies of rows of this generation.
        old_copies: copies of rows of earlier generations.
    """

    after: Buckets
    chunks: list[ChunkBuckets]
    pending: Flags
    new_copies: int
    old_copies: int


def count_generation(
    before: Buckets, keys_and_rows: Sequence[tuple[Ints, Ints]], *, seed: int, num_workers: int, closes: bool
) -> CounterUpdate:
    """Return the counters after a generation, the place of each chunk's rows in its buckets, and the copies to make.

    If the window ends with these rows, all rows of its sparse buckets that are not yet on every worker are copied: rows
    of this generation (``new_copies``) and of earlier ones (``old_copies``). O(size of ``keys_and_rows`` + K log K).

    Args:
        before: the counters so far.
        keys_and_rows: for every chunk in order, its bucket keys, ascending, and the number of its rows in each bucket.
        seed: seed of the stream; decides the worker of each bucket's first row.
        num_workers: number of workers; a copied row gets num_workers - 1 copies.
        closes: True if the window ends with these rows.
    """
    keys = np.unique(np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in keys_and_rows)]))
    counters = before.with_keys(keys)
    running = counters.counts.copy()
    offsets = []
    for chunk_keys, rows in keys_and_rows:
        places = np.searchsorted(counters.keys, chunk_keys)
        offsets.append((places, running[places]))
        running[places] += rows
    counters_with_rows = Buckets(counters.keys, counters.numbers, running, counters.copied)
    # Only the end of a window makes copies: earlier, a bucket may still grow dense.
    everywhere = counters_with_rows.sparse(num_workers) if closes else np.zeros(len(counters), np.bool_)
    first = first_workers_of(counters.keys, seed, num_workers)
    chunks = [
        ChunkBuckets(counters.keys[at], counters.numbers[at], first[at], counts, everywhere[at])
        for at, counts in offsets
    ]
    earlier_rows = np.where(everywhere, counters.counts - counters.copied, 0)
    own_rows = np.where(everywhere, running - counters.counts, 0)
    counters_after = Buckets(counters.keys, counters.numbers, running, np.where(everywhere, running, counters.copied))
    copies_per_row = num_workers - 1
    return CounterUpdate(
        counters_after,
        chunks,
        counters.order_by_number(earlier_rows > 0),
        new_copies=int(own_rows.sum()) * copies_per_row,
        old_copies=int(earlier_rows.sum()) * copies_per_row,
    )


@dataclass(frozen=True, eq=False)
class StreamState:
    """The state that a generation passes on to the next. sums: int64 [C], the sum of each channel over all rows."""

    buckets: Buckets
    sums: Ints

    def to_bytes(self) -> bytes:
        return to_bytes(sums=self.sums, **self.buckets.arrays())

    @classmethod
    def from_bytes(cls, data: bytes) -> StreamState:
        """Read the output of ``to_bytes``. Raises ValueError for other data."""
        arrays = from_bytes(data)
        check_arrays(arrays, sums="i8 c", **dict.fromkeys(("keys", "numbers", "counts", "copied"), "i8 k"))
        sums = arrays.pop("sums")
        buckets = Buckets(**arrays)
        in_order = (buckets.keys[1:] > buckets.keys[:-1]).all() and np.array_equal(
            np.sort(buckets.numbers), np.arange(len(buckets))
        )
        if not in_order or ((buckets.copied < 0) | (buckets.copied > buckets.counts)).any():
            raise ValueError("its buckets are not in order, or have more copies than rows")
        return cls(buckets, sums)
