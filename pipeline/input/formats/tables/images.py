"""The images of a table: their kinds, their shape, and their pixels as bytes."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Dtype, Layout
from pipeline.core.shardset.schema import DTYPES, declared_metadata, raw_images
from pipeline.input.formats.arrays import planar, shape_of
from pipeline.input.formats.base import DataFile
from pipeline.input.formats.tables.columns import ColumnTable, first_true, plain_array
from pipeline.input.formats.tables.vectors import vectors_of
from pipeline.input.image_files import (
    SIGNATURES,
    ImageShape,
    convert_image,
    decode_image,
    first_shape,
    shape_of_image,
)

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "content", "pixels")
SPARK_IMAGE = {"origin", "height", "width", "nChannels", "mode", "data"}  # the struct of Spark's image data source


def _numbers_in(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of the numbers in lists of any depth, or None for other types."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    depth = 0
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    while any(is_kind(kind) for is_kind in lists):
        kind = kind.value_type
        depth += 1
    return kind if depth and pa.types.is_integer(kind) else None


def _is_spark_image(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and {field.name for field in kind} >= SPARK_IMAGE


def check_image_type(field: pa.Field, path: str) -> None:
    """Raise DataError if an image column holds neither bytes, a struct with bytes, lists of whole numbers, nor Spark's
    images."""
    kind = field.type
    # The type alone decides, so that a file of another layout is refused before a row is read.
    if _is_spark_image(kind) or _numbers_in(kind):
        return
    if pa.types.is_struct(kind):
        names = {inner.name for inner in kind}
        if "bytes" not in names:
            raise DataError(
                f"{path}: column {field.name} is a struct of {', '.join(sorted(names))}; an image is binary, a list of"
                " whole numbers, or a struct with a field bytes"
            )
        kind = kind.field("bytes").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    if not any(is_kind(kind) for is_kind in binary):
        raise DataError(f"{path}: column {field.name} is {field.type}, not binary images or lists of whole numbers")


def _payload(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the bytes of an image column, bare or in a struct."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "bytes")
    return plain_array(array).cast(pa.large_binary())


def read_images(column: Any, layout: Layout, file: DataFile, first: int) -> npt.NDArray[np.uint8]:
    """Return the images or vectors of a column as bytes, uint8 [rows, record_bytes]. Raises DataError.

    first: number in the file of the column's first row, for error lines."""
    path = file.path
    if layout.column:
        return vectors_of(column, layout, path, first)
    size = layout.record_bytes
    check_image_type(pa.field("image", column.type), path)  # the file may have been replaced since its survey
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if _is_spark_image(array.type):
        images = (_spark_image(value, f"{path}, row {first + at}") for at, value in enumerate(array.to_pylist()))
        rows = [
            convert_image(image, layout, f"{path}, row {first + at}", file.channels, file.size)
            for at, image in enumerate(images)
        ]
        return np.stack(rows)
    if _numbers_in(array.type):
        return planar(_nested(array, path, first), layout, f"{path}, near row {first}")
    values = _payload(array)
    if values.null_count:
        raise DataError(f"{path}, row {first + first_true(values.is_null())}: the image is null")
    if layout.dtype != "uint8" or _looks_raw(values, size):
        return raw_images(values, size, path, first)
    out = np.empty((len(values), size), np.uint8)
    for at, value in enumerate(values):
        out[at] = decode_image(value.as_py(), layout, f"{path}, row {first + at}", file.channels, file.size)
    return out


def _nested(array: pa.Array, path: str, first: int) -> npt.NDArray[np.uint8]:
    """Return lists of whole numbers as uint8 [rows, ...], one axis per level. Raises DataError.

    path and first, the number in the file of the first row, are for error lines."""
    shape = [len(array)]
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    while not pa.types.is_integer(array.type):
        # All lists of one level have one length, so that the levels are the axes of an array.
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if array.null_count or (lengths != lengths[:1]).any():
            raise DataError(f"{path}, near row {first}: the lists of an image column are null or of different lengths")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        array = array.flatten()
    if array.null_count:
        raise DataError(f"{path}, near row {first}: the image has a null")
    try:
        return np.asarray(array.cast(pa.uint8()).to_numpy(zero_copy_only=False)).reshape(shape)
    except pa.ArrowInvalid:
        raise DataError(f"{path}, near row {first}: the image has a number outside 0..255") from None


