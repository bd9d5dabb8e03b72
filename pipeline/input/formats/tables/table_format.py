"""The base of the formats of tables: the survey of a file, and the rows of a range."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import CIFAR_SHAPE, KeptColumn, Layout
from pipeline.core.shardset.schema import TARGET_COLUMN, broken_is_data_error, declared_shape, kept_type, kept_values
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import DECODED_BYTES, Columns, DataFile, Format, block_rows
from pipeline.input.formats.tables.columns import ColumnTable, check_single, pick_column, read_targets, whole_numbers
from pipeline.input.formats.tables.images import (
    IMAGE_COLUMNS,
    check_image_type,
    declared_dtype,
    first_image_shape,
    read_images,
)
from pipeline.input.formats.tables.labels import (
    declared_names,
    is_text,
    label_column,
    label_from_folder,
    names_in,
    read_labels,
)
from pipeline.input.read_options import ReadOptions

LARGE_GROUP_BYTES = 64 << 20  # above, raw images are kept decoded, because each read decodes from the group's start


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
        if rows == 0:  # pandas writes its columns with the type null, or none at all
            return DataFile(file.path, file.bytes, file.modified_ms, 0, change=file.change), Layout(CIFAR_SHAPE)
        image = pick_column(schema, options.image_column, IMAGE_COLUMNS, file.path)
        check_image_type(schema.field(image), file.path)
        label = label_column(schema, options, file.path)
        check_single(schema, (image, label, "coarse_label", TARGET_COLUMN), file.path)
        data = DataFile(
            file.path,
            file.bytes,
            file.modified_ms,
            rows,
            change=file.change,
            image_column=image,
            label_column=label,
            label=None if label else label_from_folder(options.inner_path(file.path)),
        )
        names = declared_names(schema, label)
        is_named = bool(label) and is_text(schema.field(label).type)
        layout = Layout(
            declared_shape(schema, image) or options.shape or CIFAR_SHAPE,
            len(names) or None,
            20 if "coarse_label" in schema.names else None,
            declared_dtype(schema, image, file.path),
            targets=TARGET_COLUMN in schema.names and pa.types.is_floating(schema.field(TARGET_COLUMN).type),
            labelled=data.label is not None or bool(label),
            class_names=names or (names_in(table, label, file.path) if is_named and not options.unlabelled else ()),
            named_labels=is_named,
        )
        shape, is_decoded = first_image_shape(table, image, layout, file.path, options.expected_shape)
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
        image = (layout.column or file.image_column) if images else ""
        columns = (label, "coarse_label" if layout.coarse else "", TARGET_COLUMN if layout.targets else "", image)
        # A column of labels may be kept too.
        names = list(dict.fromkeys([*filter(None, columns), *(column.name for column in layout.attributes)]))
        for name in names:
            pick_column(table.schema, name, (), file.path)
        first = 0
        step = block_rows(layout.record_bytes)
        for group, rows in enumerate(table.group_rows):
            low = max(start - first, 0)
            high = min(stop - first, rows)
            if low < high:
                # One group at a time: groups outside of the range are never read.
                for at, part in _slice_batches(table.batches(step, group, names), low, high):
                    yield _columns(part, file, layout, label, image, first + at)
            first += rows

    def kept_columns(self, store: Store, file: FileInfo, names: Sequence[str]) -> tuple[KeptColumn, ...]:
        schema = self.open_table(store, file.path).schema
        check_single(schema, names, file.path)
        columns = []
        for name in names:
            if name not in schema.names:
                raise UsageError(f"{file.path} has no column {name}; its columns are {', '.join(schema.names)}")
            # A column of few values may be a dictionary; its values are kept.
            kind = kept_type(schema.field(name).type)
            if kind is None:
                raise UsageError(
                    f"{file.path}: column {name} is {schema.field(name).type}; whole and real numbers, true"
                    " or false, text, dates and timestamps are kept"
                )
            columns.append(KeptColumn(name, kind))
        return tuple(columns)


def _columns(part: pa.Table, file: DataFile, layout: Layout, label: str, image: str, first: int) -> Columns:
    """Return the columns of some rows of a file. Raises DataError.

    label, image: the names of the columns; "" to read none. first: number in the file of the first row."""
    # Without a column of labels, the folder of the file may name the class of all its rows.
    labels = np.full(len(part), file.label or 0, np.int32)
    if label:
        labels = read_labels(part.column(label), layout, label, file.path, first)
    coarse_labels = None
    if layout.coarse:
        coarse_labels = whole_numbers(part.column("coarse_label"), "coarse_label", file.path, first)
    return Columns(
        labels=labels,
        images=read_images(part.column(image), layout, file, first) if image else None,
        coarse_labels=coarse_labels,
        targets=read_targets(part.column(TARGET_COLUMN), file.path, first) if layout.targets else None,
        attributes={each.name: kept_values(part.column(each.name), each, file.path) for each in layout.attributes},
    )


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
