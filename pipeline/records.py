"""The columns of a shard: the schema that others read, and rows as Arrow batches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dataset import Block
from pipeline.formats import Layout

SPARK_METADATA = b"org.apache.spark.sql.parquet.row.metadata"
SPARK_TYPES = {"int64": "long", "int32": "integer", "float": "float", "binary": "binary"}


def record_schema(layout: Layout, *, neighbourhood: bool, copy: bool = True) -> pa.Schema:
    """id, label[, coarse_label][, target], image[, copy][, neighbourhood]; the image column says its shape, dtype
    and layout, to Arrow readers in the field's metadata and to Spark in the table's."""
    image = {"shape": json.dumps(list(layout.shape)), "dtype": layout.dtype, "layout": "CHW"}
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("label", pa.int32(), nullable=False)]
    if layout.coarse:
        fields.append(pa.field("coarse_label", pa.int32(), nullable=False))
    if layout.targets:
        fields.append(pa.field("target", pa.float32(), nullable=False))
    fields.append(pa.field("image", pa.binary(), nullable=False, metadata=image))
    if copy:
        fields.append(pa.field("copy", pa.int32(), nullable=False))
    if neighbourhood:
        fields.append(pa.field("neighbourhood", pa.int32(), nullable=False))
    spark = {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": SPARK_TYPES[str(field.type)],
                "nullable": False,
                "metadata": image if field.name == "image" else {},
            }
            for field in fields
        ],
    }
    return pa.schema(fields, metadata={SPARK_METADATA: json.dumps(spark).encode()})


def binary_array(images: npt.NDArray[np.uint8]) -> pa.Array:
    """uint8 [rows, bytes] as a binary column, without a copy where the rows are contiguous."""
    rows, pixels = images.shape
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(pixels)
    data = pa.py_buffer(np.ascontiguousarray(images).reshape(-1))
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), data])


def record_batch(
    schema: pa.Schema,
    block: Block,
    rows: npt.NDArray[np.int64] | None = None,
    **extra: npt.NDArray[Any],
) -> pa.RecordBatch:
    """The given rows of a block (all without ``rows``) under a schema; ``extra`` holds columns the block lacks."""
    take = slice(None) if rows is None else rows
    values: dict[str, Any] = {"id": block.ids[take], "label": block.labels[take]}
    if block.columns.coarse_labels is not None:
        values["coarse_label"] = block.columns.coarse_labels[take]
    if block.columns.targets is not None:
        values["target"] = block.columns.targets[take]
    arrays = []
    for field in schema:
        if field.name == "image":
            arrays.append(binary_array(block.images[take]))
        else:
            arrays.append(pa.array({**values, **extra}[field.name], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
