"""The first pass over a batch: tasks read, check and fingerprint every record and hash it into a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.clustering.hashes import Hashes
from pipeline.core.arrays import Ints
from pipeline.input.arrivals import Arrivals, SkippedRows, examine, merge_ranges, ranges_to_leave_out
from pipeline.input.dataset import Run, ranges
from pipeline.input.decoded import decoder_versions
from pipeline.input.scan import WORD, Scan, fingerprint


@dataclass(frozen=True)
class ChunkScan:
    """The result of a task for one part of a chunk.

    Attributes:
        chunk: number of the chunk.
        rows: good rows.
        labels: int64 [classes], rows by class.
        sums: int64 [C], sum of each channel.
        fingerprint: sum of the rows' hashes, mod 2^64.
        keys: int64 [k], bucket keys, ascending.
        counts: int64 [k], rows by bucket.
        skipped_rows: ranges to leave out, ascending. If there are any, ids move down and the whole batch is read again.
        versions: versions of the libraries that decoded the rows.
    """

    chunk: int
    rows: int
    labels: Ints
    sums: npt.NDArray[Any]
    fingerprint: int
    keys: Ints
    counts: Ints
    skipped_rows: list[SkippedRows]
    versions: str = field(default_factory=decoder_versions)


@dataclass(frozen=True)
class LookJob:
    """The work of a task. Picklable. hashes: None before they are fitted, and rows then get no buckets."""

    dataset: Arrivals
    num_classes: int
    hashes: Hashes | None

    def __call__(self, piece: tuple[int, int, int]) -> ChunkScan:
        """Read one part of a chunk. piece: the number of the chunk, and the first and end id."""
        chunk, start, stop = piece
        labels = np.zeros(self.num_classes, np.int64)
        sums = np.zeros(self.dataset.layout.shape[0], np.int64)
        keys: list[Ints] = [np.empty(0, np.int64)]
        skipped_rows: list[SkippedRows] = []
        rows = checksum = 0
        for result in examine(self.dataset, start, stop, self.num_classes):
            if isinstance(result, SkippedRows):
                skipped_rows.append(result)
                continue
            rows += len(result.ids)
            labels += np.bincount(result.labels, minlength=self.num_classes)
            sums += result.numbers(self.dataset.layout).sum(axis=(0, 2), dtype=np.int64)
            checksum = (checksum + fingerprint(result)) & WORD
            # Without hashes this pass only counts: the hashes are fitted to its result.
            if self.hashes:
                keys.append(self.hashes.buckets(result.images))
        unique, counts = np.unique(np.concatenate(keys), return_counts=True)
        return ChunkScan(
            chunk,
            rows,
            labels,
            sums,
            checksum,
            unique,
            counts.astype(np.int64),
            merge_ranges(self.dataset, skipped_rows),
        )


@dataclass(frozen=True)
class BatchScan:
    """The result of a pass over a batch.

    Attributes:
        scan: counts and fingerprint of the good rows.
        keys_by_chunk: by chunk, the bucket keys, ascending, and the rows of each bucket.
        skipped_rows: ranges to leave out.
    """

    scan: Scan
    keys_by_chunk: list[tuple[Ints, Ints]]
    skipped_rows: list[SkippedRows]


def scan_batch(
    job: LookJob, bounds: Sequence[tuple[int, int]], pieces: int, run: Run[tuple[int, int, int], ChunkScan]
) -> BatchScan:
    """Read all chunks in about ``pieces`` tasks, with at least one task per chunk.

    The driver receives the buckets of every task's rows, one range per undecodable record, and one range per run of
    adjacent bad labels. This is O(rows) if every second label is bad.

    Args:
        job: the work of a task.
        bounds: id ranges of the chunks.
        pieces: wanted number of tasks.
        run: maps the job over the parts.
    """
    inside = max(1, -(-pieces // len(bounds)))
    parts = [(chunk, *part) for chunk, bound in enumerate(bounds) for part in ranges(*bound, inside)]
    chunk_scans = run(job, parts)
    labels = np.zeros((len(bounds), job.num_classes), np.int64)
    for part in chunk_scans:
        labels[part.chunk] += part.labels
    sums = sum((part.sums for part in chunk_scans), np.zeros(job.dataset.layout.shape[0], np.int64))
    # Sums of hashes do not depend on how rows are divided among tasks.
    word = sum(part.fingerprint for part in chunk_scans) & WORD
    versions = frozenset(part.versions for part in chunk_scans)
    scan = Scan(sum(part.rows for part in chunk_scans), labels, sums, word, versions=versions)
    keys_by_chunk = [_merge_keys([part for part in chunk_scans if part.chunk == chunk]) for chunk in range(len(bounds))]
    return BatchScan(
        scan,
        keys_by_chunk,
        ranges_to_leave_out(job.dataset, (entry for part in chunk_scans for entry in part.skipped_rows)),
    )


def _merge_keys(parts: Sequence[ChunkScan]) -> tuple[Ints, Ints]:
    """Return the bucket keys of all parts of a chunk, ascending, and the rows of each, int64 [k]."""
    keys, places = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    return keys, counts
