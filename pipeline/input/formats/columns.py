"""Tables with a column of images and a column of labels: what the formats Parquet and Arrow share.

Images are image files or raw bytes, bare or in Hugging Face's struct; lists of numbers, flat or nested; or the struct of
Spark's image source. Labels are whole numbers, or names of classes."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import parse
from pipeline.core.shardset.layout import CIFAR_SHAPE, MAX_CLASSES, Dtype, KeptColumn, Layout
from pipeline.core.shardset.schema import (
    DTYPES,
    TARGET_COLUMN,
    broken_is_data_error,
    declared_metadata,
    declared_shape,
    kept_type,
    kept_values,
    raw_images,
)
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.arrays import planar, shape_of
from pipeline.input.formats.base import DECODED_BYTES, Columns, DataFile, Format, block_rows
from pipeline.input.image_files import LOOKED_AT, SIGNATURES, convert_image, decode_image, first_shape
from pipeline.input.read_options import ReadOptions

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "content", "pixels")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "cls", "y", TARGET_COLUMN)
LARGE_GROUP_BYTES = 64 << 20  # above, raw images are kept decoded, because each read decodes from the group's start
SPARK_IMAGE = {"origin", "height", "width", "nChannels", "mode", "data"}  # the struct of Spark's image data source
HUGGING_FACE = b"huggingface"  # the schema's metadata that describe the features of a data set


class ColumnTable(Protocol):
    """An open file of a table.

    schema: its columns. group_rows: rows of each group, which are read one after the other. is_sequential: whether a row
    is only found by reading the rows before it."""

    schema: pa.Schema
    group_rows: list[int]
    is_sequential: bool

    def batches(self, rows: int, group: int | None, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most so many rows of one group, or of all. columns: the columns to read."""


class TableFormat(Format):
    """A format of tables. The image shape comes from the schema, or from the first image."""

    labels_in: ClassVar[str] = (
        "a table has them in a column label, labels, fine_label, class, cls, y or a target of whole numbers or text, in the"
        " column that --label-column names, or in folders label=N"
    )
    opens: ClassVar[bool] = True
    may_be_empty: ClassVar[bool] = True
    names_columns: ClassVar[bool] = True

    @abstractmethod
    def open_table(self, store: Store, path: str) -> ColumnTable:
        """Open a file. Raises DataError if it is broken, and PermissionError if it may not be read."""

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        with broken_is_data_error(file.path):
            return self._survey(store, file, options)

    def _survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of a file. Named labels cost a pass over their column."""
        table = self.open_table(store, file.path)
        schema = table.schema
        rows = sum(table.group_rows)
        image = _pick(schema, options.image_column, IMAGE_COLUMNS, file.path)
        _check_type(schema.field(image), file.path)
        label = _label_column(schema, options, file.path)
        data = DataFile(
            file.path,
            file.bytes,
            file.modified_ms,
            rows,
            change=file.change,
            image_column=image,
            label_column=label,
            label=None if label else _label_of_folder(file.path),
        )
        names = _declared_names(schema, label)
        is_named = bool(label) and _is_text(schema.field(label).type)
        layout = Layout(
            declared_shape(schema, image) or options.shape or CIFAR_SHAPE,
            len(names) or None,
            20 if "coarse_label" in schema.names else None,
            _dtype(schema, image, file.path),
            targets=TARGET_COLUMN in schema.names and pa.types.is_floating(schema.field(TARGET_COLUMN).type),
            labelled=data.label is not None or bool(label),
            class_names=names or (_names_in(table, label, file.path) if is_named and not options.unlabelled else ()),
            named_labels=is_named,
        )
        if rows == 0:
            return data, layout
        shape, is_decoded = _first_shape(table, image, layout, file.path)
        layout = replace(layout, shape=shape)
        if is_decoded:
            step = rows if table.is_sequential else max(1, DECODED_BYTES // layout.record_bytes)
            return replace(data, decode_rows=step, encoded=True), layout
        # Tasks that start inside a large row group would each decode it from its start: keep it decoded.
        group = max(table.group_rows)
        if group * layout.record_bytes > LARGE_GROUP_BYTES:
            data = replace(data, decode_rows=group)
        return data, layout

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        with broken_is_data_error(file.path):
            yield from self._read(store, file, start, stop, layout, images)

    def _read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of a file, one group after the other. Raises DataError."""
        table = self.open_table(store, file.path)
        if (rows := sum(table.group_rows)) != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {rows}: it changed")
        label = file.label_column if layout.labelled else ""
        image = layout.column or file.image_column
        beside = ["coarse_label"] * bool(layout.coarse) + [TARGET_COLUMN] * layout.targets
        names = [*([label] if label else []), *beside, *([image] if images else [])]
        # A column of labels may be kept too.
        names = list(dict.fromkeys([*names, *(column.name for column in layout.attributes)]))
        for name in names:
            _pick(table.schema, name, (), file.path)
        first = 0
        step = block_rows(layout.record_bytes)
        for group, rows in enumerate(table.group_rows):
            low = max(start - first, 0)
            high = min(stop - first, rows)
            if low < high:
                # One group at a time: groups outside of the range are never read.
                for at, part in _slice_batches(table.batches(step, group, names), low, high):
                    record = first + at
                    yield Columns(
                        labels=_labels(part.column(label), layout, label, file.path, record)
                        if label
                        else np.full(len(part), file.label or 0, np.int32),
                        images=_images(part.column(image), layout, file, record) if images else None,
                        coarse_labels=_whole(part.column("coarse_label"), "coarse_label", file.path, record)
                        if layout.coarse
                        else None,
                        targets=_targets(part.column(TARGET_COLUMN), file.path, record) if layout.targets else None,
                        attributes={
                            each.name: kept_values(part.column(each.name), each, file.path)
                            for each in layout.attributes
                        },
                    )
            first += rows

    def kept_columns(self, store: Store, file: FileInfo, names: Sequence[str]) -> tuple[KeptColumn, ...]:
        schema = self.open_table(store, file.path).schema
        columns = []
        for name in names:
            if name not in schema.names:
                raise UsageError(f"{file.path} has no column {name}; its columns are {', '.join(schema.names)}")
            kind = kept_type(schema.field(name).type)
            if kind is None:
                raise UsageError(
                    f"{file.path}: column {name} is {schema.field(name).type}; numbers, text, dates and times are kept"
                )
            columns.append(KeptColumn(name, kind))
        return tuple(columns)


