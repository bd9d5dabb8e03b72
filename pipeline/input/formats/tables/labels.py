"""The labels of a table: whole numbers, names of classes, or the folder of a file."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.json_values import parse
from pipeline.core.shardset.layout import MAX_CLASSES, Layout
from pipeline.core.shardset.schema import TARGET_COLUMN
from pipeline.input.files import CLASS_KEYS
from pipeline.input.formats.tables.columns import (
    ColumnTable,
    first_true,
    pick_column,
    plain_array,
    whole_numbers,
)
from pipeline.input.read_options import ReadOptions

LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls", "y", TARGET_COLUMN)
HUGGING_FACE = b"huggingface"  # the schema's metadata that describe the features of a data set


def label_column(schema: pa.Schema, options: ReadOptions, path: str) -> str:
    """Return the name of the label column, or "". Raises DataError if the one of --label-column is missing."""
    if options.label_column:
        return pick_column(schema, options.label_column, (), path)
    # A column target of real numbers holds values to predict, not classes.
    is_real = TARGET_COLUMN in schema.names and pa.types.is_floating(schema.field(TARGET_COLUMN).type)
    usual = LABEL_COLUMNS[:-1] if is_real else LABEL_COLUMNS
    return next((name for name in usual if name in schema.names), "")


def is_text(kind: pa.DataType) -> bool:
    """True if labels of an Arrow type are names of classes."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_kind(kind) for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def declared_names(schema: pa.Schema, label: str) -> tuple[str, ...]:
    """Return the names of the classes that a ClassLabel of Hugging Face's datasets declares, or ()."""
    try:
        features = parse((schema.metadata or {}).get(HUGGING_FACE, b"{}"))["info"]["features"]
        names = features[label]["names"]
    except (ValueError, KeyError, TypeError):  # metadata of another program, or of another label
        return ()
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list and 0 < len(names) <= MAX_CLASSES else ()


def names_in(table: ColumnTable, label: str, path: str) -> tuple[str, ...]:
    """Return the different names in a label column, sorted. Raises DataError for more than MAX_CLASSES."""
    names: set[str] = set()
    for batch in table.batches(1 << 16, None, [label]):
        names.update(name for name in pc.unique(plain_array(batch.column(0))).to_pylist() if name is not None)
        # A column of texts without repetitions holds no classes, and might fill the memory.
        if len(names) > MAX_CLASSES:
            raise DataError(
                f"{path}: column {label} holds more than {MAX_CLASSES:,} different texts, too many for a"
                " label; name another column by --label-column"
            )
    return tuple(sorted(names))


def read_labels(column: pa.ChunkedArray, layout: Layout, name: str, path: str, first: int) -> npt.NDArray[np.int32]:
    """Return a column of labels as int32: numbers, or names that the layout numbers. Raises DataError.

    Args:
        column: the labels.
        layout: the layout of the rows.
        name: the name of the column.
        path: the file, for error lines.
        first: number in the file of the column's first row.
    """
    array = plain_array(column)
    if not layout.named_labels or not is_text(array.type):
        return whole_numbers(array, name, path, first)
    if array.null_count:
        raise DataError(f"{path}, row {first + first_true(array.is_null())}: {name} is null")
    if not layout.class_names:  # names that are numbers
        return whole_numbers(array.cast(pa.int64()), name, path, first)
    numbers = pc.index_in(array.cast(pa.string()), pa.array(layout.class_names, pa.string()))
    if numbers.null_count:
        at = first_true(numbers.is_null())
        raise DataError(f"{path}, row {first + at}: {name} is {array[at].as_py()[:80]!r}, which is no known class")
    return np.asarray(numbers.to_numpy())


def label_from_folder(path: str) -> int | None:
    """Return the class of a file's rows from a folder such as label=3, which Spark's partitionBy("label") makes."""
    labels = re.findall(rf"/(?:{'|'.join(CLASS_KEYS)})=(\d{{1,9}})(?=/)", path)
    return int(labels[-1]) if labels else None
