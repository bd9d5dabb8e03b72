"""A committed shard set read back as a dataset, in id order: what resharding starts from. No Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import DataError
from pipeline.input.dataset import Block, Dataset
from pipeline.input.formats import Columns, DataFile
from pipeline.input.formats.base import block_rows
from pipeline.shardset.layout import Layout
from pipeline.shardset.manifest import ShardSet, missing_file, with_rows
from pipeline.shardset.schema import no_labels, raw_images

WINDOW_ROWS = 1000  # of each worker: about one row group of every file is open at a time
MOST_OPEN = 64  # files that a task keeps open; of more workers the others are opened anew for each window


@dataclass(frozen=True)
class CommittedDataset(Dataset):
    """files: one a shard file, with its chunk; chunks: the id ranges that share a chunk number."""

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
        """Owners (copy 0) in id order. Every worker's files are merged by id, a window at a time; row groups outside
        the window are skipped by their statistics. Raises DataError where an id is missing or doubled."""
        window = WINDOW_ROWS * self.num_workers
        for chunk, (first, last) in enumerate(self.chunks):
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            files = [file for file, at in zip(self.files, self.file_chunks, strict=True) if at == chunk]
            kept = {file.path: self._open(file) for file in files[:MOST_OPEN]}
            for begin in range(low, high, window):
                end = min(begin + window, high)
                table = pa.concat_tables([self._window(file, kept, begin, end, images) for file in files])
                ids = table.column("id").to_numpy()
                order = np.argsort(ids)
                if not np.array_equal(ids[order], np.arange(begin, end)):
                    raise DataError(f"{self.uri}: ids {begin}..{end - 1} are not each there once; the set is damaged")
                yield from self._blocks(table.take(pa.array(order)), images)

    def _open(self, file: DataFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.store.open(file.path))
        except (pa.ArrowInvalid, FileNotFoundError) as error:
            raise DataError(f"{file.path}: {str(error).splitlines()[0]}") from None

    def _window(
        self, file: DataFile, kept: Mapping[str, pq.ParquetFile], begin: int, end: int, images: bool
    ) -> pa.Table:
        """Return one file's owners with begin <= id < end."""
        parquet = kept.get(file.path) or self._open(file)
        try:
            return self._owners(file, parquet, begin, end, images)
        finally:
            if file.path not in kept:
                parquet.close(force=True)

    def _owners(self, file: DataFile, parquet: pq.ParquetFile, begin: int, end: int, images: bool) -> pa.Table:
        names = [name for name in parquet.schema_arrow.names if images or name != "image"]
        groups = []
        for group in range(parquet.num_row_groups):
            statistics = parquet.metadata.row_group(group).column(0).statistics
            if statistics.min < end and statistics.max >= begin:
                groups.append(group)
        try:
            table = parquet.read_row_groups(groups, columns=names)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file.path} is damaged: {str(error).splitlines()[0]}") from None
        ids = table.column("id")
        inside = pc.and_(pc.greater_equal(ids, begin), pc.less(ids, end))
        return table.filter(pc.and_(inside, pc.equal(table.column("copy"), 0)))

    def _blocks(self, table: pa.Table, images: bool) -> Iterator[Block]:
        def column(part: pa.Table, name: str) -> Any:
            return part.column(name).to_numpy() if name in table.schema.names else None

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
                ),
            )


def committed_dataset(shards: ShardSet) -> CommittedDataset:
    """The rows of a committed set. Raises DataError for a set that has lost files or is empty."""
    manifest = with_rows(shards).manifest
    problem = missing_file(shards)
    if problem:
        raise DataError(f"{problem}; the set is damaged")
    listed = [(file, int(file.path.rpartition("part-")[2].partition("-")[0])) for file in shards.files()]
    return CommittedDataset(
        store=shards.store,
        uri=shards.uri,
        format="shards",
        files=tuple(DataFile(f"{shards.uri}/{file.path}", file.bytes, 0, file.rows) for file, _ in listed),
        layout=layout_of(manifest),
        generation=manifest["generation"],
        total=manifest["rows"],
        num_workers=shards.num_workers,
        chunks=tuple((low, high) for low, high in manifest["chunks"]),
        file_chunks=tuple(chunk for _, chunk in listed),
        neighbourhoods=manifest["neighbourhoods"] is not None,
    )


def layout_of(manifest: dict[str, Any]) -> Layout:
    """What a row of a committed set looks like."""
    columns = manifest["labels"]["columns"]
    return Layout(
        tuple(manifest["image"]["shape"]),
        manifest["labels"]["num_classes"],
        20 if "coarse_label" in columns else None,
        manifest["image"]["dtype"],
        "target" in columns,
        "label" in columns,
    )
