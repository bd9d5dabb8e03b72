"""The Parquet schema of a shard, and the reading of its columns."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from PIL import Image, UnidentifiedImageError

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.hashing import splitmix64
from pipeline.core.json_values import fits, parse
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES, Dtype, KeptColumn, Layout
from pipeline.core.storage.retries import shortage_of
from pipeline.core.storage.uri import is_remote

NULL_WORD = 0x6E756C6C6E756C6C  # the hash of a missing value
SPARK_METADATA = b"org.apache.spark.sql.parquet.row.metadata"
# The types of kept columns, in which every type of a source is stored, by their name in Spark.
KEPT_TYPES = {
    "int64": "long",
    "double": "double",
    "bool": "boolean",
    "string": "string",
    "date32[day]": "date",
    "timestamp[us]": "timestamp_ntz",
}
SPARK_TYPES = {"int32": "integer", "float": "float", "binary": "binary"} | KEPT_TYPES
OWN_COLUMNS = ("id", "label", "coarse_label", "target", "image", "copy", "neighbourhood")
PARTITION_COLUMN = "worker"  # Spark reads it from the names of folders, whatever the files hold


def unreadable_in_spark(columns: Sequence[str]) -> list[str]:
    """Return the kept columns that Spark does not read in shards, because it ignores the case of names."""
    names = {*OWN_COLUMNS, PARTITION_COLUMN}
    unreadable = []
    for column in columns:
        if column.lower() in names:
            unreadable.append(column)
        names.add(column.lower())
    return unreadable


def record_schema(layout: Layout, *, neighbourhood: bool, copy: bool = True) -> pa.Schema:
    """Return the schema id[, label][, coarse_label][, target], image[, copy][, neighbourhood], then kept columns.

    Shape, dtype and layout of the images are in the field's metadata for Arrow and in the table's for Spark. Only kept
    columns may hold nulls."""
    image = {"shape": json.dumps(list(layout.shape)), "dtype": layout.dtype, "layout": "CHW"}
    fields = [pa.field("id", pa.int64(), nullable=False)]
    if layout.labelled:
        fields.append(pa.field("label", pa.int32(), nullable=False))
    if layout.coarse:
        fields.append(pa.field("coarse_label", pa.int32(), nullable=False))
    if layout.targets:
        fields.append(pa.field("target", pa.float32(), nullable=False))
    fields.append(pa.field("image", pa.binary(), nullable=False, metadata=image))
    if copy:
        fields.append(pa.field("copy", pa.int32(), nullable=False))
    if neighbourhood:
        fields.append(pa.field("neighbourhood", pa.int32(), nullable=False))
    fields += [pa.field(column.name, pa.type_for_alias(column.type)) for column in layout.attributes]
    # Spark ignores the metadata of Arrow's fields and reads this JSON, so the shape of the images is repeated in it.
    spark = {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": SPARK_TYPES[str(field.type)],
                "nullable": field.nullable,
                "metadata": image if field.name == "image" else {},
            }
            for field in fields
        ],
    }
    return pa.schema(fields, metadata={SPARK_METADATA: json.dumps(spark).encode()})


def kept_type(kind: pa.DataType) -> str | None:
    """Return the name of the type in which a column of another program is kept, or None if it cannot be."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    families = {
        "bool": (pa.types.is_boolean,),
        "int64": (pa.types.is_integer,),
        "double": (pa.types.is_floating,),
        "string": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "date32[day]": (pa.types.is_date,),
        "timestamp[us]": (pa.types.is_timestamp,),
    }
    return next((name for name, tests in families.items() if any(test(kind) for test in tests)), None)


def kept_values(column: pa.ChunkedArray | pa.Array, attribute: KeptColumn, path: str) -> pa.Array:
    """Return a column of a file in the type in which it is kept. Raises DataError for a value that does not fit."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    try:
        # A file without rows has a chunked array without chunks, whose type may differ.
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        values = array.cast(pa.type_for_alias(attribute.type))
        # Parquet's reader does not check that text is UTF-8.
        values.validate(full=True)
        return values
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: column {attribute.name} does not fit {attribute.type}: {words_of(error)}; convert it in the file,"
            " or leave it out"
        ) from None


def value_hashes(values: pa.Array) -> npt.NDArray[np.uint64]:
    """Return a hash of each value of a column, uint64 [rows], which is equal for equal values; nulls share one.

    Every different value is hashed once, as text, so that a column of few values costs little."""
    encoded = values.dictionary_encode()
    texts = encoded.dictionary.cast(pa.string()).to_pylist()
    words = np.array([*(xxhash.xxh3_64_intdigest(text.encode()) for text in texts), NULL_WORD], np.uint64)
    places = encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    hashes: npt.NDArray[np.uint64] = words[places]
    return hashes


def attribute_hash(ids: Ints, columns: Mapping[str, pa.Array]) -> int:
    """Return the sum modulo 2^64 of a hash of each row over its id and its kept columns.

    It is beside the fingerprint of the rows, which readers without these columns compute. 0 without columns."""
    if not columns:
        return 0
    with np.errstate(over="ignore"):
        words = splitmix64(ids.astype(np.uint64))
        for name in sorted(columns):
            words = splitmix64(words + value_hashes(columns[name]))
        return int(words.sum())


def no_labels(rows: int) -> npt.NDArray[np.int32]:
    """Return placeholder labels, all 0, for rows without labels: int32 [rows]."""
    return np.zeros(rows, np.int32)


TARGET_COLUMN = "target"
DTYPES = get_args(Dtype)


def declared_metadata(schema: pa.Schema, column: str) -> dict[str, Any]:
    """Return a column's metadata as written by this project or by Spark's ``withMetadata``.

    Raises ValueError if Spark's metadata cannot be parsed."""
    field = schema.field(column).metadata or {}
    if b"shape" in field:
        return {key.decode(): value.decode() for key, value in field.items()}
    spark = (schema.metadata or {}).get(SPARK_METADATA)
    if not spark:
        return {}
    struct = parse(spark)
    # The file may come from any program. Callers report a ValueError as damage of the file, but not an AttributeError.
    if not fits(struct, dict[str, Any]) or not fits(struct.get("fields"), list[dict[str, Any]]):
        raise ValueError("Spark's metadata of the table lists no columns")
    about: Any = next((entry.get("metadata") for entry in struct["fields"] if entry.get("name") == column), {})
    if not fits(about, dict[str, Any]):
        raise ValueError(f"Spark's metadata of column {column!r} is {str(about)[:80]!r}")
    return dict(about)


