"""A discovered and scanned input: the starting point of the steps after the scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark import SparkContext

from pipeline.assignment.chunks import chunk_bounds, piece_bounds, workers_per_task
from pipeline.core.shardset.parts import Input, Repeats
from pipeline.input.dataset import Dataset
from pipeline.input.repeats import ImageHashes, find_repeats, merge_repeats, num_buckets, split_by_bucket
from pipeline.input.scan import PieceScan, Scan, merge, scan, scan_piece
from pipeline.spark.images import Images, run_on


@dataclass(frozen=True)
class ScannedInput:
    """A scanned input.

    Attributes:
        dataset: the rows.
        scan: counts and checks.
        parts: the id ranges of files.
        bounds: the id ranges that writing tasks read, which are also the unit of counts: equal to parts, or finer if
            rows are written through files by ranges of ``width`` workers (output/spill.py).
        width: the workers per range, or None.
    """

    dataset: Dataset
    scan: Scan
    parts: list[tuple[int, int]]
    bounds: list[tuple[int, int]]
    width: int | None

    def fingerprint(self) -> str:
        return f"{self.scan.rows}-{self.scan.fingerprint:016x}"

    def attributes(self) -> str | None:
        """Return the sum of the hashes of the kept columns, None without such columns."""
        return f"{self.scan.attribute_sum:016x}" if self.dataset.layout.attributes else None

    def describe(self) -> Input:
        return Input(
            uri=self.dataset.uri,
            format=self.dataset.format,
            files=len(self.dataset.files),
            bytes=self.dataset.bytes,
            rows=self.dataset.rows,
            fingerprint=self.fingerprint(),
            listing=self.dataset.listing(),
            attributes=self.attributes(),
        )


@dataclass(frozen=True)
class ScanPlan:
    """The ranges of a scan; see ``ScannedInput``. pieces: the id range of each task."""

    dataset: Dataset
    parts: list[tuple[int, int]]
    bounds: list[tuple[int, int]]
    width: int | None
    pieces: list[tuple[int, int]]

    def scanned(self, result: Scan) -> ScannedInput:
        return ScannedInput(self.dataset, result, self.parts, self.bounds, self.width)


def scan_input(context: SparkContext, dataset: Dataset, num_workers: int) -> ScannedInput:
    """Scan a data set in one task per piece and return it with the id ranges of its files and writing tasks.

    Raises DataError for a broken row, UsageError for more chunks than allowed."""
    plan = plan_scan(context, dataset, num_workers)
    return plan.scanned(scan(dataset, plan.bounds, len(plan.pieces), run_on(context)))


def scan_for_repeats(
    context: SparkContext, dataset: Dataset, num_workers: int, evaluation: Dataset | None
) -> tuple[ScannedInput, ScannedInput | None, Repeats]:
    """Scan rows and evaluation rows like ``scan_input``, and find images that occur twice.

    One job: 16 bytes per row pass through a shuffle, and a task holds the hashes of about 4 million rows. The driver
    receives what a scan sends, and a few numbers per bucket."""
    plans = [plan_scan(context, dataset, num_workers)] + ([plan_scan(context, evaluation, 1)] if evaluation else [])
    buckets = num_buckets(sum(plan.dataset.rows for plan in plans))
    tasks = [(number, piece) for number, plan in enumerate(plans) for piece in plan.pieces]

    def scan_task(task: tuple[int, tuple[int, int]]) -> Iterator[tuple[int, ImageHashes | tuple[int, int, PieceScan]]]:
        """Yield the hashes of a piece by bucket, then the result of its scan, which goes to a bucket of its own."""
        number, piece = task
        hashes: list[npt.NDArray[np.uint64]] = []
        result = scan_piece(plans[number].dataset, plans[number].bounds, piece, hashes)
        if not result.problem:
            images = ImageHashes(np.concatenate(hashes), np.arange(*piece), number == 1)
            yield from split_by_bucket(images, buckets)
        yield buckets, (number, piece[0], result)

    def gather(bucket: int, parts: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        contents = [part for _, part in parts]
        return iter([find_repeats(contents)]) if bucket < buckets else iter(contents)

    shuffled = context.parallelize(tasks, len(tasks)).flatMap(scan_task).partitionBy(buckets + 1, int)
    results = shuffled.mapPartitionsWithIndex(gather).collect()
    repeats = [each for each in results if isinstance(each, Repeats)]
    # In the order of ids, so that sums of real numbers do not depend on the shuffle.
    scans = sorted((each for each in results if isinstance(each, tuple)), key=lambda each: each[:2])
    scanned = [
        plan.scanned(merge([each[2] for each in scans if each[0] == number], plan.dataset.layout, len(plan.bounds)))
        for number, plan in enumerate(plans)
    ]
    return scanned[0], scanned[1] if evaluation else None, merge_repeats(repeats)


def plan_scan(context: SparkContext, dataset: Dataset, num_workers: int) -> ScanPlan:
    """Return the id ranges of a data set's scan. Raises UsageError for more chunks than allowed."""
    return ScanPlan(dataset, *bounds_of(0, dataset.rows, num_workers, dataset), Images(context, dataset).pieces())


def bounds_of(
    first: int, rows: int, num_workers: int, dataset: Dataset
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int | None]:
    """Split ``rows`` rows from id ``first`` on into files and tasks (see ScannedInput).

    Returns the id ranges of files, the id ranges of tasks, and the number of workers per range if rows are spilled by
    ranges of workers, else None. Raises UsageError for more chunks than allowed."""
    parts = chunk_bounds(rows, num_workers, dataset.record_bytes)
    width = workers_per_task(num_workers, dataset.record_bytes)
    spills = num_workers > width
    bounds = piece_bounds(parts, dataset.record_bytes) if spills else parts
    return _shift_bounds(parts, first), _shift_bounds(bounds, first), width if spills else None


def _shift_bounds(bounds: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(low + by, high + by) for low, high in bounds]
