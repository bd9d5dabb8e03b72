"""A committed shard set read as a dataset, in id order: the input of resharding. No Spark."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.layout import MAX_CLASSES, MAX_IMAGE_BYTES, Dtype, KeptColumn, Layout
from pipeline.core.shardset.manifest import ShardSet, missing_file, require_rows
from pipeline.core.shardset.schema import (
    DTYPES,
    KEPT_TYPES,
    OWN_COLUMNS,
    broken_is_data_error,
    no_labels,
    raw_images,
    record_schema,
)
from pipeline.core.shardset.versions import NAME
from pipeline.input.dataset import Block, Dataset
from pipeline.input.formats import Columns, DataFile
from pipeline.input.formats.base import block_rows

WINDOW_ROWS = 1000  # rows per worker in a window, at most
# Images of a window, at most: about one row group of every file. With more than workers_at_once() workers, a window is
# shorter than a row group, which is then read once per window.
WINDOW_BYTES = 256 << 20
MOST_OPEN = 64  # files that a task keeps open; further files are reopened for each window


@dataclass(frozen=True)
class CommittedDataset(Dataset):
    """The rows of a committed set.

    Attributes:
        files: the shard files.
        generation: the id of the set.
        total: the number of rows.
        num_workers: the number of shards.
        chunks: the id ranges that share a chunk number.
        file_chunks: the chunk number of each file.
        neighbourhoods: whether rows have a neighbourhood.
    """

    generation: str
    total: int
    num_workers: int
    chunks: tuple[tuple[int, int], ...]
    file_chunks: tuple[int, ...]
    neighbourhoods: bool

    @property
    def rows(self) -> int:
        return self.total

    def listing(self) -> str:
        return hashlib.sha256(f"{self.uri} {self.generation}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return f"{self.uri}, id {row}"

    def read(self, start: int, stop: int, *, images: bool = True) -> Iterator[Block]:
        """Yield the rows start <= id < stop in id order. A row with copies is read once, from the shard that has its
        copy 0.

        The files of all workers are merged by id, one window at a time; row groups outside of the window are skipped.
        Raises DataError if an id is missing or occurs twice."""
        window = WINDOW_ROWS * self.num_workers
        if images:
            window = max(1, min(window, WINDOW_BYTES // self.record_bytes))
        for chunk, (first, last) in enumerate(self.chunks):
            low = max(start, first)
            high = min(stop, last)
            if low >= high:
                continue
            files = [file for file, at in zip(self.files, self.file_chunks, strict=True) if at == chunk]
            if not files:
                raise DataError(f"{self.uri}: no file has the ids {low}..{high - 1}; the set is damaged")
            # A merge of all workers by windows of ids, so that memory does not grow with the chunk.
            readers = [ShardReader(self, file, keep=number < MOST_OPEN) for number, file in enumerate(files)]
            for begin in range(low, high, window):
                end = min(begin + window, high)
                table = pa.concat_tables([reader.owners(begin, end, images) for reader in readers])
                ids = table.column("id").to_numpy()
                order = np.argsort(ids)
                if not np.array_equal(ids[order], np.arange(begin, end)):
                    raise DataError(
                        f"{self.uri}: ids {begin}..{end - 1} do not occur exactly once each; the set is damaged"
                    )
                yield from self._blocks(table.take(pa.array(order)), images)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the files."""
        return record_schema(self.layout, neighbourhood=self.neighbourhoods)

    def _blocks(self, table: pa.Table, images: bool) -> Iterator[Block]:
        """Yield the rows of a table, sorted by id, as blocks of bounded size. images: whether the table has the
        images."""

        def column(part: pa.Table, name: str) -> Any:
            return part.column(name).to_numpy() if name in table.schema.names else None

        # The table holds a window of all workers; a block must fit into a task's memory and Arrow's offsets.
        step = block_rows(self.record_bytes)
        for low in range(0, len(table), step):
            part = table.slice(low, step).combine_chunks()
            pixels = raw_images(part.column("image"), self.record_bytes, self.uri, 0) if images else None
            yield Block(
                column(part, "id"),
                Columns(
                    column(part, "label") if self.layout.labelled else no_labels(len(part)),
                    pixels,
                    column(part, "coarse_label"),
                    column(part, "neighbourhood"),
                    column(part, "target"),
                    {each.name: part.column(each.name).combine_chunks() for each in self.layout.attributes},
                ),
            )


