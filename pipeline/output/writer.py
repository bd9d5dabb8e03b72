"""Writing one chunk of rows as one Parquet file per worker, by one task in a single pass: place, split, write, hash.

Images are copied from the input straight to their worker's file; for very many workers see spill.py. Row groups have
about 1,000 rows, so that a reader who samples needs milliseconds. Values are plain and uncompressed, because
photographs do not compress and readers memory-map them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.assignment.chunks import row_group_rows, workers_per_task
from pipeline.assignment.ranks import runs_of_equal_keys
from pipeline.core.arrays import Ints
from pipeline.core.hashing import row_hashes
from pipeline.core.shardset.attempt import make_task_folder
from pipeline.core.shardset.schema import (
    OWN_COLUMNS,
    TARGET_COLUMN,
    attribute_hash,
    no_labels,
    raw_images,
    record_schema,
)
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset
from pipeline.input.decoded import decoder_versions
from pipeline.input.records import record_batch
from pipeline.input.scan import WORD
from pipeline.output.assignment import AssignmentFile, AssignmentWriter, WorkerTotals, tally
from pipeline.output.hashing_file import HashingFile
from pipeline.output.placement import BlockDeliveries, Placement

SHARD_FOLDER = "worker={worker:03d}"
CLOSED_AT_ONCE = 4  # more wait for each other's Python


@dataclass(frozen=True)
class WrittenFile:
    """A shard file before its commit.

    Attributes:
        staged: its current path.
        path: its path under OUTPUT, without the suffix that marks the version.
        worker: index of the worker.
        rows: rows, copies included.
        copies: rows that are copies.
        bytes: size.
        sha256: hash of the contents.
        label_counts: int64 [classes].
        attribute_sum: sum of the hashes of the owned rows' kept columns.
    """

    staged: str
    path: str
    worker: int
    rows: int
    copies: int
    bytes: int
    sha256: str
    label_counts: Ints
    attribute_sum: int = 0


@dataclass(frozen=True)
class WrittenChunk:
    """The files of one chunk.

    Attributes:
        files: one per worker that has rows.
        rows: number of owned rows (copy 0).
        fingerprint: sum of the owned rows' hashes, as they were passed to Parquet, to compare with the scan.
        assignment: the assignment file, or None.
        versions: versions of the libraries that decoded the rows; one if all hosts have the same.
    """

    files: list[WrittenFile]
    rows: int
    fingerprint: int
    assignment: AssignmentFile | None = None
    versions: frozenset[str] = field(default_factory=lambda: frozenset({decoder_versions()}))

    @property
    def attribute_sum(self) -> int:
        """The sum of the hashes of the owned rows' kept columns, to compare with the scan."""
        return sum(file.attribute_sum for file in self.files) & WORD