def _pick(schema: pa.Schema, name: str | None, usual: tuple[str, ...], path: str) -> str:
    """Return a column of the file: the given one, or the first of the usual ones. Raises DataError if there is none."""
    for choice in (name,) if name else usual:
        if choice in schema.names:
            return choice
    flag = "" if name else "; --image-column names another one"
    raise DataError(
        f"{path} has no column {name or ' or '.join(usual[:2])}; its columns are {', '.join(schema.names)}{flag}"
    )


def _label_column(schema: pa.Schema, options: ReadOptions, path: str) -> str:
    """Return the name of the label column, or "". Raises DataError if the one of --label-column is missing."""
    if options.label_column:
        return _pick(schema, options.label_column, (), path)
    # A column target of real numbers is to be predicted, and is not a class.
    is_real = TARGET_COLUMN in schema.names and pa.types.is_floating(schema.field(TARGET_COLUMN).type)
    usual = LABEL_COLUMNS[:-1] if is_real else LABEL_COLUMNS
    return next((name for name in usual if name in schema.names), "")


def _is_text(kind: pa.DataType) -> bool:
    """True if labels of an Arrow type are names of classes."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_kind(kind) for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _declared_names(schema: pa.Schema, label: str) -> tuple[str, ...]:
    """Return the names of the classes that a ClassLabel of Hugging Face's datasets declares, or ()."""
    try:
        features = parse((schema.metadata or {}).get(HUGGING_FACE, b"{}"))["info"]["features"]
        names = features[label]["names"]
    except (ValueError, KeyError, TypeError):  # metadata of another program, or of another label
        return ()
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_list and 0 < len(names) <= MAX_CLASSES else ()


def _names_in(table: ColumnTable, label: str, path: str) -> tuple[str, ...]:
    """Return the different names in a label column, sorted. Raises DataError for more than MAX_CLASSES."""
    names: set[str] = set()
    for batch in table.batches(1 << 16, None, [label]):
        names.update(name for name in pc.unique(_plain(batch.column(0))).to_pylist() if name is not None)
        # A column of texts without repetitions holds no classes, and might fill the memory.
        if len(names) > MAX_CLASSES:
            raise DataError(f"{path}: column {label} holds more than {MAX_CLASSES:,} different texts; it is no label")
    return tuple(sorted(names))


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array without a dictionary."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _labels(column: pa.ChunkedArray, layout: Layout, name: str, path: str, first: int) -> npt.NDArray[np.int32]:
    """Return a column of labels as int32: numbers, or names that the layout numbers. Raises DataError.

    Args:
        column: the labels.
        layout: the layout of the rows.
        name: the name of the column.
        path: the file, for error lines.
        first: number in the file of the column's first row.
    """
    array = _plain(column)
    if not layout.named_labels or not _is_text(array.type):
        return _whole(array, name, path, first)
    if array.null_count:
        raise DataError(f"{path}, row {first + _first_true(array.is_null())}: {name} is null")
    if not layout.class_names:  # names that are numbers
        return _whole(array.cast(pa.int64()), name, path, first)
    numbers = pc.index_in(array.cast(pa.string()), pa.array(layout.class_names, pa.string()))
    if numbers.null_count:
        at = _first_true(numbers.is_null())
        raise DataError(f"{path}, row {first + at}: {name} is {array[at].as_py()[:80]!r}, which is no known class")
    return np.asarray(numbers.to_numpy())