def declared_shape(schema: pa.Schema, column: str) -> tuple[int, int, int] | None:
    """Return the (channels, height, width) that a column's metadata declares, or None.

    Raises ValueError for a layout other than CHW, an invalid shape, or metadata that cannot be parsed."""
    declaration = declared_metadata(schema, column)
    layout = declaration.get("layout", "CHW")
    if layout != "CHW":
        raise ValueError(f"column {column!r} declares the layout {layout!r}, and only CHW is read: write its images so")
    return _shape(declaration["shape"]) if declaration.get("shape") else None


def _shape(value: Any) -> tuple[int, int, int]:
    """Return a declared shape, a list or its JSON, as (channels, height, width). Raises ValueError if it is invalid."""
    numbers = parse(value) if isinstance(value, str) else value
    if not fits(numbers, list[int]) or len(numbers) != 3 or min(numbers) < 1:
        raise ValueError(f"a declared image shape of {str(value)[:80]}: channels, height and width are at least 1")
    if math.prod(numbers) > MAX_IMAGE_BYTES:
        raise ValueError(f"a declared image shape of {value}: an image has at most {MAX_IMAGE_BYTES:,} bytes")
    channels, height, width = numbers
    return channels, height, width


@contextmanager
def broken_is_data_error(path: str) -> Iterator[None]:
    """Convert errors of pyarrow, Pillow and JSON about a damaged file to DataError.

    Errors of remote stores and mounts pass, as OSError, and of a machine that has no threads or open files left."""
    try:
        yield
    except (
        ValueError,
        KeyError,
        pa.ArrowException,
        Image.DecompressionBombError,
        UnidentifiedImageError,
    ) as error:
        if shortage := shortage_of(error, path):
            raise shortage from None
        raise DataError(f"{path} is damaged: {words_of(error)}") from None
    except FileNotFoundError:
        if is_remote(path):
            raise
        raise DataError(
            f"{path} does not exist on {socket.gethostname()}: it was deleted meanwhile, or that machine does not mount it"
        ) from None
    except OSError as error:
        # pyarrow raises OSError for a damaged local file; on a remote store, a retry may help.
        if is_remote(path) or isinstance(error, PermissionError) or shortage_of(error, path):
            raise
        raise DataError(f"{path} is damaged: {words_of(error)}") from None


def words_of(error: Exception) -> str:
    """Return an error's message in one line. Pillow's message for an unknown image only has a memory address."""
    if isinstance(error, UnidentifiedImageError):
        return "it begins as an image file and Pillow reads none; save it as PNG"
    return " ".join(str(error).split())[:200]


def numbers_of(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a numeric column of a table as numpy, without a copy if it is in one piece.

    Its ``to_numpy`` would import pandas, which takes a process longer than to read a small shard. Raises BufferError
    for nulls."""
    values: npt.NDArray[Any] = np.from_dlpack(column.combine_chunks())
    return values


def raw_images(column: Any, size: int, path: str, first: int) -> npt.NDArray[np.uint8]:
    """Return a binary column of equal lengths as uint8 [rows, size], without a copy.

    Raises DataError for another length.

    Args:
        column: an Arrow array, or a column of a table.
        size: bytes of an image.
        path: the file, for error messages.
        first: number of the column's first row in the file, for error messages.
    """
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = values.cast(pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    sizes = np.diff(offsets)
    if (sizes != size).any():
        at = int(np.flatnonzero(sizes != size)[0])
        raise DataError(f"{path}, row {first + at}: the image has {sizes[at]} bytes, not {size}")
    data = np.frombuffer(values.buffers()[2], np.uint8, count=len(values) * size, offset=int(offsets[0]))
    return data.reshape(len(values), size)