@dataclass
class ShardWriter:
    """A writer of one worker's file of one chunk.

    It buffers batches and writes row groups of 0.75 to 1.5 times ``group_rows``; a file with fewer rows has one smaller
    group.

    Attributes:
        store: reaches the attempt.
        staged: path of the file until the commit.
        path: its path under OUTPUT, without the suffix that marks the version.
        worker: index of the worker.
        schema: columns of the file.
        num_classes: classes of the labels.
        group_rows: rows per row group.
        record_bytes: bytes of an image.
    """

    store: Store
    staged: str
    path: str
    worker: int
    schema: pa.Schema
    num_classes: int
    group_rows: int
    record_bytes: int

    def __post_init__(self) -> None:
        """Create the file at its staged path."""
        self.file = HashingFile(self.store.create(self.staged))
        # Plain and uncompressed, because photographs do not compress and readers memory-map them.
        self.writer = pq.ParquetWriter(
            self.file,
            self.schema,
            compression="none",
            use_dictionary=False,
            write_statistics=[name for name in self.schema.names if name != "image"],
            store_schema=True,
        )
        self.batches: list[pa.RecordBatch] = []
        self.buffered = self.rows = self.copies = self.fingerprint = self.attribute_sum = 0
        self.attribute_names = [name for name in self.schema.names if name not in OWN_COLUMNS]
        self.label_counts = np.zeros(self.num_classes, np.int64)

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows to the file. Full row groups are written at once, the rest is buffered."""
        self.batches.append(batch)
        self.buffered += len(batch)
        self.rows += len(batch)
        copies = int(np.count_nonzero(batch.column("copy").to_numpy()))
        # The hashes leave out copies (copy > 0): the scan, with which they are compared, has seen each row once.
        owners = batch.filter(pc.equal(batch.column("copy"), 0)) if copies else batch
        self.copies += copies
        self.fingerprint = (self.fingerprint + batch_fingerprint(owners, self.record_bytes, self.path)) & WORD
        columns = {name: owners.column(name) for name in self.attribute_names}
        self.attribute_sum = (self.attribute_sum + attribute_hash(owners.column("id").to_numpy(), columns)) & WORD
        self.label_counts += np.bincount(labels_of(batch), minlength=self.num_classes)
        while self.buffered >= 2 * self.group_rows:
            self._write(self.group_rows)

    def _write(self, rows: int) -> None:
        """Write the first ``rows`` buffered rows as one row group."""
        table = pa.Table.from_batches(self.batches, self.schema)
        self.writer.write_table(table.slice(0, rows), row_group_size=rows)
        self.batches = table.slice(rows).to_batches()
        self.buffered -= rows

    def close(self) -> WrittenFile:
        """Write the buffered rows, close the file and return its description."""
        # Two halves instead of one full and one tiny row group.
        if self.buffered > 1.5 * self.group_rows:
            self._write(self.buffered // 2)
        if self.buffered:
            self._write(self.buffered)
        self.writer.close()
        self.file.close()
        return WrittenFile(
            self.staged,
            self.path,
            self.worker,
            self.rows,
            self.copies,
            self.file.bytes,
            self.file.digest.hexdigest(),
            self.label_counts,
            self.attribute_sum,
        )


@dataclass(frozen=True)
class AssignedChunk:
    """A chunk of which only the assignment is written."""

    file: AssignmentFile
    tally: WorkerTotals


@dataclass(frozen=True)
class ChunkJob:
    """The data that a task needs to write any chunk. Picklable.

    Attributes:
        dataset: the rows.
        placement: decides which workers get a row.
        bounds: id ranges of the chunks.
        staging: the attempt's folder.
        num_classes: classes of the labels.
        folder: pattern of a worker's folder under OUTPUT.
        first: number of the first chunk; greater than 0 if the set already has some.
    """

    dataset: Dataset
    placement: Placement
    bounds: list[tuple[int, int]]
    staging: str
    num_classes: int
    folder: str = SHARD_FOLDER
    first: int = 0

    @property
    def schema(self) -> pa.Schema:
        return record_schema(self.dataset.layout, neighbourhood=self.placement.neighbourhoods)

    @property
    def keeps_assignment(self) -> bool:
        """True if assignment lines are written too; evaluation rows have none."""
        return self.folder == SHARD_FOLDER

    def write(self, chunk: int, task: str) -> WrittenChunk:
        """Write one chunk. task: a name unique to this try, so that retried or speculative tasks do not share files."""
        schema = self.schema
        writers = dict[int, ShardWriter]()
        lines = self.open_assignment(chunk, task) if self.keeps_assignment else None
        for deliveries in self.place_blocks(chunk):
            block, groups, rows, workers, copies = deliveries
            extra = {"neighbourhood": groups} if self.placement.neighbourhoods else {}
            for worker, first, end in runs_of_equal_keys(workers):
                some = rows[first:end]
                batch = record_batch(
                    schema, block, some, copy=copies[first:end], **{k: v[some] for k, v in extra.items()}
                )
                # Opened at the first row, so that workers without rows have no file.
                if worker not in writers:
                    writers[worker] = self.open(worker, chunk, task, schema)
                writers[worker].append(batch)
            if lines:
                lines.append(deliveries)
        return replace(close_writers(writers), assignment=lines.close() if lines else None)

    def assign(self, chunk: int, task: str) -> AssignedChunk:
        """Write only the assignment of one chunk. Images are read only if the grouping needs them."""
        lines = self.open_assignment(chunk, task)
        workers = self.placement.num_workers
        layout = self.dataset.layout
        # A chunk of very large images may have no rows.
        none = np.zeros(workers, np.int64)
        total = WorkerTotals(none, none, np.zeros((workers, self.num_classes), np.int64))
        for deliveries in self.place_blocks(chunk, images=self.placement.reads_images):
            lines.append(deliveries)
            total += tally(deliveries, workers, self.num_classes, layout)
        return AssignedChunk(lines.close(), total)

    def place_blocks(self, chunk: int, *, images: bool = True) -> Iterator[BlockDeliveries]:
        """Return the blocks of a chunk with their deliveries, in id order."""
        return self.placement.deliveries(chunk, self.dataset.read(*self.bounds[chunk], images=images))

    def open_assignment(self, chunk: int, task: str) -> AssignmentWriter:
        make_task_folder(self.dataset.store, f"{self.staging}/{task}")
        return AssignmentWriter(self.dataset.store, f"{self.staging}/{task}/assignment.parquet", self.first + chunk)

    def open(self, worker: int, chunk: int, task: str, schema: pa.Schema) -> ShardWriter:
        """Create the staged file of a chunk for one worker, and return its writer.

        Args:
            worker: number of the worker.
            chunk: number of the chunk in this run, from 0.
            task: name of the task's folder in the attempt.
            schema: columns of the file.
        """
        size = self.dataset.record_bytes
        store = self.dataset.store
        path = f"{self.folder.format(worker=worker)}/part-{self.first + chunk:05d}.parquet"
        staged = f"{self.staging}/{task}/{path.replace('/', '-')}"
        make_task_folder(store, f"{self.staging}/{task}")
        group_rows = row_group_rows(workers_per_task(self.placement.num_workers, size), size)
        return ShardWriter(store, staged, path, worker, schema, self.num_classes, group_rows, size)


def close_writers(writers: Mapping[int, ShardWriter]) -> WrittenChunk:
    """Close all files of a task, CLOSED_AT_ONCE at a time, and return their chunk with the files by worker."""
    # To close a file takes a disk or a server milliseconds, in which the task would only wait.
    with ThreadPoolExecutor(CLOSED_AT_ONCE) as pool:
        files = list(pool.map(ShardWriter.close, (writers[worker] for worker in sorted(writers))))
    count = sum(file.rows - file.copies for file in files)
    return WrittenChunk(files, count, sum(writer.fingerprint for writer in writers.values()) & WORD)


def labels_of(batch: pa.RecordBatch) -> npt.NDArray[np.int32]:
    return batch.column("label").to_numpy() if "label" in batch.schema.names else no_labels(len(batch))


def batch_fingerprint(batch: pa.RecordBatch, record_bytes: int, path: str) -> int:
    """Return the sum of ``row_hashes`` over rows in Arrow's memory, just before they are written to ``path``."""
    names = batch.schema.names
    coarse = batch.column("coarse_label").to_numpy() if "coarse_label" in names else None
    targets = batch.column(TARGET_COLUMN).to_numpy() if TARGET_COLUMN in names else None
    images = raw_images(batch.column("image"), record_bytes, path, 0)
    hashes = row_hashes(batch.column("id").to_numpy(), labels_of(batch), coarse, targets, images)
    with np.errstate(over="ignore"):
        return int(hashes.sum())
