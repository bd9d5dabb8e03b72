"""Parquet files with a column of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.retries import shortage_of
from pipeline.core.storage.store import Store
from pipeline.input.formats.tables.columns import ColumnTable
from pipeline.input.formats.tables.table_format import TableFormat

BUFFER_BYTES = 8 << 20  # the part of a column that is read at once, because a row group may be as large as its file


class ParquetTable:
    """An open Parquet file, whose row groups are the groups of the table."""

    is_sequential = False

    def __init__(self, file: pq.ParquetFile) -> None:
        self._file = file
        self.schema = file.schema_arrow
        self.group_rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]

    def batches(self, rows: int, group: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
        groups = None if group is None else [group]
        yield from self._file.iter_batches(rows, groups, columns=columns)


class ParquetImages(TableFormat):
    """The format of Parquet files."""

    name: ClassVar[str] = "parquet"
    summary: ClassVar[str] = "Parquet with a column of images: image files, raw bytes, lists, or Spark's images"

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return head[:4] == b"PAR1"

    def open_table(self, store: Store, path: str) -> ColumnTable:
        """Open a Parquet file. Raises DataError if it is broken, and OSError if it cannot be read."""
        try:
            return ParquetTable(pq.ParquetFile(store.open(path), buffer_size=BUFFER_BYTES))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, PermissionError):
                raise
            if shortage := shortage_of(error, path):
                raise shortage from None
            raise DataError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from None
