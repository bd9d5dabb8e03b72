"""A discovered and scanned input: what the steps after the scan start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext

from pipeline.assignment.chunks import chunk_bounds
from pipeline.input.dataset import Dataset
from pipeline.input.scan import Scan, scan
from pipeline.spark.images import Images, run_on


@dataclass(frozen=True)
class Source:
    """A scanned input. bounds: the id ranges of the write tasks."""

    dataset: Dataset
    scan: Scan
    bounds: list[tuple[int, int]]

    def fingerprint(self) -> str:
        return f"{self.scan.rows}-{self.scan.fingerprint:016x}"

    def describe(self) -> dict[str, Any]:
        return {
            "uri": self.dataset.uri,
            "format": self.dataset.format,
            "files": len(self.dataset.files),
            "bytes": self.dataset.bytes,
            "rows": self.dataset.rows,
            "fingerprint": self.fingerprint(),
            "listing": self.dataset.listing(),
        }


def scanned(context: SparkContext, dataset: Dataset, num_workers: int) -> Source:
    bounds = chunk_bounds(dataset.rows, num_workers, dataset.record_bytes)
    pieces = len(Images(context, dataset).pieces())
    return Source(dataset, scan(dataset, bounds, pieces, run_on(context)), bounds)
