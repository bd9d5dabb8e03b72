"""Arrow IPC files and streams with a column of images, as Hugging Face's datasets save them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa

from pipeline.core.errors import DataError
from pipeline.core.shardset.schema import words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.retries import shortage_of
from pipeline.core.storage.store import Store
from pipeline.input.formats.tables.columns import ColumnTable
from pipeline.input.formats.tables.table_format import TableFormat

FILE = b"ARROW1"
STREAM = b"\xff\xff\xff\xff"  # before every message of a stream
STREAM_END = STREAM + bytes(4)  # a message without content, which a writer adds when it closes its file
SCHEMA_BYTES = 1 << 20  # the most bytes of a stream's schema message


class BoundedFile(io.RawIOBase):
    """A file that never reads beyond its end: a damaged length would otherwise allocate as much memory as it claims."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__()
        self._size = store.info(path).bytes
        self._file = store.open(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._size - self.tell())
        return self._file.read(rest if size < 0 else min(size, rest))

    def close(self) -> None:
        self._file.close()
        super().close()


class ArrowFile:
    """An open Arrow file, whose record batches are the groups of the table."""

    is_sequential = False

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        reader = self._reader([])
        self.schema = pa.ipc.open_file(BoundedFile(store, path)).schema
        self.group_rows = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]

    def batches(self, rows: int, group: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
        reader = self._reader(columns)
        for number in range(reader.num_record_batches) if group is None else (group,):
            yield from slices(reader.get_batch(number), rows)

    def _reader(self, columns: list[str]) -> pa.RecordBatchFileReader:
        """Open the file for some columns. The others are not read. Without columns, open it for its numbers of rows."""
        schema = pa.ipc.open_file(BoundedFile(self._store, self._path)).schema
        # Arrow must read a column to number the rows: if possible not the images.
        numeric = [at for at, field in enumerate(schema) if pa.types.is_primitive(field.type)]
        fields = [schema.get_field_index(name) for name in columns] or numeric[:1] or [0]
        options = pa.ipc.IpcReadOptions(included_fields=fields, ensure_alignment=pa.ipc.Alignment.Any)
        return pa.ipc.open_file(BoundedFile(self._store, self._path), options=options)


class ArrowStream:
    """An open Arrow stream, which is one group, because a batch can only be found by reading those before it."""

    is_sequential = True

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        with self._reader() as reader:
            self.schema = reader.schema
            self.group_rows = [sum(batch.num_rows for batch in reader)]
        end = max(0, store.info(path).bytes - len(STREAM_END))
        if store.read_range(path, end, len(STREAM_END)) != STREAM_END:
            raise DataError(
                f"{path} has no end of stream behind its {self.group_rows[0]} rows: it is cut off or being written"
            )

    def batches(self, rows: int, group: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with self._reader() as reader:
            for batch in reader:
                yield from slices(batch.select(columns), rows)

    def _reader(self) -> Any:
        return pa.ipc.open_stream(BoundedFile(self._store, self._path))


def slices(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the parts of a batch of at most so many rows, without a copy.

    Raises ArrowInvalid for a damaged batch: pyarrow trusts its offsets, and would read memory outside of it."""
    batch.validate(full=True)
    for low in range(0, batch.num_rows, rows):
        yield batch.slice(low, rows)


class ArrowImages(TableFormat):
    """The format of Arrow files and streams."""

    name: ClassVar[str] = "arrow"
    summary: ClassVar[str] = "Arrow files and streams, with the columns of Parquet (save_to_disk of datasets)"

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return head[: len(FILE)] == FILE or (
            head[:4] == STREAM and 0 < int.from_bytes(head[4:8], "little") < SCHEMA_BYTES
        )

    def open_table(self, store: Store, path: str) -> ColumnTable:
        """Open a file or stream. Raises DataError if it is broken, and OSError if it cannot be read."""
        try:
            is_file = store.read_range(path, 0, len(FILE)) == FILE
            return ArrowFile(store, path) if is_file else ArrowStream(store, path)
        except (pa.ArrowException, MemoryError, OSError) as error:
            if isinstance(error, PermissionError):
                raise
            if shortage := shortage_of(error, path):
                raise shortage from None
            raise DataError(f"{path} is not a whole Arrow file: {words_of(error)}") from None
