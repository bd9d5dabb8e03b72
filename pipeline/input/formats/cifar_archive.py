"""The archives of CIFAR-10 and CIFAR-100 as their home page has them: .tar.gz of the binary or of the python layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, Layout
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.base import Columns, DataFile, block_spans
from pipeline.input.formats.cifar_binary import Cifar10Binary, Cifar100Binary, FixedRecords
from pipeline.input.formats.cifar_columns import COARSE, CifarColumns
from pipeline.input.formats.cifar_pickle import columns_of, names_of
from pipeline.input.formats.gzipped import inflate_start
from pipeline.input.formats.tar import BLOCK, CIFAR_FOLDER, is_tar, read_members
from pipeline.input.read_options import ReadOptions

BATCH = re.compile(r"(data_batch_\d+|test_batch|train|test)(\.bin)?")
TEST = re.compile(r"test(_batch)?(\.bin)?")
NAMES = ("batches.meta.txt", "fine_label_names.txt", "batches.meta", "meta")
COARSE_NAMES = ("coarse_label_names.txt", "meta")
MOST_BYTES = 1 << 30  # size of all files of an archive, which one task holds


class CifarArchive(CifarColumns):
    """The format of an archive, whose training batches are the rows, and whose test batch is for evaluation.

    Rows have the ids of the extracted folder. The archive is decompressed whole by tasks."""

    name: ClassVar[str] = "cifar-archive"
    summary: ClassVar[str] = "the .tar.gz of CIFAR-10 or CIFAR-100 as downloaded, binary or python"
    labels_in: ClassVar[str] = "every record has its label"
    opens: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        start = inflate_start(head, 2 * BLOCK)
        return is_tar(start) and CIFAR_FOLDER.match(start) is not None

    def survey_rows(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of one side of an archive, which is read whole. Raises DataError."""
        # A declared size must not be ignored in silence.
        if options.shape and options.shape != CIFAR_SHAPE:
            size = "x".join(map(str, options.shape))
            raise DataError(f"{file.path} holds 3x32x32 images, not --image-shape {size}; leave it out, or extract it")
        split = "test" if options.evaluation else "train"
        is_coarse = options.label_column == COARSE
        columns, names = _read(store, file.path, split, is_coarse)
        rows = len(columns.labels)
        coarse = columns.coarse_labels is not None
        classes = 100 if coarse else 10
        named = 20 if coarse and is_coarse else classes
        layout = Layout(CIFAR_SHAPE, classes, 20 if coarse else None, class_names=names if len(names) == named else ())
        data = DataFile(
            file.path, file.bytes, file.modified_ms, rows, decode_rows=rows, change=file.change, split=split
        )
        return data, layout

    def read_rows(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of one side of an archive. Raises DataError."""
        columns, _ = _read(store, file.path, file.split)
        if len(columns.labels) != file.rows or columns.images is None:
            raise DataError(f"{file.path} had {file.rows} rows and now has {len(columns.labels)}: it changed")
        coarse = columns.coarse_labels
        for span in block_spans(start, stop, layout.record_bytes):
            yield Columns(
                columns.labels[span], columns.images[span] if images else None, None if coarse is None else coarse[span]
            )


def _read(store: Store, path: str, split: str, is_coarse: bool = False) -> tuple[Columns, tuple[str, ...]]:
    """Return the rows of one side of an archive, and the names of its classes. Raises DataError.

    split: "train" or "test". is_coarse: return the names of the coarse classes."""
    batches: dict[str, bytes] = {}
    names: tuple[str, ...] = ()
    size = 0
    for member in read_members(store, path, 0):
        name = f"{member.stem}{'.' * bool(member.suffix)}{member.suffix}"
        size += len(member.data)
        if size > MOST_BYTES:
            raise DataError(f"{path} holds more than {MOST_BYTES:,} bytes; extract it, and name its folder")
        if BATCH.fullmatch(name) and bool(TEST.fullmatch(name)) == (split == "test"):
            batches[name] = member.data
        elif name in (COARSE_NAMES if is_coarse else NAMES):
            names = names_of(member.data, name, path, is_coarse)
    if not batches:
        raise DataError(f"{path} has no {split} batches")
    # In the order of names, as in the extracted folder: an archive has an order of its own.
    parts = [_columns(data, f"{path}, file {name}") for name, data in sorted(batches.items())]
    coarse = [part.coarse_labels for part in parts if part.coarse_labels is not None]
    if len(coarse) not in (0, len(parts)):
        raise DataError(f"{path} has batches with and without coarse labels")
    return Columns(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.images for part in parts if part.images is not None]),
        np.concatenate(coarse) if coarse else None,
    ), names


def _columns(data: bytes, place: str) -> Columns:
    """Return the rows of one batch. Raises DataError for a damaged one."""
    if not place.endswith(".bin"):
        columns = columns_of(data, place)
        assert columns.images is not None, "columns_of"
        pixels = columns.images.shape[1]
        if pixels != math.prod(CIFAR_SHAPE):
            raise DataError(
                f"{place}: rows of {pixels} pixels are not 3x32x32 images; extract it, and declare --image-shape"
            )
        return columns
    # Names tell the layouts apart: CIFAR-100 has a file per side.
    kind: FixedRecords = Cifar10Binary() if "_batch" in place.rpartition(" ")[2] else Cifar100Binary()
    size = kind.record_bytes(None)
    if len(data) % size:
        raise DataError(f"{place}: {len(data)} bytes are no whole records of {size}")
    return kind.columns_of(data, None)
