"""An open table and its columns: how one is found, and its plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.core.errors import DataError
from pipeline.core.shardset.schema import TARGET_COLUMN
from pipeline.input.formats.base import check_label_range


class ColumnTable(Protocol):
    """An open file of a table.

    schema: its columns. group_rows: rows of each group, which are read one after the other. is_sequential: whether a row
    is only found by reading the rows before it."""

    schema: pa.Schema
    group_rows: list[int]
    is_sequential: bool

    def batches(self, rows: int, group: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most so many rows of one group, or of all. columns: the columns to read."""


def pick_column(schema: pa.Schema, name: str | None, usual: tuple[str, ...], path: str) -> str:
    """Return a column of the file: the given one, or the first of the usual ones. Raises DataError if there is none."""
    for choice in (name,) if name else usual:
        if choice in schema.names:
            return choice
    flag = "" if name else "; --image-column names another one"
    raise DataError(
        f"{path} has no column {name or ' or '.join(usual[:2])}; its columns are {', '.join(schema.names)}{flag}"
    )


def check_single(schema: pa.Schema, names: Iterable[str], path: str) -> None:
    """Raise DataError if a file has several columns of one of these names, which it is then unclear how to read."""
    for name in names:
        if (number := schema.names.count(name)) > 1:
            raise DataError(f"{path} has {number} columns {name}; rename all but one")


def plain_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array without a dictionary."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def first_true(mask: pa.Array | pa.ChunkedArray) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


def whole_numbers(column: pa.ChunkedArray | pa.Array, name: str, path: str, first: int) -> npt.NDArray[np.int32]:
    """Return an integer column as int32. Raises DataError for nulls, other types and numbers beyond int32.

    first: number in the file of the column's first row, for error lines."""
    if column.null_count:
        raise DataError(f"{path}, row {first + first_true(column.is_null())}: {name} is null")
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: {name} is {column.type}, not whole numbers")
    numbers = column.to_numpy()
    check_label_range(numbers, f"{path}, near row {first}: {name}")
    return np.asarray(numbers, np.int32)


def read_targets(column: pa.ChunkedArray, path: str, first: int) -> npt.NDArray[np.float32]:
    """Return a column of targets as float32. Raises DataError for one that is null or not finite.

    first: number in the file of the column's first row."""
    values = np.asarray(column.cast(pa.float32()).to_numpy(zero_copy_only=False))
    bad_rows = np.flatnonzero(~np.isfinite(values))
    if len(bad_rows):
        raise DataError(
            f"{path}, row {first + int(bad_rows[0])}: {TARGET_COLUMN} is {values[bad_rows[0]]}, not a number"
        )
    return values
