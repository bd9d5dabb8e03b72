"""CIFAR's binary format: fixed-size records of one label byte (two for CIFAR-100: coarse, fine) and planar pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import Columns, DataFile, block_rows
from pipeline.input.formats.cifar_columns import COARSE, CifarColumns
from pipeline.input.formats.cifar_pickle import read_names
from pipeline.input.read_options import ReadOptions


class FixedRecords(CifarColumns):
    """A format of fixed-size records.

    label_bytes: the number of label bytes at the start of a record. limits: the number of classes for each of them."""

    labels_in: ClassVar[str] = "every record begins with its label"
    opens: ClassVar[bool] = False
    seeks: ClassVar[bool] = True
    locates_damage: ClassVar[bool] = True
    label_bytes: ClassVar[int]
    limits: ClassVar[tuple[int, ...]]

    def record_bytes(self, shape: tuple[int, int, int] | None) -> int:
        return self.label_bytes + math.prod(shape or CIFAR_SHAPE)

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """True if a file consists of whole records of this length.

        If its size fits the records of CIFAR-10 as well as of CIFAR-100, all labels in its first bytes must be valid,
        too.

        file: the file. head: its first bytes. shape: the declared shape of images, or None."""
        size = self.record_bytes(shape)
        if file.bytes == 0 or file.bytes % size or head[:1] == b"\x80" or head[:4] == b"PAR1":
            return False
        records = np.frombuffer(head[: len(head) // size * size], np.uint8).reshape(-1, size)
        # If both record lengths divide the file size, the label bytes decide. If only this length fits, an out-of-range
        # label is left to the scan, which reports its offset.
        other = {1: size + 1, 2: size - 1}[self.label_bytes]
        if file.bytes % other:
            return True
        return bool((records[:, : self.label_bytes] < np.array(self.limits)).all())

    def names_beside(self, store: Store, folder: str, options: ReadOptions) -> tuple[str, ...]:
        name = "batches.meta.txt"
        if self.label_bytes == 2:
            name = "coarse_label_names.txt" if options.label_column == COARSE else "fine_label_names.txt"
        return read_names(store, folder, (name,))

    def resembles(self, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        """True if the first bytes of a file are records of this length with valid labels.

        Called for a file that no format recognises, for example because its last record is cut."""
        size = self.record_bytes(shape)
        records = np.frombuffer(head[: len(head) // size * size], np.uint8).reshape(-1, size)
        return len(records) > 1 and bool((records[:, : self.label_bytes] < np.array(self.limits)).all())

    def survey_rows(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of a file, from its size alone. Raises DataError if it ends within a record."""
        shape = options.shape
        size = self.record_bytes(shape)
        rows, rest = divmod(file.bytes, size)
        if rest:
            raise DataError(
                f"{file.path}: truncated or wrong record size: record {rows} at offset {rows * size} has {rest} of"
                f" {size} bytes; restore the file or declare its --image-shape"
            )
        # With another shape the records are not CIFAR's, so its numbers of classes do not apply.
        declared = shape is not None and shape != CIFAR_SHAPE
        classes = None if declared else self.limits[-1]
        coarse = self.limits[0] if self.label_bytes == 2 else None
        return DataFile(file.path, file.bytes, file.modified_ms, rows, change=file.change), Layout(
            shape or CIFAR_SHAPE, classes, coarse
        )

    def read_rows(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of a file. Raises DataError if the file has become shorter."""
        size = self.record_bytes(layout.shape)
        step = block_rows(layout.record_bytes)
        for low in range(start, stop, step):
            rows = min(step, stop - low)
            data = store.read_range(file.path, low * size, rows * size)
            # The file may have changed since the survey, and the error of reshape would not name it.
            if len(data) != rows * size:
                raise DataError(f"{file.path} ends at offset {low * size + len(data)}: it was cut while it was read")
            columns = self.columns_of(data, layout.shape)
            yield columns if images else replace(columns, images=None)

    def columns_of(self, data: bytes, shape: tuple[int, int, int] | None) -> Columns:
        """Return the columns of whole records."""
        records = np.frombuffer(data, np.uint8).reshape(-1, self.record_bytes(shape))
        labels = records[:, : self.label_bytes].astype(np.int32)
        return Columns(
            labels=labels[:, -1],
            images=records[:, self.label_bytes :],
            coarse_labels=labels[:, 0] if self.label_bytes == 2 else None,
        )

    def where(self, file: DataFile, record: int, layout: Layout) -> str:
        return f"{file.path}, offset {record * self.record_bytes(layout.shape)} (record {record})"


class Cifar10Binary(FixedRecords):
    name: ClassVar[str] = "cifar10-binary"
    summary: ClassVar[str] = "whole CIFAR-10 records of 3073 bytes"
    label_bytes: ClassVar[int] = 1
    limits: ClassVar[tuple[int, ...]] = (10,)


class Cifar100Binary(FixedRecords):
    name: ClassVar[str] = "cifar100-binary"
    summary: ClassVar[str] = "whole CIFAR-100 records of 3074 bytes"
    label_bytes: ClassVar[int] = 2
    limits: ClassVar[tuple[int, ...]] = (20, 100)