class ShardReader:
    """Reads one shard file of a set by ranges of ids. keep: whether the file stays open between two ranges."""

    def __init__(self, dataset: CommittedDataset, file: DataFile, *, keep: bool) -> None:
        self._dataset = dataset
        self._path = file.path
        self._keep = keep
        self._parquet: pq.ParquetFile | None = None
        self._ranges: list[tuple[int, int]] | None = None

    def owners(self, begin: int, end: int, images: bool) -> pa.Table:
        """Return the rows of copy 0 with begin <= id < end. images: whether to read images. Raises DataError."""
        parquet = self._parquet or self._open()
        if self._keep:
            self._parquet = parquet
        try:
            return self._read(parquet, begin, end, images)
        finally:
            if not self._keep:
                parquet.close(force=True)

    def _open(self) -> pq.ParquetFile:
        """Open the file. Raises DataError if it is missing, broken, or lacks a column of the set with its type."""
        try:
            with broken_is_data_error(self._path):
                parquet = pq.ParquetFile(self._dataset.store.open(self._path))
        except FileNotFoundError as error:
            raise DataError(f"{self._path}: {str(error).splitlines()[0]}") from None
        schema = parquet.schema_arrow
        for field in self._dataset.schema:
            if schema.names.count(field.name) != 1 or schema.field(field.name).type != field.type:
                raise DataError(f"{self._path} has no column {field.name} of {field.type}; the set is damaged")
        return parquet

    def _read(self, parquet: pq.ParquetFile, begin: int, end: int, images: bool) -> pa.Table:
        """Return the rows of copy 0 with begin <= id < end from the row groups whose id ranges overlap. Raises
        DataError."""
        schema = self._dataset.schema
        names = [name for name in schema.names if images or name != "image"]
        if self._ranges is None:
            self._ranges = self._id_ranges(parquet)
        groups = [group for group, (least, most) in enumerate(self._ranges) if least < end and most >= begin]
        with broken_is_data_error(self._path):
            table = parquet.read_row_groups(groups, columns=names).select(names)
        for name in names:
            if table.column(name).null_count and not schema.field(name).nullable:
                raise DataError(f"{self._path}: column {name} holds nulls; the set is damaged")
        # Foreign files may declare their columns nullable.
        table = pa.Table.from_arrays(table.columns, schema=pa.schema([schema.field(name) for name in names]))
        ids = table.column("id")
        inside = pc.and_(pc.greater_equal(ids, begin), pc.less(ids, end))
        return table.filter(pc.and_(inside, pc.equal(table.column("copy"), 0)))

    def _id_ranges(self, parquet: pq.ParquetFile) -> list[tuple[int, int]]:
        """Return for each row group an inclusive range that contains its ids, by which ``_read`` skips groups.

        The range is computed from the ids, because pyarrow ends the process when it is asked for the statistics of a
        damaged file. If the file has a single group, the group is not read here and gets the range of all ids, (0,
        total)."""
        if parquet.num_row_groups == 1:
            return [(0, self._dataset.total)]
        ranges = []
        for group in range(parquet.num_row_groups):
            with broken_is_data_error(self._path):
                ids = parquet.read_row_group(group, columns=["id"]).column("id")
            limits = pc.min_max(ids).as_py()
            # A group without valid ids gets the range of all ids, so that _read reads it and refuses its nulls.
            ranges.append((0, self._dataset.total) if limits["min"] is None else (limits["min"], limits["max"]))
        return ranges


