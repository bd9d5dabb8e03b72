"""A table of embeddings: Parquet files of (id, embedding), in any order of files and rows. No Spark.

The id of a row is its position in the input. ``python -m trainer embed`` writes such tables, and other programs can
too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.assignment_table import MOST_ROWS, whole_numbers
from pipeline.input.dataset import Block, Dataset
from pipeline.input.files import match_paths, plain_files
from pipeline.input.formats.tables.vectors import vectors_of

ID = "id"
VECTOR = "embedding"
PART_BYTES = 64 << 20  # the part of a file that a task reads
# small batches, because a shuffle holds a thousand of them
BATCH_ROWS = 1 << 16
BATCH_BYTES = 256 << 10

Vectors = npt.NDArray[np.float32]


def is_table(embedding: str | None) -> bool:
    """True if --embedding names a table, i.e. a path or URI, which contains a slash; column names do not."""
    return embedding is not None and "/" in embedding


@dataclass(frozen=True)
class FilePart:
    """The unit that a task reads: every ``parts``-th row group of a file, starting with row group ``part``."""

    path: str
    part: int
    parts: int


def split_files(files: Sequence[FileInfo]) -> tuple[FilePart, ...]:
    """Divide large files between tasks, without opening them: the tasks count the row groups."""
    parts_of_files = [(file.path, max(1, file.bytes // PART_BYTES)) for file in files]
    return tuple(FilePart(path, part, parts) for path, parts in parts_of_files for part in range(parts))


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table. Picklable, O(files). parts: the units that tasks read. length: numbers per vector."""

    store: Store
    uri: str
    parts: tuple[FilePart, ...]
    length: int

    @property
    def paths(self) -> list[str]:
        return [part.path for part in self.parts if not part.part]

    def read(self, part: FilePart) -> Iterator[tuple[Ints, Vectors]]:
        """Yield ids int64 [rows] and their vectors float32 [rows, length], in batches.

        Raises DataError with the file and row."""
        layout = vector_layout(self.length)
        with self.store.open(part.path) as file, broken_is_data_error(part.path):
            parquet = _open_table_file(file, part.path)
            # Skipped row groups still count for the row numbers in error lines.
            first = 0
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES // (4 * self.length)))
            for group in range(parquet.num_row_groups):
                if group % part.parts == part.part:
                    at = first
                    for batch in parquet.iter_batches(rows, [group], columns=[ID, VECTOR]):
                        ids = whole_numbers(batch.column(ID), ID, part.path, MOST_ROWS)
                        data = vectors_of(batch.column(VECTOR), layout, part.path, at)
                        yield ids, data.view(np.float32)
                        at += len(ids)
                first += parquet.metadata.row_group(group).num_rows


def vector_layout(length: int) -> Layout:
    return Layout((length, 1, 1), dtype="float32")


def open_embeddings(store: Store, uri: str) -> EmbeddingTable:
    """Open the table in a file, a folder or a pattern.

    Reads only the first non-empty file. Raises DataError if there is no table."""
    uri = store.resolve(uri)
    files = plain_files(store, match_paths(store, uri, flag="--embedding"))
    if not files:
        raise DataError(f"{uri} holds no table of embeddings; expected Parquet with the columns {ID} and {VECTOR}")
    # The first vector tells the length of all.
    for file in files:
        with store.open(file.path) as stream, broken_is_data_error(file.path):
            first = next(_open_table_file(stream, file.path).iter_batches(1, columns=[VECTOR]), None)
            if first is not None and len(first):
                length = vectors_of(first.column(0), None, file.path, 0).shape[1] // 4
                if not length:
                    raise DataError(f"{file.path}, row 0: {VECTOR} is an empty vector")
                return EmbeddingTable(store, uri, split_files(files), length)
    raise DataError(f"{uri} holds no rows")


def _open_table_file(file: object, path: str) -> pq.ParquetFile:
    """Open a Parquet file of a table. Raises DataError if it lacks a column."""
    parquet = pq.ParquetFile(file)
    names = parquet.schema_arrow.names
    for name in (ID, VECTOR):
        if name not in names:
            raise DataError(
                f"{path} has no column {name}; a table of embeddings has {ID} and {VECTOR}, got {', '.join(names)}"
            )
    return parquet


def sort_vectors(parts: Sequence[tuple[Ints, Vectors]], low: int, high: int, length: int) -> tuple[Vectors, str | None]:
    """Return the vectors of rows low..high-1, float32 [rows, length], in id order, and an error text or None.

    It is an error if a row has no vector or several.

    Args:
        parts: ids and vectors in any order.
        low: the first row.
        high: the row after the last.
        length: numbers per vector.
    """
    ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in parts)])
    vectors = np.concatenate([np.empty((0, length), np.float32), *(vectors for _, vectors in parts)])
    counts = np.bincount(ids - low, minlength=high - low)
    if len(missing := np.flatnonzero(counts == 0)):
        more = f", nor have {len(missing) - 1:,} others up to row {high - 1}" if len(missing) > 1 else ""
        return vectors, f"row {low + missing[0]} has no embedding{more}; a table needs every row of the input once"
    if len(twice := np.flatnonzero(counts > 1)):
        row = twice[0]
        return vectors, f"row {low + row} has {counts[row]} embeddings; a table needs every row of the input once"
    return vectors[np.argsort(ids)], None


@dataclass(frozen=True)
class KeptVectors:
    """The float32 vectors of rows low..high-1, in a file of their own."""

    low: int
    high: int
    path: str


@dataclass(frozen=True)
class EmbeddingDataset(Dataset):
    """The rows of another dataset, with vectors in place of the images.

    source: the other dataset. ranges: the files of vectors, by id, without gaps."""

    source: Dataset
    ranges: tuple[KeptVectors, ...]

    @property
    def rows(self) -> int:
        return self.source.rows

    def read(self, start: int, stop: int, *, images: bool = True) -> Iterator[Block]:
        """Yield rows with start <= id < stop.

        Reads the source's labels and the vectors, but no images of the source."""
        for block in self.source.read(start, stop, images=False):
            vectors = self._vectors(int(block.ids[0]), int(block.ids[-1]) + 1) if images else None
            yield Block(block.ids, replace(block.columns, images=vectors))

    def _vectors(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the vectors of rows start <= id < stop as bytes, uint8 [rows, 4 * length], from the files of
        vectors."""
        size = self.record_bytes
        data = bytearray()
        first = bisect_right(self.ranges, start, key=lambda kept_range: kept_range.low) - 1
        for kept_range in self.ranges[first:]:
            if kept_range.low >= stop:
                break
            low = max(start, kept_range.low)
            high = min(stop, kept_range.high)
            data += self.store.read_range(kept_range.path, (low - kept_range.low) * size, (high - low) * size)
        return np.frombuffer(data, np.uint8).reshape(stop - start, size)


def embedding_dataset(source: Dataset, table: EmbeddingTable, ranges: tuple[KeptVectors, ...]) -> EmbeddingDataset:
    layout = replace(source.layout, shape=(table.length, 1, 1), dtype="float32", column=None)
    return EmbeddingDataset(source.store, table.uri, "embeddings", source.files, layout, source, ranges)
