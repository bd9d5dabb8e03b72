"""A discovered and scanned input: the starting point of the steps after the scan."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import SparkContext

from pipeline.assignment.chunks import chunk_bounds, piece_bounds, workers_per_task
from pipeline.core.shardset.contract import Input
from pipeline.input.dataset import Dataset
from pipeline.input.scan import Scan, scan
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


def scan_input(context: SparkContext, dataset: Dataset, num_workers: int) -> ScannedInput:
    """Scan a data set in one task per piece and return it with the id ranges of its files and writing tasks.

    Raises DataError for a broken row, UsageError for more chunks than allowed."""
    parts = chunk_bounds(dataset.rows, num_workers, dataset.record_bytes)
    width = workers_per_task(num_workers, dataset.record_bytes)
    spills = num_workers > width
    bounds = piece_bounds(parts, dataset.record_bytes) if spills else parts
    pieces = len(Images(context, dataset).pieces())
    result = scan(dataset, bounds, pieces, run_on(context))
    return ScannedInput(dataset, result, parts, bounds, width if spills else None)
