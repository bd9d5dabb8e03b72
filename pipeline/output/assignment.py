"""The assignment as files of its own: OUTPUT/_assignment/*.parquet with id, worker, copy and group, by id, then copy.

About 1.5 bytes per row. It is written with every set, by the tasks that read the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Ints
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import no_labels
from pipeline.core.storage.store import Store
from pipeline.output.hashing_file import HashingFile
from pipeline.output.placement import BlockDeliveries

FOLDER = "_assignment"
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("worker", pa.int32(), nullable=False),
        pa.field("copy", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
    ]
)
ROW_GROUP_ROWS = 1 << 17


@dataclass(frozen=True)
class AssignmentFile:
    """The assignment file of one chunk.

    staged: its current path; path: its path under OUTPUT, without the suffix that marks the version."""

    staged: str
    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class WorkerTotals:
    """The totals of each worker in a chunk: rows and copies int64 [workers], label_counts int64 [workers, classes]."""

    rows: Ints
    copies: Ints
    label_counts: Ints

    def __add__(self, other: WorkerTotals) -> WorkerTotals:
        return WorkerTotals(self.rows + other.rows, self.copies + other.copies, self.label_counts + other.label_counts)


def lines_of(deliveries: BlockDeliveries) -> pa.RecordBatch:
    """Return the assignment lines of a block, by row, then copy."""
    order = deliveries.row_order
    rows = deliveries.rows[order]
    columns = (deliveries.block.ids[rows], deliveries.workers[order], deliveries.copies[order], deliveries.groups[rows])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class AssignmentWriter:
    """A writer of the assignment lines of one chunk, which buffers up to one row group."""

    def __init__(self, store: Store, staged: str, chunk: int) -> None:
        self.staged = staged
        self.path = f"{FOLDER}/part-{chunk:05d}.parquet"
        self.file = HashingFile(store.create(staged))
        self.writer = pq.ParquetWriter(
            self.file,
            SCHEMA,
            compression="zstd",
            use_dictionary=["worker", "copy", "group"],
            column_encoding={"id": "DELTA_BINARY_PACKED"},
        )
        self.batches: list[pa.RecordBatch] = []
        self.buffered = self.rows = 0

    def append(self, deliveries: BlockDeliveries) -> None:
        """Add the lines of a block, and write a row group once enough lines are buffered."""
        self.batches.append(lines_of(deliveries))
        self.buffered += len(deliveries.rows)
        self.rows += len(deliveries.rows)
        if self.buffered >= ROW_GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        self.writer.write_table(pa.Table.from_batches(self.batches, SCHEMA), row_group_size=self.buffered)
        self.batches = []
        self.buffered = 0

    def close(self) -> AssignmentFile:
        """Write the buffered lines, close the file and return its description."""
        if self.buffered:
            self._write()
        self.writer.close()
        self.file.close()
        return AssignmentFile(self.staged, self.path, self.rows, self.file.bytes, self.file.digest.hexdigest())


def tally(deliveries: BlockDeliveries, num_workers: int, num_classes: int, layout: Layout) -> WorkerTotals:
    """Return the totals of each worker in a block.

    Args:
        deliveries: the deliveries of the block.
        num_workers: n.
        num_classes: classes of the labels; rows without labels count as class 0.
        layout: the layout of the rows.
    """
    labels = deliveries.block.labels if layout.labelled else no_labels(len(deliveries.block.ids))
    cells = deliveries.workers * num_classes + labels[deliveries.rows]
    counts = np.bincount(cells, minlength=num_workers * num_classes).reshape(num_workers, num_classes)
    copies = np.bincount(deliveries.workers[deliveries.copies > 0], minlength=num_workers)
    return WorkerTotals(counts.sum(axis=1), copies, counts)
