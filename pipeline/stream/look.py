"""The first pass over a batch: every record read and checked, fingerprinted, and put into a bucket. In tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.clustering.hashes import Hashes
from pipeline.core.arrays import Ints
from pipeline.input.dataset import Run, ranges
from pipeline.input.decoded import decoder_versions
from pipeline.input.scan import WORD, Scan, fingerprint
from pipeline.stream.arrivals import Arrivals, Found, examine, joined, left_out


@dataclass(frozen=True)
class Looked:
    """What a task has found in a part of a chunk. broken: what is left out, ascending; where anything is, ids close up and
    all is looked at again. keys int64 [k], ascending, and counts int64 [k], of buckets. versions: of what decoded the
    rows."""

    chunk: int
    rows: int
    labels: Ints
    sums: npt.NDArray[Any]
    fingerprint: int
    keys: Ints
    counts: Ints
    broken: list[Found]
    versions: str = field(default_factory=decoder_versions)


@dataclass(frozen=True)
class LookJob:
    """Picklable. hashes: None before they are fitted: then no row is put into a bucket."""

    dataset: Arrivals
    num_classes: int
    hashes: Hashes | None

    def __call__(self, piece: tuple[int, int, int]) -> Looked:
        """piece: the number of a chunk, and ids in it."""
        chunk, start, stop = piece
        labels, sums = np.zeros(self.num_classes, np.int64), np.zeros(self.dataset.layout.shape[0], np.int64)
        keys: list[Ints] = [np.empty(0, np.int64)]
        broken: list[Found] = []
        rows = checksum = 0
        for found in examine(self.dataset, start, stop, self.num_classes):
            if isinstance(found, Found):
                broken.append(found)
                continue
            rows += len(found.ids)
            labels += np.bincount(found.labels, minlength=self.num_classes)
            sums += found.numbers(self.dataset.layout).sum(axis=(0, 2), dtype=np.int64)
            checksum = (checksum + fingerprint(found)) & WORD
            if self.hashes:
                keys.append(self.hashes.buckets(found.images))
        unique, counts = np.unique(np.concatenate(keys), return_counts=True)
        return Looked(
            chunk, rows, labels, sums, checksum, unique, counts.astype(np.int64), joined(self.dataset, broken)
        )


@dataclass(frozen=True)
class Seen:
    """A batch that was looked at. found: of every chunk its buckets' keys, ascending, and rows; broken: what is left out."""

    scan: Scan
    found: list[tuple[Ints, Ints]]
    broken: list[Found]


def look(job: LookJob, bounds: Sequence[tuple[int, int]], pieces: int, run: Run[tuple[int, int, int], Looked]) -> Seen:
    """All chunks, in about so many tasks, or one a chunk. The driver gets the buckets of every task's rows, and a range for
    each record that cannot be decoded and for neighbours with bad labels: O(rows) where every second label is bad."""
    inside = max(1, -(-pieces // len(bounds)))
    parts = [(chunk, *part) for chunk, bound in enumerate(bounds) for part in ranges(*bound, inside)]
    looked = run(job, parts)
    labels = np.zeros((len(bounds), job.num_classes), np.int64)
    for part in looked:
        labels[part.chunk] += part.labels
    sums = sum((part.sums for part in looked), np.zeros(job.dataset.layout.shape[0], np.int64))
    word = sum(part.fingerprint for part in looked) & WORD
    versions = frozenset(part.versions for part in looked)
    scan = Scan(sum(part.rows for part in looked), labels, sums, word, versions)
    found = [_merged([part for part in looked if part.chunk == chunk]) for chunk in range(len(bounds))]
    return Seen(scan, found, left_out(job.dataset, (entry for part in looked for entry in part.broken)))


def _merged(parts: Sequence[Looked]) -> tuple[Ints, Ints]:
    keys, places = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    return keys, counts
