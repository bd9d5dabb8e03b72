"""Numpy functions on whole Spark columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column
from pyspark.sql.pandas import functions as pandas_functions

Matrix = npt.NDArray[Any]
_pandas_udf: Any = pandas_functions.pandas_udf  # its overloads know pandas types only


def matrix_to_vector(fn: Callable[[Matrix], Matrix], column: Column) -> Column:
    """Apply ``fn`` to a binary (uint8) or array column as a matrix [rows, d], and return a vector column."""
    vector: Column = array_to_vector(_pandas_udf(lambda values: _rows(fn, values), "array<double>")(column))
    return vector


def matrix_to_int(fn: Callable[[Matrix], Matrix], column: Column) -> Column:
    """Apply ``fn``, which returns one integer per row, to a column as a matrix [rows, d]."""
    whole: Column = _pandas_udf(lambda values: _numbers(fn, values), "int")(column)
    return whole


def _matrix(values: Any) -> Matrix:
    """Return a pandas series of bytes or arrays of equal length as [rows, length]. At least one row."""
    if isinstance(values.iloc[0], bytes):
        return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1)
    return np.stack(values)


def _rows(fn: Callable[[Matrix], Matrix], values: Any) -> Any:
    """Apply fn to the rows as a matrix and return its rows as a series of float64 arrays."""
    import pandas as pd

    return pd.Series(list(fn(_matrix(values)).astype(np.float64)) if len(values) else [], dtype=object)


def _numbers(fn: Callable[[Matrix], Matrix], values: Any) -> Any:
    """Apply fn to the rows as a matrix and return its result, a number per row, as a series of int32."""
    import pandas as pd

    return pd.Series(fn(_matrix(values)) if len(values) else [], dtype="int32")
