"""The first pass over the rows: every label and record is checked, counted and fingerprinted before any write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.assignment.chunks import ChunkCounts, count_by_chunk, sum_counts
from pipeline.core.errors import DataError
from pipeline.core.hashing import image_hashes, row_hashes
from pipeline.core.shardset.layout import MAX_CLASSES, Layout
from pipeline.core.shardset.schema import attribute_hash
from pipeline.input.dataset import Block, Dataset, Run, ranges
from pipeline.input.decoded import decoder_versions

WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Scan:
    """The result of the first pass.

    Attributes:
        rows: the number of rows.
        label_counts: int64 [chunks, classes].
        channel_sums: [channels], int64 for pixels and float64 for real numbers.
        fingerprint: 64-bit sum over rows.
        attribute_sum: 64-bit sum over the kept columns of rows, 0 without.
        versions: the versions of the decoders, one entry if all hosts have the same.
    """

    rows: int
    label_counts: npt.NDArray[np.int64]
    channel_sums: npt.NDArray[Any]
    fingerprint: int
    attribute_sum: int = 0
    versions: frozenset[str] = frozenset()

    @property
    def num_classes(self) -> int:
        return int(self.label_counts.shape[1])

    def channel_means(self, pixels_a_channel: int) -> list[float]:
        return [round(float(total) / (self.rows * pixels_a_channel), 6) for total in self.channel_sums]


@dataclass(frozen=True)
class PieceScan:
    """The result of one scanning task.

    Attributes:
        rows: the rows that were scanned.
        counts: rows by chunk and class; None if no row was scanned.
        channel_sums: see Scan.
        fingerprint: see Scan.
        attribute_sum: see Scan.
        problem: the first broken row and its error line. A value, because Spark retries a task that raises.
        versions: the versions of the decoders on this host.
    """

    rows: int
    counts: ChunkCounts | None
    channel_sums: npt.NDArray[Any]
    fingerprint: int
    attribute_sum: int = 0
    problem: tuple[int, str] | None = None
    versions: str = field(default_factory=decoder_versions)


def fingerprint(block: Block) -> int:
    """Return the sum of ``row_hashes`` over a block."""
    columns = block.columns
    hashes = row_hashes(block.ids, block.labels, columns.coarse_labels, columns.targets, block.images)
    with np.errstate(over="ignore"):
        return int(hashes.sum())


def _invalid(block: Block, dataset: Dataset) -> tuple[int, str] | None:
    """Return the first row whose label or image is invalid, as (id, error line)."""
    columns = block.columns
    # If the number of classes is unknown, a single stray label could make the dense histograms arbitrarily long.
    limit = dataset.layout.num_classes or MAX_CLASSES
    checks = [(columns.labels, limit, "label")]
    if columns.coarse_labels is not None:
        checks.append((columns.coarse_labels, dataset.layout.coarse or MAX_CLASSES, "coarse label"))
    for labels, classes, name in checks:
        bad = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(bad):
            row = int(block.ids[bad[0]])
            value = labels[bad[0]]
            return row, f"{dataset.where(row)}: {name} {value} is not in 0..{classes - 1}"
    if dataset.layout.dtype == "float32":
        # A NaN would spread through the sums of the PCA to the points of all rows.
        bad_rows = np.flatnonzero(~np.isfinite(block.numbers(dataset.layout)).all(axis=(1, 2)))
        if len(bad_rows):
            row = int(block.ids[bad_rows[0]])
            return row, f"{dataset.where(row)}: the image holds numbers that are not finite"
    return None


def scan_piece(
    dataset: Dataset,
    bounds: Sequence[tuple[int, int]],
    piece: tuple[int, int],
    hashes: list[npt.NDArray[np.uint64]] | None = None,
) -> PieceScan:
    """Scan the rows of one task.

    Args:
        dataset: the rows.
        bounds: the id range [low, high) of each chunk.
        piece: the id range [low, high) of the task.
        hashes: a list that gets the hashes of the images of each block, or None.
    """
    layout = dataset.layout
    classes = layout.num_classes or 1
    counts: ChunkCounts | None = None
    sums = _no_sums(layout)
    checksum = attribute_sum = rows = 0
    try:
        for block in dataset.read(*piece):
            problem = _invalid(block, dataset)
            if problem:
                return PieceScan(rows, counts, sums, checksum, attribute_sum, problem)
            # Without a known number of classes, the histogram grows with the labels.
            labels = block.labels.astype(np.int64)
            block_counts = count_by_chunk(block.ids, labels, max(classes, int(labels.max()) + 1), list(bounds))
            counts = counts + block_counts if counts else block_counts
            sums += block.numbers(layout).sum(axis=(0, 2), dtype=sums.dtype)
            checksum = (checksum + fingerprint(block)) & WORD
            attribute_sum = (attribute_sum + attribute_hash(block.ids, block.columns.attributes)) & WORD
            if hashes is not None:
                hashes.append(image_hashes(block.images))
            rows += len(block.ids)
    except DataError as error:
        return PieceScan(rows, counts, sums, checksum, attribute_sum, (piece[0] + rows, str(error)))
    return PieceScan(rows, counts, sums, checksum, attribute_sum)


def _no_sums(layout: Layout) -> npt.NDArray[Any]:
    return np.zeros(layout.shape[0], np.int64 if layout.dtype == "uint8" else np.float64)


def merge(parts: Sequence[PieceScan], layout: Layout, num_chunks: int) -> Scan:
    """Merge the results of all tasks. Raises DataError with the file and offset of the first broken row."""
    problems = [part.problem for part in parts if part.problem]
    if problems:
        raise DataError(min(problems)[1])
    counts = sum_counts([part.counts for part in parts if part.counts], num_chunks, layout.num_classes or 1)
    sums = sum((part.channel_sums for part in parts), _no_sums(layout))
    word = sum(part.fingerprint for part in parts) & WORD
    attribute_sum = sum(part.attribute_sum for part in parts) & WORD
    return Scan(
        sum(part.rows for part in parts), counts, sums, word, attribute_sum, frozenset(part.versions for part in parts)
    )


def scan(dataset: Dataset, bounds: list[tuple[int, int]], pieces: int, run: Run[tuple[int, int], PieceScan]) -> Scan:
    """Check and count all rows. The driver receives about chunks x classes numbers.

    Args:
        dataset: the rows.
        bounds: the id range [low, high) of each chunk.
        pieces: the number of tasks.
        run: run(fn, items) maps a function over items.

    Raises:
        DataError: a broken row, with its file and offset.
    """
    parts = run(lambda piece: scan_piece(dataset, bounds, piece), ranges(0, dataset.rows, pieces))
    return merge(parts, dataset.layout, len(bounds))
