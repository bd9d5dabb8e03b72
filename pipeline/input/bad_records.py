"""Broken records of an input, which are left out up to a limit instead of ending the run.

Streams have the same rules (arrivals.py): an image that cannot be decoded, or a label out of range. Ids count the
remaining rows. A file that cannot be opened still ends the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import MAX_CLASSES
from pipeline.input.arrivals import Arrivals, BadRecord, SkippedRows, examine, ranges_to_leave_out
from pipeline.input.dataset import Dataset, RecordRange, Run, ranges


class BadRecordLimit(NamedTuple):
    """The most broken records of an input: a number of rows, or an exact share of all rows."""

    rows: int | None
    share: Fraction = Fraction(0)

    def most(self, rows: int) -> int:
        """Return the most broken records among so many rows, rounded down."""
        return self.rows if self.rows is not None else int(rows * self.share)


def parse_limit(text: str) -> BadRecordLimit:
    """Return the limit of --max-bad-records. Raises UsageError for another text than N or P%."""
    if re.fullmatch(r"\d{1,12}", text):
        return BadRecordLimit(int(text))
    percent = re.fullmatch(r"(\d{1,3}(\.\d{1,6})?)%", text)
    # A float of 0.7% would allow 6 of 1,000 rows.
    if percent and Fraction(percent[1]) <= 100:
        return BadRecordLimit(None, Fraction(percent[1]) / 100)
    raise UsageError(f"--max-bad-records {text}: give a number of records, such as 10, or a share, such as 0.1%")


def leave_out_bad(
    dataset: Dataset, limit: BadRecordLimit, pieces: int, run: Run[Any, Any]
) -> tuple[Dataset, list[BadRecord]]:
    """Return the data set without its broken rows, and these as records of their files. Costs a pass over the rows.

    The driver receives the broken records: of each file at most ``MOST_BROKEN``, and a range per run of wrong labels.

    Args:
        dataset: the rows.
        limit: the most broken rows.
        pieces: the number of tasks.
        run: maps a function over the tasks.

    Raises:
        DataError: more rows are broken than the limit allows, or all of them.
    """
    # Rows that are decoded together fail together, so each is decoded by itself.
    segments = tuple(RecordRange(replace(file, decode_rows=0), 0, file.rows) for file in dataset.files)
    files = tuple(segment.file for segment in segments)
    arrivals = Arrivals(dataset.store, dataset.uri, dataset.format, files, dataset.layout, segments)
    found_ranges = run(lambda piece: _skipped(arrivals, piece), ranges(0, dataset.rows, pieces))
    skipped = ranges_to_leave_out(arrivals, [entry for some in found_ranges for entry in some])
    if not skipped:
        return dataset, []
    bad_rows = sum(entry.end - entry.first for entry in skipped)
    most = limit.most(dataset.rows)
    if bad_rows == dataset.rows:
        raise DataError(f"all {bad_rows:,} records are broken; the first: {skipped[0].reason}")
    if bad_rows > most:
        raise DataError(
            f"{bad_rows:,} of {dataset.rows:,} records are broken, and --max-bad-records allows {most:,}; the first:"
            f" {skipped[0].reason}"
        )
    bad_records = []
    for entry in skipped:
        file, record = arrivals.record(entry.first)
        bad_records.append(BadRecord(file.path, record, entry.reason, entry.end - entry.first))
    # Files without broken rows are decoded together again, and kept for later passes.
    broken_paths = {entry.source for entry in bad_records}
    whole = {file.path: file for file in dataset.files if file.path not in broken_paths}
    rest = arrivals.leave_out((entry.first, entry.end) for entry in skipped)
    kept_segments = tuple(part._replace(file=whole.get(part.file.path, part.file)) for part in rest.segments)
    return replace(rest, segments=kept_segments), bad_records


def _skipped(dataset: Arrivals, piece: tuple[int, int]) -> Sequence[SkippedRows]:
    """Return the broken rows of one task."""
    num_classes = dataset.layout.num_classes or MAX_CLASSES
    return [entry for entry in examine(dataset, *piece, num_classes) if isinstance(entry, SkippedRows)]