def _first_true(mask: pa.Array) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


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


def _check_type(field: pa.Field, path: str) -> None:
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
    return _plain(array).cast(pa.large_binary())


def _images(column: Any, layout: Layout, file: DataFile, first: int) -> npt.NDArray[np.uint8]:
    """Return the images or vectors of a column as bytes, uint8 [rows, record_bytes]. Raises DataError.

    first: number in the file of the column's first row, for error lines."""
    path = file.path
    if layout.column:
        return vectors_of(column, layout, path, first)
    size = layout.record_bytes
    _check_type(pa.field("image", column.type), path)  # the file may have been replaced since its survey
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
        raise DataError(f"{path}, row {first + _first_true(values.is_null())}: the image is null")
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


def _first_shape(table: ColumnTable, column: str, layout: Layout, path: str) -> tuple[tuple[int, int, int], bool]:
    """Return the shape of the first valid image, and whether images are decoded one by one (see ``first_shape``).

    Args:
        table: the open file.
        column: the image column.
        layout: the layout of raw images.
        path: the file, for error lines.
    """
    # One row at a time, because the first image is nearly always valid.
    kind = table.schema.field(column).type
    batches = table.batches(1, None, [column])
    if not _is_spark_image(kind) and not _numbers_in(kind):
        images = (
            (_payload(batch.column(0))[0].as_py(), f"{path}, row {row}")
            for row, batch in enumerate(islice(batches, LOOKED_AT))
        )
        return first_shape(images, layout)
    problem: DataError | None = None
    for row, batch in enumerate(islice(batches, LOOKED_AT)):
        try:
            if not _is_spark_image(kind):
                return _nested_shape(batch.column(0), layout, column, path, row), False
            channels, height, width = _spark_image(batch.column(0)[0].as_py(), f"{path}, row {row}").shape
            return (channels, height, width), True
        except DataError as error:
            problem = problem or error
    assert problem, "there is at least one row"
    raise problem


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


def _dtype(schema: pa.Schema, column: str, path: str) -> Dtype:
    """Return the type of an image's numbers that a column declares, by default uint8. Raises DataError for others."""
    dtype = declared_metadata(schema, column).get("dtype", "uint8")
    if dtype not in DTYPES:
        raise DataError(f"{path}: column {column} is declared as {dtype}; the jobs read {' and '.join(DTYPES)}")
    return cast(Dtype, dtype)


def _label_of_folder(path: str) -> int | None:
    """Return the class of a file's rows from a folder such as label=3, which Spark's partitionBy("label") makes."""
    labels = re.findall(rf"/(?:{'|'.join(LABEL_COLUMNS)})=(\d{{1,9}})(?=/)", path)
    return int(labels[-1]) if labels else None


def _targets(column: pa.ChunkedArray, path: str, first: int) -> npt.NDArray[np.float32]:
    """Return a column of targets as float32. Raises DataError for one that is null or not finite.

    first: number in the file of the column's first row."""
    values = np.asarray(column.cast(pa.float32()).to_numpy(zero_copy_only=False))
    bad_rows = np.flatnonzero(~np.isfinite(values))
    if len(bad_rows):
        raise DataError(
            f"{path}, row {first + int(bad_rows[0])}: {TARGET_COLUMN} is {values[bad_rows[0]]}, not a number"
        )
    return values


def _slice_batches(batches: Iterator[pa.RecordBatch], low: int, high: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows low <= r < high of a row group by batch, with the position of each batch's first row.

    Rows before ``low`` are decoded, rows after ``high`` are not read, and only one batch is held at a time."""
    at = 0
    for batch in batches:
        start = max(low - at, 0)
        stop = min(high - at, len(batch))
        if start < stop:
            yield at + start, pa.Table.from_batches([batch.slice(start, stop - start)])
        at += len(batch)
        if at >= high:
            return


def _whole(column: pa.ChunkedArray | pa.Array, name: str, path: str, first: int) -> npt.NDArray[np.int32]:
    """Return an integer column as int32. Raises DataError for nulls, other types and numbers beyond int32.

    first: number in the file of the column's first row, for error lines."""
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{path}, row {row}: {name} is null")
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: {name} is {column.type}, not whole numbers")
    try:
        return np.asarray(column.cast(pa.int32()).to_numpy())
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}, near row {first}: {name}: {error}") from None


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
        if not pc.all(pc.equal(array.field("type"), 1)).as_py():
            raise DataError(f"{path}, near row {first}: a sparse vector; --embedding takes dense ones")
        array = array.field("values")
    # Spark ML's dense vectors are now lists too.
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    number = (pa.types.is_floating, pa.types.is_integer)
    if not any(kind(array.type) for kind in lists) or not any(kind(array.type.value_type) for kind in number):
        raise UsageError(f"--embedding: the column of {path} holds {array.type}, not vectors")
    if array.null_count:
        row = first + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{path}, row {row}: the vector is null")
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