def _spark_image(value: dict[str, Any] | None, place: str) -> npt.NDArray[np.uint8]:
    """Return an image of Spark's image source, whose colours are blue, green, red: uint8 [C, H, W]. Raises DataError."""
    if value is None or value["data"] is None:
        raise DataError(f"{place}: the image is null")
    height, width, channels = (value[name] for name in ("height", "width", "nChannels"))
    pixels = np.frombuffer(value["data"], np.uint8)
    if channels not in (1, 3, 4) or not height or not width or len(pixels) != channels * height * width:
        raise DataError(f"{place}: {len(pixels)} bytes are no image of {channels} channels, {height}x{width}")
    image = pixels.reshape(height, width, channels).transpose(2, 0, 1)
    if channels == 4 and (image[3] != 255).any():
        raise DataError(f"{place}: the image is transparent in places; flatten it onto a background")
    return image if channels == 1 else image[2::-1]


def _looks_raw(values: Any, size: int) -> bool:
    """Return whether all values have the raw size and none begins like an image file.

    values: large_binary; size: bytes of a raw image."""
    if not pc.all(pc.equal(pc.binary_length(values), size)).as_py():
        return False
    pixels = raw_images(values, size, "", 0)
    for signature in SIGNATURES:
        # An image that is shorter than a signature cannot begin with it.
        begins = np.full(len(pixels), size >= max(at + len(part) for at, part in signature))
        for at, part in signature:
            if begins.any():
                begins &= (pixels[:, at : at + len(part)] == np.frombuffer(part, np.uint8)).all(axis=1)
        if begins.any():
            return False
    return True


def first_image_shape(
    table: ColumnTable, column: str, layout: Layout, path: str, expected: tuple[int, int, int] | None
) -> ImageShape:
    """Return the shape of the first valid image, and whether images are decoded one by one (see ``first_shape``).

    Args:
        table: the open file.
        column: the image column.
        layout: the layout of raw images.
        path: the file, for error lines.
        expected: see ``first_shape``.
    """
    kind = table.schema.field(column).type

    def shape_of_row(row: int, images: pa.Array) -> ImageShape:
        """Return the shape of an image, the only one of the array. row: its number in the file."""
        place = f"{path}, row {row}"
        if _is_spark_image(kind):
            channels, height, width = _spark_image(images[0].as_py(), place).shape
            return (channels, height, width), True
        if _numbers_in(kind):
            return _nested_shape(images, layout, column, path, row), False
        return shape_of_image(_payload(images)[0].as_py(), layout, place)

    # One row at a time, because the first image is nearly always valid.
    batches = table.batches(1, None, [column])
    shapes = (partial(shape_of_row, row, batch.column(0)) for row, batch in enumerate(batches))
    return first_shape(shapes, expected and (expected, not _numbers_in(kind)))


def _nested_shape(array: pa.Array, layout: Layout, column: str, path: str, row: int) -> tuple[int, int, int]:
    """Return the shape of an image in lists of numbers. Raises DataError.

    Args:
        array: the column of this row alone.
        layout: the layout of images in flat lists.
        column: the name of the column.
        path: the file, for error lines.
        row: the number of the row in the file.
    """
    shape = _nested(array, path, row).shape
    if len(shape) > 2 and shape[1:] != layout.shape:
        return shape_of(shape, f"{path}, column {column}")
    if len(shape) == 2 and shape[1] != layout.record_bytes:
        size = "x".join(map(str, layout.shape))
        raise DataError(f"{path}, row {row}: {shape[1]} numbers are no image of {size}; declare --image-shape")
    return layout.shape


def declared_dtype(schema: pa.Schema, column: str, path: str) -> Dtype:
    """Return the type of an image's numbers that a column declares, by default uint8. Raises DataError for others."""
    dtype = declared_metadata(schema, column).get("dtype", "uint8")
    if dtype not in DTYPES:
        raise DataError(f"{path}: column {column} is declared as {dtype}; the jobs read {' and '.join(DTYPES)}")
    return cast(Dtype, dtype)
