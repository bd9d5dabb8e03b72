"""The common part of the estimators: parameters that are checked, and access to the columns that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import TypeConverters
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, NumericType

from pipeline.core.errors import DataError, UsageError


def whole_number(name: str, most: int | None = None) -> Callable[[Any], int]:
    """Return a converter for spark.ml's params that raises UsageError for a number below 1 or above ``most``, if given.

    name: the parameter, for the error line."""

    def convert(value: Any) -> int:
        number = TypeConverters.toInt(value)
        if number < 1 or (most is not None and number > most):
            limits = "at least 1" if most is None else f"in 1..{most}"
            raise UsageError(f"{name} must be {limits}, got {number}")
        return number

    return convert


def not_negative(name: str) -> Callable[[Any], float]:
    """Return a converter for spark.ml's params that raises UsageError unless the number is finite and 0 or more."""

    def convert(value: Any) -> float:
        number = TypeConverters.toFloat(value)
        if not 0 <= number < float("inf"):
            raise UsageError(f"{name} must be a number of 0 or more, got {number}")
        return number

    return convert


def column_type(dataset: DataFrame, name: str, role: str) -> DataType:
    """Return the type of a column. Raises UsageError if the table has no such column."""
    if name not in dataset.columns:
        raise UsageError(f"{role} {name!r} is no column of the table; its columns are {', '.join(dataset.columns)}")
    return dataset.schema[name].dataType


def number_column(dataset: DataFrame, name: str, role: str) -> Column:
    """Return a column of bytes unchanged, or a column of vectors or numeric arrays as arrays of doubles.

    Raises UsageError for any other type."""
    kind = column_type(dataset, name, role)
    if isinstance(kind, VectorUDT):
        return vector_to_array(F.col(name))
    if isinstance(kind, BinaryType) or (isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType)):
        return F.col(name) if isinstance(kind, BinaryType) else F.col(name).cast("array<double>")
    raise UsageError(f"{role} {name!r} holds {kind.simpleString()}, not vectors, arrays of numbers or bytes")


def rows_as_matrix(column: pa.Array, place: str) -> npt.NDArray[Any]:
    """Return a column of bytes or arrays of equal length as uint8 or float64 [rows, length]. Raises DataError."""
    if column.null_count:
        raise DataError(f"{place} has a null; drop or repair such rows before fitting")
    if pa.types.is_large_binary(column.type):  # Spark sends these types if configured so
        column = column.cast(pa.binary())
    elif pa.types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    sizes = np.diff(offsets)
    if len(sizes) and (sizes != sizes[0]).any():
        raise DataError(f"{place} has rows of {sizes.min()} and {sizes.max()} values; sizes must be equal")
    if pa.types.is_binary(column.type):
        data = np.frombuffer(column.buffers()[2], np.uint8, count=int(sizes.sum()), offset=int(offsets[0]))
    else:
        values = column.flatten()
        if values.null_count:
            raise DataError(f"{place} has a null within a row; drop or repair such rows before fitting")
        data = np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
    return data.reshape(len(column), -1)


def as_pixels(values: npt.NDArray[Any], place: str) -> npt.NDArray[np.uint8]:
    """Return whole numbers in 0..255 as bytes. Raises DataError for other numbers."""
    if values.dtype == np.uint8:
        return values
    pixels = values.astype(np.uint8)
    if not np.array_equal(pixels, values):
        raise DataError(f"{place} holds numbers that are not pixels, whole and in 0..255; scale and round them first")
    return pixels
