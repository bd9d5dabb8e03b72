"""The labels of CIFAR-100's own formats by name: fine_label, which is the default, and coarse_label beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa

from pipeline.core.errors import UsageError
from pipeline.core.shardset.layout import KeptColumn, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import Columns, DataFile, Format
from pipeline.input.read_options import ReadOptions

FINE = "fine_label"
COARSE = "coarse_label"


class CifarColumns(Format):
    """A format of CIFAR. Rows with coarse labels have the columns that a Parquet file of CIFAR-100 has.

    A subclass returns the rows with fine labels; here --label-column and --keep-columns are applied to them."""

    names_columns: ClassVar[bool] = True

    @abstractmethod
    def survey_rows(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one file, whose classes are the fine ones. Raises DataError."""

    @abstractmethod
    def read_rows(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records like ``read``, with fine labels and no kept columns. Raises DataError."""

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one file. Raises DataError, and UsageError for a column that it lacks."""
        data, layout = self.survey_rows(store, file, options)
        has_both = layout.coarse is not None
        if options.image_column or (options.label_column and not has_both):
            flag = "--image-column" if options.image_column else "--label-column"
            raise UsageError(f"{flag}: {self.name} files have no columns with names; leave it out")
        if options.columns and not has_both:
            super().kept_columns(store, file, options.columns)  # raises UsageError
        unknown = [name for name in [options.label_column] if name and name not in (FINE, COARSE)]
        # Only fine labels can be kept: shards have a column coarse_label already.
        unknown += [name for name in options.columns if name != FINE]
        if unknown:
            raise UsageError(f"{file.path} has no column {unknown[0]}; its columns are {FINE}, {COARSE}")
        data = replace(data, label_column=options.label_column or "")
        if options.label_column != COARSE:
            return data, layout
        names = layout.class_names if len(layout.class_names) == layout.coarse else ()
        return data, replace(layout, num_classes=layout.coarse, class_names=names)

    def kept_columns(self, store: Store, file: FileInfo, names: Sequence[str]) -> tuple[KeptColumn, ...]:
        """Return the columns to keep, which ``survey`` has found in the file."""
        return tuple(KeptColumn(name, "int64") for name in names)

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        # Rows without labels may keep a column of them.
        rows_layout = replace(layout, labelled=layout.labelled or bool(layout.attributes), attributes=())
        for columns in self.read_rows(store, file, start, stop, rows_layout, images):
            attributes = {column.name: pa.array(columns.labels, pa.int64()) for column in layout.attributes}
            if file.label_column == COARSE and columns.coarse_labels is not None:
                columns = replace(columns, labels=columns.coarse_labels)
            yield replace(columns, attributes=attributes)
