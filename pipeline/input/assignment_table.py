"""A table that assigns rows to workers: from a committed set, or any Parquet or CSV. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.shardset.manifest import ShardSet, read_committed
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.store import Store
from pipeline.input.files import match_paths, plain_files

COLUMNS = ("id", "worker", "copy", "group")  # the last two may be absent
PARQUET = b"PAR1"  # the first bytes of such a file
ABSENT = -1
BATCH_ROWS = 1 << 18
MOST_ROWS = 1 << 48


@dataclass(frozen=True)
class AssignmentTable:
    """The files of an assignment table. Picklable if made_by is None.

    files: Parquet or CSV, in any order. made_by: the committed set of the assignment, or None."""

    store: Store
    uri: str
    files: tuple[str, ...]
    made_by: ShardSet | None = None


def open_table(store: Store, uri: str) -> AssignmentTable:
    """Open the assignment of a committed set, a file, a folder or a pattern. Raises DataError if there is none."""
    uri = store.resolve(uri)
    entries = match_paths(store, uri, flag="--assignment")
    if len(entries) == 1 and entries[0].is_dir and (committed := read_committed(store, uri)):
        # The folder of a set also holds shards and leftovers of killed runs, so read only the listed files.
        files = tuple(f"{committed.uri}/{file.path}" for file in committed.assignment_files())
        if not files:
            raise DataError(
                f"{uri} was made by an older version, without its assignment; make it again with --overwrite"
            )
        return AssignmentTable(store, uri, files, committed)
    files = tuple(file.path for file in plain_files(store, entries))
    if not files:
        raise DataError(f"{uri} holds no table of workers; expected Parquet or CSV with the columns id and worker")
    return AssignmentTable(store, uri, files)


def read_lines(store: Store, path: str) -> Iterator[Ints]:
    """Yield the lines of one file in blocks, int64 [4, lines]: id, worker, copy, group; ABSENT if a column is missing.

    Raises DataError if the file is no such table."""
    with store.open(path) as file, broken_is_data_error(path):
        if path.lower().endswith((".csv", ".csv.gz")):
            source: Any = pa.CompressedInputStream(file, "gzip") if path.lower().endswith(".gz") else file
            reader = csv.open_csv(source)
            yield from (_columns(batch, path) for batch in reader)
            return
        if file.read(len(PARQUET)) != PARQUET:
            raise DataError(f"{path} is no Parquet file; the name of a CSV file ends with .csv or .csv.gz")
        parquet = pq.ParquetFile(file)
        have = [name for name in COLUMNS if name in parquet.schema_arrow.names]
        _check_columns(parquet.schema_arrow.names, path)
        yield from (_columns(batch, path) for batch in parquet.iter_batches(BATCH_ROWS, columns=have))


def _check_columns(names: list[str], path: str) -> None:
    """Raise DataError if a file lacks the column id or worker."""
    missing = [name for name in COLUMNS[:2] if name not in names]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]}; a table of workers has id and worker, got {', '.join(names)}"
        )


def _columns(batch: pa.RecordBatch, path: str) -> Ints:
    """Return the lines of a batch, int64 [4, lines]. Raises DataError for a missing column or an invalid value."""
    _check_columns(batch.schema.names, path)
    lines = np.full((len(COLUMNS), len(batch)), ABSENT, np.int64)
    for place, name in enumerate(COLUMNS):
        if name not in batch.schema.names:
            continue
        most = MOST_ROWS if name == "id" else np.iinfo(np.int32).max
        lines[place] = whole_numbers(batch.column(name), name, path, most)
    return lines


def whole_numbers(values: Any, name: str, path: str, most: int) -> Ints:
    """Return a column as int64 [rows]. Raises DataError if it holds anything but whole numbers in 0..most."""
    if values.null_count or not pa.types.is_integer(values.type):
        kind = "nulls" if values.null_count else f"{values.type}, not whole numbers"
        raise DataError(f"{path}: column {name} holds {kind}; write every row's {name} as a whole number")
    numbers: Ints = values.cast(pa.int64()).to_numpy()
    odd = np.flatnonzero((numbers < 0) | (numbers > most))
    if len(odd):
        raise DataError(f"{path}: {name} {numbers[odd[0]]} is not in 0..{most}")
    return numbers
