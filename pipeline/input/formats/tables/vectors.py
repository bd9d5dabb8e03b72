"""A column of vectors as the bytes of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.input.formats.tables.columns import first_true


def vectors_of(column: Any, layout: Layout | None, path: str, first: int) -> npt.NDArray[np.uint8]:
    """Return a column of vectors as the bytes of float32: uint8 [rows, 4 d].

    Vectors are lists of numbers or spark.ml's dense ones.

    Args:
        column: the column.
        layout: the expected layout; None takes the length of the first vector.
        path: the file, for error lines.
        first: the row number of the column's first value.

    Raises:
        DataError: a broken value, with its place.
        UsageError: the column does not hold vectors.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_struct(array.type) and {"type", "values"} <= {field.name for field in array.type}:
        if array.null_count:
            raise DataError(f"{path}, row {first + first_true(array.is_null())}: the vector is null")
        if not pc.all(pc.equal(array.field("type"), 1)).as_py():
            raise DataError(f"{path}, near row {first}: a sparse vector; --embedding takes dense ones")
        array = array.field("values")
    # Spark ML's dense vectors are now lists too.
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    number = (pa.types.is_floating, pa.types.is_integer)
    if not any(kind(array.type) for kind in lists) or not any(kind(array.type.value_type) for kind in number):
        raise UsageError(f"--embedding: the column of {path} holds {array.type}, not vectors")
    if array.null_count:
        raise DataError(f"{path}, row {first + first_true(array.is_null())}: the vector is null")
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    expected = layout.shape[0] if layout else int(lengths[0])
    if (lengths != expected).any():
        at = int(np.flatnonzero(lengths != expected)[0])
        raise DataError(f"{path}, row {first + at}: the vector has {lengths[at]} numbers, the first one {expected}")
    flat = np.asarray(array.flatten().to_numpy(zero_copy_only=False)).astype(np.float32).reshape(len(array), expected)
    bad_rows = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(bad_rows):
        raise DataError(
            f"{path}, row {first + int(bad_rows[0])}: the vector holds numbers that are not finite in float32"
        )
    return flat.view(np.uint8).reshape(len(array), 4 * expected)