def committed_dataset(shards: ShardSet) -> CommittedDataset:
    """Return the rows of a committed set. Raises DataError if the set has lost files or is empty."""
    manifest = require_rows(shards).manifest
    problem = missing_file(shards, models=False)  # of which a stream deletes one at each append; rows need none
    if problem:
        raise DataError(f"{problem}; the set is damaged")
    try:
        return _dataset(shards, manifest)
    except ValueError as fault:
        raise DataError(f"{shards.uri}/{NAME} is damaged: {fault}; make the set again with --overwrite") from None


def _dataset(shards: ShardSet, manifest: Manifest) -> CommittedDataset:
    """Return the dataset of a manifest. Raises ValueError if keys are missing, or chunks do not cover all ids."""
    manifest.require("chunks", "rows", "generation", "neighbourhoods")
    files_and_chunks = [(file, int(file.path.rpartition("part-")[2].partition("-")[0])) for file in shards.files()]
    chunks = manifest.chunks
    if not all(len(chunk) == 2 and chunk[0] <= chunk[1] for chunk in chunks):
        raise ValueError("chunks are not ranges of ids")
    # Rows that no chunk covers would be left out of every set that is made of this one.
    ends = [0, *(last for _, last in chunks)]
    if ends[:-1] != [first for first, _ in chunks] or ends[-1] != manifest.rows:
        raise ValueError(f"chunks do not cover the ids from 0 to {manifest.rows}")
    return CommittedDataset(
        store=shards.store,
        uri=shards.uri,
        format="shards",
        files=tuple(DataFile(f"{shards.uri}/{file.path}", file.bytes, 0, file.rows) for file, _ in files_and_chunks),
        layout=layout_of(manifest),
        generation=manifest.generation,
        total=manifest.rows,
        num_workers=shards.num_workers,
        chunks=tuple((low, high) for low, high in chunks),
        file_chunks=tuple(chunk for _, chunk in files_and_chunks),
        neighbourhoods=manifest.neighbourhoods is not None,
    )


def layout_of(manifest: Manifest) -> Layout:
    """Return the layout of a committed set's rows.

    Raises ValueError if the manifest does not describe labels and images, or if a shape, type or number of classes is
    invalid or too large."""
    manifest.require("labels", "image")
    columns = manifest.labels.columns
    image = manifest.image
    if len(image.shape) != 3 or min(image.shape) < 1 or image.dtype not in DTYPES:
        raise ValueError(f"images of {image.dtype} in the shape {image.shape}")
    if math.prod(image.shape) > MAX_IMAGE_BYTES:
        raise ValueError(f"images in the shape {image.shape}, of more than {MAX_IMAGE_BYTES:,} bytes")
    # Histograms are allocated for the listed number before a row is read.
    if manifest.labels.num_classes > MAX_CLASSES:
        raise ValueError(f"labels of {manifest.labels.num_classes} classes, more than {MAX_CLASSES:,}")
    if len(manifest.labels.class_names) > manifest.labels.num_classes:
        raise ValueError(f"{len(manifest.labels.class_names)} names of {manifest.labels.num_classes} classes")
    return Layout(
        image.chw,
        manifest.labels.num_classes,
        20 if "coarse_label" in columns else None,
        cast(Dtype, image.dtype),
        "target" in columns,
        "label" in columns,
        attributes=_kept_columns(manifest),
        class_names=tuple(manifest.labels.class_names),
    )


def _kept_columns(manifest: Manifest) -> tuple[KeptColumn, ...]:
    """Return the columns that a set keeps of its input. Raises ValueError for a type that no set has."""
    for column in manifest.columns:
        if column.type not in KEPT_TYPES or column.name in OWN_COLUMNS:
            raise ValueError(f"a column {column.name!r} of {column.type!r}")
    return tuple(manifest.columns)
