"""The columns of a shard: its public schema, and conversion of rows to Arrow batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.input.dataset import Block


def binary_array(images: npt.NDArray[np.uint8]) -> pa.Array:
    """Return uint8 [rows, bytes] as a binary column, without a copy if the rows are contiguous."""
    rows, pixels = images.shape
    offsets = fixed_size_offsets(rows, pixels)
    data = pa.py_buffer(np.ascontiguousarray(images).reshape(-1))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def fixed_size_offsets(rows: int, size: int) -> npt.NDArray[np.int32]:
    """Return the Arrow offsets of values of one size, int32 [rows + 1]. Raises OverflowError beyond Arrow's 2 GiB."""
    if rows * size > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{rows} images of {size} bytes are more than the 2 GiB of an Arrow column; use smaller blocks"
        )
    return np.arange(rows + 1, dtype=np.int32) * np.int32(size)


def record_batch(
    schema: pa.Schema,
    block: Block,
    rows: npt.NDArray[np.int64] | None = None,
    **extra: npt.NDArray[Any],
) -> pa.RecordBatch:
    """Return the given rows of a block under a schema.

    Args:
        schema: the columns of the batch.
        block: the rows.
        rows: the positions of the rows to take; default: all.
        extra: columns that the block lacks.
    """
    take: Any = slice(None) if rows is None else rows
    attributes = block.columns.attributes
    if rows is not None:
        attributes = {name: column.take(pa.array(rows)) for name, column in attributes.items()}
    values: dict[str, Any] = {"id": block.ids[take], "label": block.labels[take]}
    if block.columns.coarse_labels is not None:
        values["coarse_label"] = block.columns.coarse_labels[take]
    if block.columns.targets is not None:
        values["target"] = block.columns.targets[take]
    arrays = []
    for field in schema:
        # pa.array would need a bytes object per image; binary_array passes the buffer on.
        if field.name == "image":
            arrays.append(binary_array(block.images[take]))
        elif field.name in attributes:
            arrays.append(attributes[field.name])
        else:
            arrays.append(pa.array({**values, **extra}[field.name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
